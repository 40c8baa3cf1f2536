"""What is launched before a node is ready counts for nothing; that it is all that serving launches: `test_variants`."""

import pytest
import torch

from afserve.comm.m2n.bank import LocalBankLink
from afserve.config import ModelSource
from afserve.engine.build import build_attention_node, build_expert_bank, spec_of
from afserve.engine.warm import warm_experts
from afserve.kernels.ops import open_ops
from tests.engine.driving import collect, config, drive, prompts, requests


@pytest.mark.parametrize("name", ["v3", "qwen3-next", "mixtral-window"])
def test_answers_and_counts_are_those_without(name, tiny_checkpoint):
    source, ops = ModelSource(str(tiny_checkpoint(name)), name), open_ops("cpu", 1)
    spec, asked, found = spec_of(source), requests(prompts((5, 11, 3))), []
    held = [(layer, expert, expert) for layer in range(spec.moe_layers) for expert in range(spec.experts)]
    for warm in (False, True):
        bank = build_expert_bank(source, held, spec.experts, ops=ops)
        if warm:
            like_TH = torch.empty((0, spec.hidden))
            assert (
                warm_experts(bank, spec.moe_layers, like_TH, spec.moe.top_k, spec.experts, 20)
                == 4 * spec.moe_layers
            )
        node = build_attention_node(source, config(), LocalBankLink(bank), ops=ops, warm=warm)
        tokens = collect(drive(node, asked))
        counts = node._load.take()
        found.append((tokens, counts.decode_LE.tolist(), counts.prefill_LE.tolist()))
    assert found[0] == found[1]
