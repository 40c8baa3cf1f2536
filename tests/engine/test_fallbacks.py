"""Families run in the native library alone, prompts and decoding, in the dtypes that it knows."""

import pytest

from afserve.comm.m2n.bank import LocalBankLink
from afserve.config import ModelSource
from afserve.engine.build import build_attention_node, build_expert_bank, spec_of
from afserve.kernels.ops import open_ops
from tests.conftest import TINY
from tests.engine.driving import BRIEF, config, drive, prompts, requests

NATIVE = sorted(TINY)


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NATIVE)
def test_no_op_of_a_model_falls_back(name, dtype, tiny_checkpoint):
    pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
    source, ops = ModelSource(str(tiny_checkpoint(name)), name, dtype=dtype), open_ops("cpu", 1)
    spec = spec_of(source)
    held = [(layer, e, e) for layer in range(spec.moe_layers) for e in range(spec.experts)]
    bank = build_expert_bank(source, held, spec.experts, ops=ops)
    node = build_attention_node(source, config(max_batch_tokens=12), LocalBankLink(bank), ops=ops)
    assert drive(node, requests(prompts(), BRIEF))
    assert ops.fallbacks() == ()
