"""What of each family the native library does not do: said once, and what docs/serve-a-checkpoint.md tells."""

import pytest
import torch

from afserve.config import ModelSource
from afserve.engine.scheduling.request import SamplingParams
from afserve.kernels.ops import open_ops
from afserve.kernels.routing import RouterRule, Scoring
from tests.engine.driving import collect, config, prompts, requests
from tests.engine.local_cluster import LocalCluster
from tests.families.tiny import TINY

BLOCKS = {("gqa_half", "attention to chosen blocks")}
LARGE4 = {("mla_half", "queries scaled by the logarithm of their position")}
MIXER = {("gqa_half", "scoring sparse_mixer"), ("route", "scoring sparse_mixer")}
CHUNKS = {("gqa_half", "attention in chunks")}
FALLEN = {
    "mistral-large4": LARGE4,
    "mistral-large4-odd": LARGE4,
    "minimax-m3": BLOCKS,
    "minimax-m3-odd": BLOCKS,
    "phimoe": MIXER,
    "phimoe-window": MIXER,
    "llama4": CHUNKS,
    "llama4-top2": CHUNKS,
}


@pytest.mark.parametrize("name", TINY)
def test_what_runs_in_pytorch(name, checkpoint):
    ops = open_ops("cpu", 1)
    cluster = LocalCluster.build(ModelSource(str(checkpoint(name)), name), config(block_size=8), ops=ops)
    if ops.backend_name != "native":
        pytest.skip("the native library was not built")
    assert collect(
        cluster.run(requests(prompts((9,)), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)))
    )
    fallen = {(fallback.op, fallback.reason) for fallback in ops.fallbacks()}
    assert fallen == FALLEN.get(name, set())


def test_a_chunk_that_no_context_leaves_is_no_chunk(checkpoint):
    """So Llama 4 runs in fused halves for contexts of up to a chunk."""
    ops = open_ops("cpu", 1)
    LocalCluster.build(
        ModelSource(str(checkpoint("llama4-top2")), "llama4"), config(max_model_len=8), ops=ops
    )
    assert ops.fallbacks() == ()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scoring", [Scoring.SPARSE_MIXER, Scoring.SOFTMAX])
def test_a_router_that_runs_in_pytorch_has_the_bits_of_a_row_alone(scoring, bias):
    ops, generator = open_ops("cpu", 1), torch.Generator().manual_seed(1)
    x_TH, gate_EH = (torch.randn((rows, 96), generator=generator) for rows in (33, 8))
    added = gate_EH[:, 0].contiguous() if bias else None
    rule = RouterRule(2, scoring, jitter=0.1)
    expert_TK, weight_TK = ops.route(x_TH, gate_EH, None, rule, added)
    for row in range(33):
        alone = ops.route(x_TH[row : row + 1], gate_EH, None, rule, added)
        assert torch.equal(alone[0][0], expert_TK[row]) and torch.equal(alone[1][0], weight_TK[row])
