"""How engine tests ask and listen: seeded prompts, greedy requests, and a node or cluster driven to the end."""

import torch

from afserve.config import EngineConfig
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams

NEW = 64
LENGTHS = (5, 17, 33)
FAMILIES = ("v3", "v2-groups", "qwen3", "mixtral-window", "qwen3-next", "dsa")
GREEDY = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
BRIEF = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)  # where two engines are compared


def prompts(lengths=LENGTHS, vocab=211):
    generator = torch.Generator().manual_seed(7)
    return [tuple(torch.randint(3, vocab, (n,), generator=generator).tolist()) for n in lengths]


def requests(texts, params=GREEDY):
    return [GenerationRequest(i, p, params) for i, p in enumerate(texts)]


def config(**fields):
    base = {
        "max_model_len": 200,
        "kv_blocks": 64,
        "block_size": 8,
        "max_batch_tokens": 64,
        "micro_batches": 1,
    }
    return EngineConfig(**{**base, **fields})


def collect(events):
    out: dict[int, list[int]] = {}
    for event in events:
        assert event.error is None
        out.setdefault(event.handle, []).extend(event.token_ids)
    return [out[i] for i in range(len(out))]


def drive(node, wanted):
    for request in wanted:
        node.submit(request)
    events = []
    while node.busy:
        events += node.step()
        node.check()
    return events
