"""A tiny DeepSeek-V3 in FP8, served by the Triton backend: its weights stay e4m3 and give what the CPU oracle gives."""

import pytest
import torch

from afserve.comm.m2n.bank import LocalBankLink
from afserve.config import EngineConfig, ModelSource
from afserve.engine.build import build_attention_node, build_expert_bank, spec_of, tensors_of
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.errors import ConfigError
from afserve.families.table import naming_of
from afserve.kernels.formats.scaled import FP8, BlockScaled, quantised_blocks
from afserve.kernels.ops import Ops
from afserve.kernels.reference import Reference
from afserve.kernels.triton.backend import TritonBackend
from afserve.models.decoder import AttentionModel
from tests.kernels.reference_fp8 import BlockReference

pytestmark = pytest.mark.usefixtures("fp8")


@pytest.fixture
def source(fp8_folder):
    return ModelSource(str(fp8_folder), "fp8", dtype="bfloat16")


def held(spec, experts):
    return [(layer, expert, expert) for layer in range(spec.moe_layers) for expert in range(experts)]


@pytest.fixture
def ops(device):
    return Ops(TritonBackend(device, multiprocessors=2), device, 1)


def test_rows_through_a_bank(device, ops, source):
    spec = spec_of(source)
    oracle = Ops(BlockReference(), torch.device("cpu"), 1)
    torch.manual_seed(0)
    x, weight = torch.randn(7, spec.hidden).bfloat16(), torch.rand(7, 2)
    slot = torch.rand(7, 3).topk(2).indices.int()
    slot[2] = -1
    got, expected = torch.empty(7, spec.hidden, device=device), torch.empty(7, spec.hidden)
    bank = build_expert_bank(source, held(spec, 3), 3, ops=ops)
    bank.forward(0, x.to(device), slot.to(device), weight.to(device), got)
    build_expert_bank(source, held(spec, 3), 3, ops=oracle).forward(0, x, slot, weight, expected)
    difference = (got.cpu() - expected).abs()
    # A sum in another order may round an activation to the next e4m3 value, or a part to the next bfloat16.
    assert difference.max() <= 0.03 * expected.abs().max() and (difference > 0).float().mean() < 0.3
    assert difference.norm() <= 0.01 * expected.norm()
    assert (got[2] == 0).all()


def test_slots_of_several_blocks(device, ops):
    """Neither side whole blocks of 128; gate's scale blocks do not run into up's."""
    oracle = Ops(BlockReference(), torch.device("cpu"), 1)
    torch.manual_seed(1)
    shapes = ((136, 160), (136, 160), (160, 136))
    blocks = [quantised_blocks(torch.randn(shape) * scale) for shape, scale in zip(shapes, (0.1, 0.4, 0.1))]
    x, slot = torch.randn(3, 160).bfloat16(), torch.ones(3, 1, dtype=torch.int32)
    outs = []
    for door, where in ((ops, device), (oracle, "cpu")):
        experts = door.empty_experts(2, 160, 136, torch.bfloat16, fp8=True)
        moved = (BlockScaled(b.q_OI.to(where), b.scale.to(where)) for b in blocks)
        door.set_expert_fp8(experts, 1, *moved)
        outs.append(torch.empty(3, 160, device=where))
        door.expert_ffn(x.to(where), slot.to(where), torch.ones(3, 1, device=where), experts, outs[-1])
    assert (outs[0].cpu() - outs[1]).norm() <= 0.01 * outs[1].norm()


def test_no_weight_is_held_twice(ops, source):
    spec = spec_of(source)
    bank = build_expert_bank(source, held(spec, 2), 2, ops=ops)
    for packed in bank._layers:
        assert packed.gate_up_EJH is None and packed.down_EHI is None
        assert packed.handle.gate_up_EJH.dtype is FP8 and packed.handle.down_EHI.dtype is FP8


def served(source, ops, kept):
    """Tokens, and the node that chose them."""
    spec, where = spec_of(source), str(ops.device)
    bank = build_expert_bank(source, held(spec, spec.experts), spec.experts, ops=ops)
    config = EngineConfig(
        max_model_len=32, kv_blocks=16, block_size=8, max_batch_tokens=5, micro_batches=1, device=where,
        dense_dtype=kept,
    )  # fmt: skip
    node = build_attention_node(source, config, LocalBankLink(bank), ops=ops)
    node.submit(
        GenerationRequest(0, (5, 77, 130), SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    )
    tokens = []
    while node.busy:
        for event in node.step():
            assert event.error is None
            tokens += event.token_ids
    return tokens, node


def test_an_engine_serves_it(device, ops, source):
    """Linear maps stay e4m3, too, but for one whose parts are no whole blocks; tokens are the oracle's."""
    expected, _ = served(source, Ops(BlockReference(), torch.device("cpu"), 1), "fp8")
    tokens, node = served(source, ops, "auto")
    assert len(tokens) == 6 and tokens == expected
    assert node.kv.dense_in_fp8


def test_which_maps_stay_as_they_are_stored(ops, source):
    spec = spec_of(source)
    tensors, naming = tensors_of(source, spec, ops.device), naming_of(spec)
    model = AttentionModel(spec, tensors, naming, ops, torch.bfloat16, 32)
    plain = AttentionModel(spec, tensors, naming, ops, torch.bfloat16, 32, dense_dtype="model")
    assert plain.layers[1]._half._prepared.layer.out.handle is None and not plain.dense_in_fp8
    layer = model.layers[1]._half._prepared.layer
    assert all(
        isinstance(one.handle, BlockScaled) for one in (layer.out, layer.q_up, model.layers[1]._ffn.maps[1])
    )
    assert layer.down.handle is None, "its parts are no whole blocks"
    assert {x.dtype for x in (layer.up_k.weight_AOI, layer.down.weight_OI, model._head.weight_OI)} == {
        torch.bfloat16
    }


def test_dense_maps_in_fp8_need_something_that_multiplies_them(source):
    told = "dense_dtype: fp8 needs Triton, a GPU of compute capability 8.9 or newer and 16-bit rows; here are the torch"
    with pytest.raises(ConfigError, match=told):
        served(source, Ops(Reference(torch.device("cpu")), torch.device("cpu"), 1), "fp8")
