"""Linear maps of an FP8 checkpoint stay in its blocks where kernels multiply those: as many as are counted before."""

from dataclasses import replace

import pytest
import torch

from afserve.coverage import ModuleNames, QuantCoverage
from afserve.families.device_shares import shares_of
from afserve.families.fp8_maps import parameters_in_blocks
from afserve.families.table import load_spec, naming_of
from afserve.kernels.ops import Ops
from afserve.models.decoder import AttentionModel
from afserve.models.devices.several import Devices
from afserve.models.weights import DummyCheckpoint
from afserve.spec_parts import DenseSpec
from tests.kernels.reference_fp8 import BlockReference

SIZES = {
    "gqa": {"heads": 8, "kv_heads": 4, "head_dim": 64, "value_dim": 64},
    "mla": {"heads": 8, "head_dim": 96, "nope_dim": 64, "rope_dim": 32, "value_dim": 64, "q_lora_rank": 128},
}
ROWS = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).bfloat16()


def widened(spec, **said):
    """With sizes of whole blocks, as a checkpoint of which only `said` is not in blocks."""
    kinds = []
    for kind in spec.kinds:
        sizes, own = SIZES[kind.attention.kind], kind.attention
        rope = own.rope and replace(own.rope, dim=sizes.get("rope_dim", sizes["head_dim"]))
        inner = {"inner": 512} if isinstance(kind.ffn, DenseSpec) else {"shared_inner": 256}
        kinds.append(
            replace(kind, attention=replace(own, rope=rope, **sizes), ffn=replace(kind.ffn, **inner))
        )
    covered = QuantCoverage("fp8", "modules_to_not_convert", **said)
    return replace(spec, hidden=256, kinds=tuple(kinds), fp8_block=(128, 128), coverage=covered)


def loaded(spec, devices, monkeypatch):
    """A model of random weights, and how many of its numbers stay in blocks."""
    ops, found = Ops(BlockReference(), torch.device("cpu"), 1), []
    pack = ops.pack_linear_fp8
    monkeypatch.setattr(
        ops, "pack_linear_fp8", lambda w, *more: found.append(w.q_OI.numel()) or pack(w, *more)
    )
    split = Devices(ops, [ops] * (devices - 1)).loading(split_head=True) if devices > 1 else None
    tensors = DummyCheckpoint(in_blocks=spec.coverage)
    return AttentionModel(spec, tensors, naming_of(spec), ops, torch.bfloat16, 32, split=split), sum(found)


@pytest.mark.parametrize("name", ["qwen3", "v3"])
def test_what_is_counted_stays(name, tiny_checkpoint, monkeypatch):
    spec = widened(load_spec(tiny_checkpoint(name)))
    one, numbers = loaded(spec, 1, monkeypatch)
    assert one.dense_in_fp8 and numbers == parameters_in_blocks(spec) > 0
    shares = shares_of(spec, 2)
    two, numbers = loaded(spec, 2, monkeypatch)
    assert numbers == sum(map(parameters_in_blocks, (shares.leading, shares.further)))
    for whole, split in zip(one.layers, two.layers, strict=True):
        expected = whole._ffn(ROWS, ROWS)
        if expected is not None:
            assert torch.allclose(expected.float(), split._ffn(ROWS, ROWS).float(), rtol=0.02, atol=1e-3)


def test_what_is_left_out_is_counted_so(tiny_checkpoint, monkeypatch):
    whole = load_spec(tiny_checkpoint("v3"))
    spec = widened(whole, left_out=ModuleNames(("self_attn",)))
    _, numbers = loaded(spec, 1, monkeypatch)
    assert numbers == parameters_in_blocks(spec) < parameters_in_blocks(widened(whole))
    assert parameters_in_blocks(replace(spec, fp8_block=(64, 64))) == 0
