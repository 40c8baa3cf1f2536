"""Experts in int8 or int4, rows in FP8, through whole clusters: the tokens of a model rounded the same way."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from afserve.comm.m2n.bank import Bank, LocalBankLink
from afserve.comm.mailbox.fp8 import dequantise, quantise
from afserve.comm.transport import WireType
from afserve.config import EngineConfig, ModelSource
from afserve.control.node import wiring
from afserve.control.wire.desired import Deployment
from afserve.engine.build import build_attention_node, build_expert_bank, colocated, layout_for, spec_of
from afserve.errors import ConfigError
from afserve.families.table import naming_of
from afserve.kernels.grouped import int4_rounded, int8_rounded
from afserve.kernels.ops import open_ops
from afserve.member import Role
from afserve.placement.placement import Placement
from tests.engine.driving import BRIEF, FAMILIES, collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster


def with_rounded_experts(folder: Path, to: Path, rounded=int8_rounded) -> ModelSource:
    """The checkpoint with the values that int8 experts have, or those that `rounded` gives, in its own dtype."""
    spec, tensors = spec_of(ModelSource(str(folder), "m")), load_file(folder / "model.safetensors")
    for layer in spec.moe_layer_ids:
        for expert in range(spec.experts):
            for name in naming_of(spec).expert(layer, expert):
                tensors[name] = rounded(tensors[name])
    shutil.copytree(folder, to)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return ModelSource(str(to), "rounded")


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_int4_experts_give_the_tokens_of_rounded_weights(name, tiny_checkpoint, tmp_path, caplog):
    pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
    source, asked = ModelSource(str(tiny_checkpoint(name)), name), requests(prompts(), BRIEF)
    rounded = with_rounded_experts(tiny_checkpoint(name), tmp_path / "rounded", int4_rounded)
    wanted = collect(drive(colocated(rounded, config()), asked))
    four = config(expert_dtype="int4")
    assert collect(LocalCluster.build(source, four, attention=1, experts=2).run(asked)) == wanted
    assert collect(drive(colocated(source, four), asked)) == wanted
    assert "expert weights are rounded to int4 in groups of 32: relative error 0.0" in caplog.text


def test_error_of_rounded_experts_is_measured(tiny_checkpoint):
    pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
    source = ModelSource(str(tiny_checkpoint("qwen3")), "m")
    spec = spec_of(source)
    found = {}
    for kept, bits in (("auto", 32), ("int8", 8), ("int4", 4.5)):
        bank = build_expert_bank(source, [(0, 0, 1), (0, 1, 2)], 2, expert_dtype=kept)
        found[kept] = bank.rounding_error
        assert bank.expert_bytes == spec.expert_parameters() * bits / 8
    eight, four = found["int8"], found["int4"]
    assert found["auto"] is None and eight is not None and four is not None
    assert 0 < eight < 0.02 < four < 0.1


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_int8_experts_give_the_tokens_of_rounded_weights(name, tiny_checkpoint, tmp_path):
    pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
    source, asked = ModelSource(str(tiny_checkpoint(name)), name), requests(prompts(), BRIEF)
    rounded = with_rounded_experts(tiny_checkpoint(name), tmp_path / "rounded")
    wanted = collect(drive(colocated(rounded, config()), asked))
    eight = config(expert_dtype="int8")
    assert collect(LocalCluster.build(source, eight, attention=1, experts=2).run(asked)) == wanted
    assert collect(drive(colocated(source, eight), asked)) == wanted
    spec = spec_of(source)
    bank = build_expert_bank(source, [], 1, expert_dtype="int8")
    assert bank.expert_bytes == spec.expert_parameters()


@pytest.mark.parametrize("kept", ["int8", "int4"])
def test_few_bits_are_refused_where_nothing_keeps_them(kept, tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint("qwen3")), "m")
    with pytest.raises(
        ConfigError, match=rf"expert_dtype: {kept} .* here are the torch kernels and torch.float32"
    ):
        build_expert_bank(source, [], 1, expert_dtype=kept, ops=open_ops("cpu", backend="torch"))
    half = ModelSource(source.path, "m", dtype="float16")
    with pytest.raises(ConfigError, match=rf"expert_dtype: {kept} .* and torch.float16"):
        build_expert_bank(half, [], 1, expert_dtype=kept)


class RowsThroughFp8(Bank):
    """A bank that gets its rows as they come off an FP8 wire."""

    def __init__(self, bank):
        self._bank = bank

    def forward(self, layer, x_RH, slot_RK, weight_RK, out_RH, add=False):
        value = torch.empty(x_RH.shape, dtype=torch.float8_e4m3fn)
        scale = torch.empty(len(x_RH), -(-x_RH.shape[1] // 128))
        quantise(x_RH, value, scale)
        self._bank.forward(layer, dequantise(value, scale), slot_RK, weight_RK, out_RH, add)


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_in_fp8_give_the_tokens_of_rounded_rows(name, dtype, tiny_checkpoint):
    source, asked = ModelSource(str(tiny_checkpoint(name)), name, dtype=dtype), requests(prompts(), BRIEF)
    spec = spec_of(source)
    held = [(layer, e, e) for layer in range(spec.moe_layers) for e in range(spec.experts)]
    link = LocalBankLink(RowsThroughFp8(build_expert_bank(source, held, spec.experts)))
    wanted = collect(drive(build_attention_node(source, config(), link), asked))
    for experts in (1, 3):
        cluster = LocalCluster.build(source, config(wire_dtype="fp8"), attention=2, experts=experts)
        assert collect(cluster.run(asked)) == wanted


def test_a_row_that_is_not_finite_arrives_so():
    rows = torch.randn(4, 200)
    rows[1, 150], rows[3, 0] = torch.nan, torch.inf
    value, scale = torch.empty(4, 200, dtype=torch.float8_e4m3fn), torch.empty(4, 2)
    quantise(rows, value, scale)
    assert dequantise(value, scale).isfinite().all(1).tolist() == [True, False, True, False]


def test_both_are_part_of_what_nodes_agree_on(tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint("v3")), "v3")
    spec = spec_of(source)
    placement = Placement.contiguous(layers=spec.moe_layers, experts=spec.experts, nodes=2)

    def layout(**fields):
        counts = {Role.ATTENTION: 1, Role.EXPERT: 2}
        engine = EngineConfig(64, 8, **fields)
        deployment = Deployment(source, engine, counts, spec.fingerprint(), placement)
        return wiring._layout(deployment, spec, placement)

    plain, bytes_each, rows = layout(), layout(expert_dtype="int8"), layout(wire_dtype="fp8")
    assert len({each.model for each in (plain, bytes_each, layout(dense_dtype="int8"))}) == 3
    assert plain.model != bytes_each.model and plain.model == rows.model
    assert plain.dispatch_wire is WireType.FLOAT32 and rows.dispatch_wire is WireType.FLOAT8
    assert layout_for(source, spec, EngineConfig(64, 8), 2).combine_wire is WireType.FLOAT32
