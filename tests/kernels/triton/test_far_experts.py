"""A GPU with memory for some of a node's experts: the bits of one that holds all, and nothing is overwritten that a
kernel may still read, nor read before it has come."""

import os
import shutil

import pytest
import torch

from afserve.config import ModelSource
from afserve.engine.build import build_expert_bank, dtype_of, places_of, spec_of, tensors_of
from afserve.errors import CheckpointError
from afserve.families.table import naming_of
from afserve.kernels.grouped import Groups
from afserve.kernels.ops import Ops
from afserve.kernels.packed import Gating
from afserve.kernels.triton.backend import TritonBackend
from afserve.models.experts import ExpertBank
from afserve.models.tier.ahead import load_routers
from afserve.models.tier.bank import TieredBank
from tests.engine.ordered_device import OrderedDevice

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the device here is one that knows its order"
)


def everything(spec):
    return [(layer, expert, expert) for layer in range(spec.moe_layers) for expert in range(spec.experts)]


def with_few(source, ops, places, kept, in_host):
    """A bank with so many experts of each layer on a device that says who waits for whom, and that device."""
    spec, device = spec_of(source), OrderedDevice()
    tensors, naming, dtype = (
        tensors_of(source, spec, ops.device, past_cache=True),
        naming_of(spec),
        dtype_of(source, spec),
    )
    size = ExpertBank(spec, 1, ops, tensors, naming, dtype, kept).expert_bytes
    memory = places * spec.moe_layers * size
    bank = ExpertBank(spec, spec.experts, ops, tensors, naming, dtype, kept, memory, numbered=True)
    few = TieredBank(places_of(bank, device, in_host), load_routers(spec, tensors, naming, dtype, ops))
    watch(few, device)
    few.load(everything(spec), lambda done: None)
    return few, device


def watch(few, device):
    """Tell the device of whatever reads and writes a place."""
    inner, copies = few.bank, few._places._copies
    fill, forward = inner.fill, inner.forward

    def filled(layer, place, expert, **again):
        device.writes((layer, place))
        fill(layer, place, expert, **again)

    def computed(layer, x, place_RK, weight, out, add=False):
        for place in place_RK.unique().tolist():
            if place >= 0:
                device.reads((layer, place))
        forward(layer, x, place_RK, weight, out, add)

    inner.fill, inner.forward = filled, computed
    if copies is not None:
        bring = copies.bring

        def brought(layer, slot, place):
            device.writes((layer, place))
            return bring(layer, slot, place)

        copies.bring = brought


def drawn(spec, rows, dtype, draw):
    """Rows, slots and weights of a call; one choice is of nothing."""
    x = torch.randn(rows, spec.hidden, generator=draw).to(dtype)
    chosen = [torch.randperm(spec.experts, generator=draw)[: spec.top_k] for _ in range(rows)]
    slot = torch.stack(chosen).int()
    slot[0, 0] = -1
    return x, slot, torch.rand(rows, spec.top_k, generator=draw)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("in_host", [True, False])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("kept", ["float32", "int4", "fp8"])
def test_sums_have_the_same_bits(kept, rows, in_host, tiny_checkpoint, fp8_folder, device, monkeypatch):
    """In one pass or several, some rows at a time, by two queues in turns, and added to other sums."""
    monkeypatch.setattr("afserve.kernels.devices.scratch.PASSES", 1 << 11)
    ops = Ops(TritonBackend(device, multiprocessors=2), device, 1)
    folder = fp8_folder if kept == "fp8" else tiny_checkpoint("qwen3")
    source = ModelSource(str(folder), "q", dtype="auto" if kept in ("fp8", "float32") else "bfloat16")
    asked = kept if kept.startswith("int") else "auto"
    spec, draw = spec_of(source), torch.Generator().manual_seed(rows)
    whole = build_expert_bank(source, everything(spec), spec.experts, expert_dtype=asked, ops=ops)
    few, place = with_few(source, ops, spec.top_k + 1, asked, in_host)
    other = place.queue()
    for turn in range(6):
        x, slot, weight = drawn(spec, rows, dtype_of(source, spec), draw)
        before = torch.full((rows, spec.hidden), 0.25, dtype=x.dtype if turn % 2 else torch.float32)
        results = [before.clone(), before.clone()]
        layer, add = turn % spec.moe_layers, turn > 2
        whole.forward(layer, x, slot, weight, results[0], add)
        with (other if turn % 3 else place.current()).beside():
            few.forward(layer, x, slot, weight, results[1], add)
        assert torch.equal(*results)
    told = few.stats()
    assert (told.bytes_copied > 0) == (told.in_host > 0) == in_host == (told.misses == 0)
    few.close()


@pytest.mark.parametrize(
    ("int8", "int4", "bias"), [(False, None, True), (True, None, False), (False, Groups(32), True)]
)
def test_rows_of_the_tensors_are_all_there_is_of_an_expert(int8, int4, bias, device):
    """What is copied of one into another slot, of other tensors, computes the same."""
    ops, gating = Ops(TritonBackend(device, multiprocessors=2), device, 1), Gating(7.0, 1.702)
    draw = torch.Generator().manual_seed(5)
    made = [ops.empty_experts(2, 64, 32, torch.bfloat16, int8, False, bias, gating, int4) for _ in "ab"]

    def drawn(*shape):
        return torch.randn(shape, generator=draw).bfloat16()

    biases = (drawn(64), drawn(64)) if bias else (None, None)
    ops.set_expert(made[0], 0, drawn(64, 64), drawn(64, 32), *biases)
    for source, target in zip(*(one.slot_tensors for one in made), strict=True):
        target[1].copy_(source[0])
    x, weight, sums = drawn(3, 64), torch.rand(3, 1, generator=draw), [torch.zeros(3, 64) for _ in made]
    for slot, (experts, sum_RH) in enumerate(zip(made, sums, strict=True)):
        ops.expert_ffn(x, torch.full((3, 1), slot, dtype=torch.int32), weight, experts, sum_RH)
    assert sums[0].any() and torch.equal(*sums)


@pytest.mark.parametrize("in_host", [True, False])
def test_a_read_that_fails_costs_its_rows_alone(in_host, tiny_checkpoint, tmp_path, device):
    """Experts in the host's memory are not read again; a new one that cannot be read is refused."""
    folder, ops = tmp_path / "cut", Ops(TritonBackend(device, multiprocessors=2), device, 1)
    shutil.copytree(tiny_checkpoint("qwen3"), folder)
    source = ModelSource(str(folder), "q")
    spec, draw = spec_of(source), torch.Generator().manual_seed(3)
    few, _ = with_few(source, ops, spec.top_k, "auto", in_host)
    whole = build_expert_bank(source, everything(spec), spec.experts, ops=ops)
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size // 3)
    last, lost = spec.moe_layers - 1, 0
    for rows in (1, 5):
        x, slot, weight = drawn(spec, rows, torch.float32, draw)
        sums = [torch.zeros(rows, spec.hidden) for _ in range(2)]
        whole.forward(last, x, slot, weight, sums[0])
        few.forward(last, x, slot, weight, sums[1])
        spoiled = sums[1].isnan().all(1)
        lost += int(spoiled.sum())
        assert torch.equal(sums[0][~spoiled], sums[1][~spoiled])
    assert (lost == 0) == in_host
    with pytest.raises(CheckpointError):
        few.fill(last, 0, 1)
    few.close()
