"""The engine against transformers, every family, odd shapes: prefill logits and greedy tokens."""

import pytest
import torch

from afserve.comm.bank import LocalBankLink
from afserve.config import EngineConfig, ModelSource
from afserve.engine.build import build_attention_node, build_expert_bank, spec_of
from afserve.engine.request import GenerationRequest, SamplingParams

from tests.conftest import TINY


def prompts(vocab, lengths=(5, 17, 33)):
    generator = torch.Generator().manual_seed(7)
    return [tuple(torch.randint(3, vocab, (n,), generator=generator).tolist()) for n in lengths]


def oracle_greedy(model, prompt, count):
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=count, do_sample=False, use_cache=True)
    return out[0, len(prompt) :].tolist()


def colocated(folder, **config):
    source = ModelSource(str(folder), "tiny")
    spec = spec_of(source)
    held = [(l, e, e) for l in range(spec.moe_layers) for e in range(spec.experts)]
    bank = build_expert_bank(source, held, spec.experts)
    fields = {
        "max_model_len": 200,
        "kv_blocks": 64,
        "block_size": 8,
        "max_batch_tokens": 64,
        "micro_batches": 1,
    }
    return build_attention_node(source, EngineConfig(**{**fields, **config}), LocalBankLink(bank))


def run(node, requests):
    for request in requests:
        node.submit(request)
    out = {r.request_id: [] for r in requests}
    for _ in range(5000):
        for event in node.step():
            assert event.error is None
            out[event.request_id] += event.token_ids
        node.check()
        if not node.busy:
            return out
    raise AssertionError("the engine did not finish")


@pytest.mark.parametrize("name", sorted(TINY))
def test_greedy_tokens_and_logits(name, tiny_checkpoint, oracle):
    model = oracle(name)
    node = colocated(tiny_checkpoint(name))
    texts = prompts(211)
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    with torch.inference_mode():
        got = run(node, [GenerationRequest(str(i), p, params) for i, p in enumerate(texts)])
    for i, prompt in enumerate(texts):
        assert got[str(i)] == oracle_greedy(model, prompt, 64), f"{name} prompt {i}"
