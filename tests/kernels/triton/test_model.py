"""Whole models on the Triton backend, through the engine, give the greedy tokens that transformers gives."""

import pytest
import torch

from afserve.comm.bank import LocalBankLink
from afserve.config import EngineConfig, ModelSource
from afserve.engine.build import build_attention_node, build_expert_bank, spec_of
from afserve.engine.request import GenerationRequest, SamplingParams
from afserve.kernels.ops import Ops
from afserve.kernels.triton_backend import TritonBackend

PROMPTS = ((5, 77, 130), (9, 8, 7, 150, 33, 21))
NEW = 3


@pytest.mark.parametrize("name", ["qwen3", "mixtral-window", "v2-groups", "v3"])
def test_greedy_tokens(device, name, tiny_checkpoint, oracle):
    source = ModelSource(str(tiny_checkpoint(name)), name)
    config = EngineConfig(
        max_model_len=32, kv_blocks=16, block_size=8, max_batch_tokens=5, micro_batches=1, device=str(device)
    )
    ops = Ops(TritonBackend(device, multiprocessors=2), device, 1)
    spec = spec_of(source)
    held = [(layer, expert, expert) for layer in range(spec.moe_layers) for expert in range(spec.experts)]
    bank = build_expert_bank(source, held, spec.experts, ops=ops)
    node = build_attention_node(source, config, LocalBankLink(bank), ops=ops)
    greedy = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(PROMPTS):
        node.submit(GenerationRequest(str(number), prompt, greedy))
    got = {str(number): [] for number in range(len(PROMPTS))}
    while node.busy:
        for event in node.step():
            assert event.error is None
            got[event.request_id] += event.token_ids
    with torch.no_grad():
        for number, prompt in enumerate(PROMPTS):
            out = oracle(name).generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
            assert got[str(number)] == out[0, len(prompt) :].tolist()
