"""Vectors of prompts: those of transformers, and the same in any topology, batch and cache."""

from typing import Any

import numpy as np
import pytest
import torch

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.errors import RequestError
from tests.engine.driving import GREEDY, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster

POOLED = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooled=True)


def vectors(events):
    return {event.handle: event.pooled for event in events if event.finish_reason}


@pytest.mark.parametrize("name", ["qwen3", "v3"])
def test_the_last_hidden_state(name, tiny_checkpoint, oracle):
    prompt = prompts()[2]
    node = colocated(ModelSource(str(tiny_checkpoint(name)), name), config(max_batch_tokens=10))
    (event,) = drive(node, [GenerationRequest(0, prompt, POOLED)])
    with torch.no_grad():
        truth = oracle(name).model(torch.tensor([prompt])).last_hidden_state[0, -1].double()
    got = torch.from_numpy(np.frombuffer(event.pooled, "<f4").astype(np.float64))
    assert event.queued > 0 and event.finish_reason == "length" and float(got.norm()) == pytest.approx(1)
    torch.testing.assert_close(got, truth / truth.norm(), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("topology", [(1, 1, 1), (2, 3, 2)])
def test_any_topology_batch_and_cache(topology, tiny_checkpoint):
    attention, experts, micro_batches = topology
    source = ModelSource(str(tiny_checkpoint("qwen3")), "qwen3")
    alone: dict[int, Any] = {}
    for number, prompt in enumerate(prompts()):
        alone |= vectors(drive(colocated(source, config()), [GenerationRequest(number, prompt, POOLED)]))
    cluster = LocalCluster.build(
        source, config(micro_batches=micro_batches, max_batch_tokens=12), attention=attention, experts=experts
    )
    beside = [GenerationRequest(100 + i, p, GREEDY) for i, p in enumerate(prompts())]
    events = list(cluster.run([*requests(prompts(), POOLED), *beside]))
    check({k: v for k, v in vectors(events).items() if k < 100}, alone, exact=experts == 1)
    assert not any(event.pooled for event in events if event.handle >= 100)
    check(vectors(cluster.run(requests(prompts(), POOLED))), alone, exact=experts == 1)  # prompts are cached


def check(got, wanted, *, exact):
    """Several expert nodes give several sums of float32, which are added in another order."""
    assert got.keys() == wanted.keys()
    for handle, vector in got.items():
        one, other = (np.frombuffer(v, "<f4") for v in (vector, wanted[handle]))
        np.testing.assert_allclose(one, other, rtol=0, atol=0 if exact else 1e-6)


def test_one_token_only():
    with pytest.raises(RequestError, match="pooled"):
        SamplingParams(max_tokens=2, pooled=True)
