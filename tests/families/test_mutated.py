"""Every kind of tensor of every family, gone or of another shape or dtype: one line that names it, no traceback."""

import itertools
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from afserve.config import ModelSource
from afserve.engine.local import colocated
from afserve.errors import CheckpointError
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


def mutated(folder):
    """For each kind of tensor two changes of one of them, in turns: its name, what was done; the folder has it then."""
    stored, seen, changes = load_file(folder / "model.safetensors"), set(), itertools.cycle(CHANGES.items())
    for name, tensor in stored.items():
        kind = re.sub(r"[0-9]+", "#", name)
        if kind in seen:
            continue
        seen.add(kind)
        for _ in range(2):
            how, change = next(changes)
            others = {other: held for other, held in stored.items() if other != name}
            made = {} if change is None else {name: change(tensor).contiguous()}
            save_file(others | made, folder / "model.safetensors", {"format": "pt"})
            yield name, how


def refused(folder, name, how):
    """In one line that names the tensor, or the weight that it belongs to."""
    with pytest.raises(CheckpointError) as error:
        colocated(ModelSource(str(folder), "mutated"), config(block_size=8, kv_blocks=16))
    said = str(error.value)
    assert "\n" not in said and name.rsplit(".", 1)[0] in said, f"{name} {how}: {said}"


@pytest.mark.parametrize("name", TINY)
def test_a_tensor_that_does_not_fit_is_named(name, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint(name), tmp_path / "model")
    tried = 0
    for tensor, how in mutated(folder):
        refused(folder, tensor, how)
        tried += 1
    assert tried > 15


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_tensor_that_does_not_fit_is_named(form, tiny_checkpoint, tmp_path):
    few, _ = quantised(tiny_checkpoint("qwen3"), tmp_path, *FORMS[form])
    folder = tmp_path / "few"
    assert few.path == str(folder)
    for tensor, how in mutated(folder):
        if not tensor.endswith(NEED_NOT_BE):
            refused(folder, tensor, how)
