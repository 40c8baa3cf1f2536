"""A config.json with fewer layers than the checkpoint: refused by name, unless what is beyond only predicts tokens."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from afserve.config import ModelSource
from afserve.engine.build import build_expert_bank, colocated
from afserve.errors import CheckpointError
from afserve.families.pattern.naming import Naming
from afserve.families.table import load_spec, naming_of
from afserve.launch.plan.models import CONFIGS
from afserve.models.layers_beyond import check_no_more_layers
from tests.engine.driving import config


def cut(folder: Path, to: Path, **fields: int) -> ModelSource:
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("training*"))
    told = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(told | fields))
    return ModelSource(str(to), "cut")


def test_fewer_layers_than_there_are_is_refused(tiny_checkpoint, tmp_path):
    source = cut(tiny_checkpoint("qwen3"), tmp_path / "cut", num_hidden_layers=2)
    for load in (lambda: colocated(source, config()), lambda: build_expert_bank(source, [(0, 0, 1)], 1)):
        with pytest.raises(CheckpointError) as refused:
            load()
        said = str(refused.value)
        assert said.startswith(
            f"{tmp_path}/cut/config.json: num_hidden_layers is 2, but the checkpoint has layer"
        )
        assert "such as model.layers.2." in said and "\n" not in said


def test_layers_that_are_two_of_ours_are_counted_as_the_checkpoint_does(tiny_checkpoint, tmp_path):
    source = cut(tiny_checkpoint("late"), tmp_path / "cut", num_layers=1)
    with pytest.raises(
        CheckpointError, match=r"num_layers is 1, but .* has layer 1 too, such as model\.layers\.1\."
    ):
        colocated(source, config())


def test_with_random_weights_the_first_layers_may_be_asked_for(tiny_checkpoint, tmp_path):
    folder = str(cut(tiny_checkpoint("qwen3"), tmp_path / "cut", num_hidden_layers=2).path)
    for layers, wanted in ((None, 2), (1, 1)):
        node = colocated(ModelSource(folder, "cut", load_format="dummy", layers=layers), config())
        assert len(node.kv._memory.layers) == wanted


@pytest.mark.slow
def test_a_module_that_predicts_tokens_is_no_layer(tmp_path):
    """nano has one behind its five layers, and says so."""
    colocated(ModelSource(str(CONFIGS / "nano"), "nano"), config())
    unsaid = cut(CONFIGS / "nano", tmp_path / "unsaid", num_nextn_predict_layers=0)
    colocated(unsaid, config())
    fewer = cut(CONFIGS / "nano", tmp_path / "fewer", num_hidden_layers=4)
    with pytest.raises(
        CheckpointError, match=r"num_hidden_layers is 4, .* has layer 4 too, such as model\.layers\.4\."
    ):
        colocated(fewer, config())


def test_a_last_layer_without_its_joining_map_is_a_layer(tmp_path):
    source = cut(CONFIGS / "nano", tmp_path / "odd")
    stored = load_file(f"{source.path}/model.safetensors")
    save_file({n: t for n, t in stored.items() if "eh_proj" not in n}, f"{source.path}/model.safetensors")
    with pytest.raises(CheckpointError, match=r"num_hidden_layers is 5, .* has layer 5 too"):
        colocated(source, config())


def test_names_of_every_kind():
    naming = Naming(stem="transformer", layers="blocks")
    names = [f"transformer.blocks.{i}.ffn.x" for i in range(12)] + [
        "mtp.layers.40.x",
        "transformer.blocks.99x.y",
    ]
    check_no_more_layers(Path("m"), names, 12, naming)
    with pytest.raises(
        CheckpointError, match=r"m/config\.json: .* is 10, .* layers up to 11 too, such as .*\.10\."
    ):
        check_no_more_layers(Path("m"), names, 10, naming)
    few = [
        f"model.layers.{i}.{part}"
        for i in range(3)
        for part in ("a.qweight", "eh_proj.qweight")[: 1 + (i > 1)]
    ]
    check_no_more_layers(Path("m"), few, 2, Naming())


def test_every_family_has_its_own_names(tiny_checkpoint):
    spec = load_spec(tiny_checkpoint("mixtral"))
    stored = load_file(tiny_checkpoint("mixtral") / "model.safetensors")
    check_no_more_layers(Path("m"), stored, spec.layers, naming_of(spec))
    with pytest.raises(CheckpointError, match=f"the checkpoint has layer {spec.layers - 1} too"):
        check_no_more_layers(Path("m"), stored, spec.layers - 1, naming_of(spec))
