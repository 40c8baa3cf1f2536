"""The router against float64 scores and the reference's choice, for every family's rule."""

import pytest
import torch

from afserve.kernels.ops import Ops
from afserve.kernels.reference_routed import choose as reference_choose
from afserve.kernels.routing import RouterRule, Scoring, Selection
from afserve.kernels.triton.backend import TritonBackend
from afserve.kernels.triton.config import RouterTile
from afserve.kernels.triton.router import choose, gate_like_rows, route, scores
from tests.kernels.nonfinite import layer, weights

SMALL = RouterTile(16, 16, 16, 2, 4, 1)
SIGMOID, SOFTMAX, TOPK = Scoring.SIGMOID, Scoring.SOFTMAX, Scoring.TOPK_SOFTMAX
RULES = {
    "deepseek_v3": (24, True, RouterRule(4, SIGMOID, Selection.GROUP_TOP2_SUM, 6, 3, True, 1e-20, 2.5, 0.0)),
    "deepseek_v3 closed": (
        32,
        True,
        RouterRule(8, SIGMOID, Selection.GROUP_TOP2_SUM, 8, 4, True, 1e-20, 2.5, -torch.inf),
    ),
    "deepseek_v2": (30, False, RouterRule(6, SOFTMAX, Selection.GROUP_MAX, 3, 2, False, 0.0, 16.0, 0.0)),
    "qwen3": (20, False, RouterRule(5, SOFTMAX, renormalise=True)),
    "mixtral": (8, False, RouterRule(2, SOFTMAX, renormalise=True)),
    "gpt_oss": (17, False, RouterRule(4, TOPK)),
    "minimax": (16, True, RouterRule(3, SIGMOID, renormalise=True, epsilon=1e-20, scale=1.5)),
    "all": (4, False, RouterRule(4, SOFTMAX)),
    "one expert": (1, False, RouterRule(1, SIGMOID)),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_choice(device, name, tokens):
    experts, biased, rule = RULES[name]
    torch.manual_seed(0)
    logits_TE = torch.randn(tokens, experts) * 2
    bias_E = torch.randn(experts) * 0.2 if biased else None
    parts = torch.stack((logits_TE * 0.5, logits_TE * 0.5)).to(device)
    expert_TK, weight_TK = choose(parts, None if bias_E is None else bias_E.to(device), rule)
    expected, weights = reference_choose(logits_TE.double(), bias_E, rule)
    assert expert_TK.dtype is torch.int32 and weight_TK.dtype is torch.float32
    assert torch.equal(expert_TK.cpu(), expected)
    assert torch.allclose(weight_TK.cpu().double(), weights, rtol=1e-5, atol=1e-7)


def test_ties_go_to_the_lower_expert(device):
    expert_TK, _ = choose(torch.zeros(1, 3, 12, device=device), None, RouterRule(4, SOFTMAX))
    assert expert_TK.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes NaNs with numpy
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_ids_stay_in_range_whatever_the_scores(device, value):
    part = torch.full((1, 2, 12), value, device=device)
    part[0, 1, 3:5] = 1.0
    for name in ("deepseek_v3", "qwen3", "gpt_oss"):
        _, _, rule = RULES[name]
        groups = 3 if rule.groups > 1 else 1
        rule = RouterRule(3, rule.scoring, rule.selection, groups, 1, True)
        expert_TK, _ = choose(part, None, rule)
        assert expert_TK.min() >= 0 and expert_TK.max() < 12
        assert all(len(set(chosen)) == 3 for chosen in expert_TK.tolist())


@pytest.mark.parametrize(
    ("x_dtype", "gate_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)],
)
@pytest.mark.parametrize(("tokens", "hidden", "experts"), [(0, 32, 8), (1, 5, 3), (18, 72, 20)])
def test_scores(device, x_dtype, gate_dtype, tokens, hidden, experts):
    torch.manual_seed(1)
    x, gate = torch.randn(tokens, hidden).to(x_dtype), torch.randn(experts, hidden).to(gate_dtype)
    got = scores(x.to(device), gate.to(device), SMALL).cpu()
    assert got.shape[0] <= SMALL.parts
    assert torch.allclose(got.sum(0).double(), x.double() @ gate.double().t(), rtol=1e-5, atol=1e-4)


def test_a_row_does_not_depend_on_the_batch(device):
    torch.manual_seed(2)
    x, gate = torch.randn(18, 64).bfloat16().to(device), torch.randn(12, 64).bfloat16().to(device)
    rule = RouterRule(3, SIGMOID, renormalise=True)
    experts, weights = route(x, gate, None, rule, SMALL)
    alone, weight = route(x[16:17].contiguous(), gate, None, rule, SMALL)
    assert torch.equal(experts[16:17], alone) and torch.equal(weights[16:17], weight)


@pytest.mark.parametrize("exact", [True, False])
def test_a_gate_is_kept_in_the_rows_dtype_where_no_bit_is_lost(device, exact):
    held = weights(torch.bfloat16, device)
    held["gate_EH"] = held["gate_EH"].float()
    if not exact:
        held["gate_EH"][1, 2] += 1e-5
    prepared = layer(Ops(TritonBackend(device, 2), device, 1), held).layer
    assert prepared.gate_EH is not None and prepared.gate_EH.float().equal(held["gate_EH"])
    assert prepared.gate_EH.dtype is (torch.bfloat16 if exact else torch.float32)


def test_rows_of_32_bits_keep_their_gate():
    gate_EH = torch.ones(3, 4)
    assert gate_like_rows(gate_EH, torch.float32) is gate_EH
