"""Some tensors of every family and every quantised form, gone or of another shape or dtype: one line names each."""

import itertools
import random
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.errors import CheckpointError
from tests.by_day import halves
from tests.engine.driving import config
from tests.engine.test_quantised_checkpoints import FORMS
from tests.families.tiny import TINY
from tests.models.quantising import quantised

CHANGES = {
    "longer": lambda tensor: torch.cat((tensor, tensor[:1])),
    "gone": None,
    "a number": lambda tensor: torch.zeros((), dtype=tensor.dtype),
    "bool": lambda tensor: tensor.float() > 0,
    "turned": lambda tensor: tensor.unsqueeze(0),
}
NEED_NOT_BE = ("weight_shape", "g_idx")  # of what is stored; GPTQ's is only read with act-order
VISION = re.compile("vision|projector|patch_merge")  # of another part
SAME_OF_ONE = ("a number", "turned")  # a scale of a whole tensor may have either shape
FAMILIES = {model_class: name for name, (model_class, _) in reversed(TINY.items())}.values()
BY_DAY, DRAWN = 8, 20
SOME = pytest.mark.parametrize(
    "some", [slice(BY_DAY), pytest.param(slice(BY_DAY, DRAWN), marks=pytest.mark.long)]
)


def drawn(stored, seed):
    """Some of all changes of one tensor of each kind, the first of them by day: (name, what is done)."""
    kinds = {
        re.sub(r"[0-9]+", "#", name): name
        for name in stored
        if not (name.endswith(NEED_NOT_BE) or VISION.search(name))
    }
    every = [
        (name, how)
        for name, how in itertools.product(kinds.values(), CHANGES)
        if stored[name].numel() > 1 or how not in SAME_OF_ONE
    ]
    assert len(every) > 40
    return random.Random(seed).sample(every, DRAWN)


def refused(folder, stored, name, how):
    """In one line that names the tensor, or the weight that it belongs to."""
    change = CHANGES[how]
    made = {} if change is None else {name: change(stored[name]).contiguous()}
    others = {other: held for other, held in stored.items() if other != name}
    save_file(others | made, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        colocated(ModelSource(str(folder), "mutated"), config(block_size=8, kv_blocks=16))
    said = str(error.value)
    assert "\n" not in said and name.rsplit(".", 1)[0] in said, f"{name} {how}: {said}"


@pytest.mark.by_day(1)
@pytest.mark.slow
@SOME
@pytest.mark.parametrize("name", halves(FAMILIES))
def test_a_tensor_that_does_not_fit_is_named(name, some, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint(name), tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    for tensor, how in drawn(stored, name)[some]:
        refused(folder, stored, tensor, how)


@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_a_lost_expert_is_named_where_others_of_the_family_lie_together(part, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("qwen3.5"), tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    name = next(name for name in stored if name.endswith(f"experts.6.{part}_proj.weight"))
    refused(folder, stored, name, "gone")


@pytest.mark.by_day(1)
@pytest.mark.slow
@SOME
@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_tensor_that_does_not_fit_is_named(form, some, tiny_checkpoint, tmp_path):
    quantised(tiny_checkpoint("qwen3"), tmp_path, *FORMS[form])
    folder = tmp_path / "few"
    stored = load_file(folder / "model.safetensors")
    for tensor, how in drawn(stored, form)[some]:
        refused(folder, stored, tensor, how)
