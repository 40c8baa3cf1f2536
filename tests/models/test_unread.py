"""Tensors that nothing reads are said by name, unless they say nothing."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.families.pattern.naming import Naming
from afserve.launch.plan.models import CONFIGS
from afserve.models.unread import unread
from tests.engine.driving import config

STEM = "model.layers.1.self_attn."


def loaded(folder, to, extra):
    to.mkdir()
    save_file(load_file(folder / "model.safetensors") | extra, to / "model.safetensors")
    shutil.copy(folder / "config.json", to)
    return colocated(ModelSource(str(to), "made"), config()).unread


@pytest.mark.parametrize("name", ["v3", "qwen3", "mixtral"])
def test_a_checkpoint_with_nothing_beyond_is_loaded_without_a_word(name, tiny_checkpoint, tmp_path):
    tables = {f"{STEM}rotary_emb.inv_freq": torch.ones(4), f"{STEM}k_scale": torch.ones(1)}
    zeros = {f"{STEM}q_proj.bias": torch.zeros(48), "model.layers.0.mlp.none.weight": torch.zeros(0, 8)}
    assert loaded(tiny_checkpoint(name), tmp_path / "made", tables | zeros) == ""
    assert colocated(ModelSource(str(CONFIGS / "nano"), "nano"), config()).unread == ""


def test_biases_that_the_config_does_not_mention_are_named(tiny_checkpoint, tmp_path):
    extra = {f"{STEM}{part}_proj.bias": torch.ones(8) for part in "qk"}
    extra[f"{STEM}v_proj.bias"] = torch.ones((), dtype=torch.float8_e4m3fn)
    said = loaded(tiny_checkpoint("qwen3"), tmp_path / "made", extra)
    assert said.startswith(
        f"{tmp_path}/made: {STEM}k_proj.bias and 2 more tensors are not read: its config.json"
    )


def test_only_layers_of_the_model_and_no_routed_experts_are_looked_at():
    names = [
        "model.layers.0.x",
        "model.layers.10.x",
        "model.layers.1.mlp.experts.3.up_proj.bias",
        "mtp.x",
        "visual.x",
    ]
    assert unread(names, [], 2, Naming()) == ["model.layers.0.x"]
    assert unread(names, ["model.layers.0.x"], 11, Naming()) == ["model.layers.10.x"]
