"""Answers that made room for another tenant and went on later, from real models: the tokens of each request alone."""

from dataclasses import replace

import pytest

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.scheduling import giving_way
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams, Tenant
from tests.engine.driving import FAMILIES, collect, config, drive, prompts
from tests.engine.local_cluster import LocalCluster

GREEDY = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.9, top_p=0.95, seed=11)


def asked(handle, prompt, params):
    return GenerationRequest(handle, prompt, params, tenant=Tenant("ab"[handle > 3], 1 + (handle > 3)))


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(giving_way, "AHEAD", 16)
    monkeypatch.setattr(giving_way, "MADE", 8)


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_each_request_alone(name, caching, tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint(name)), name)
    texts = prompts((9, 40, 17, 25, 33, 12))
    wanted = [
        asked(handle, text, params)
        for handle, (text, params) in enumerate(zip(texts, [GREEDY, DRAWN] * 3, strict=True))
    ]
    alone = [collect(drive(colocated(source, config()), [replace(one, handle=0)]))[0] for one in wanted]
    node = colocated(source, config(max_sequences=2, prefix_caching=caching))
    assert collect(drive(node, wanted)) == alone
    assert node.stats().preemptions >= 2 and node.stats().kv_blocks_used == 0


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_on_separate_nodes(micro_batches, tiny_checkpoint):
    source = ModelSource(str(tiny_checkpoint("v3")), "v3")
    texts = prompts((9, 40, 17, 25, 33, 12))
    wanted = [asked(handle, text, DRAWN) for handle, text in enumerate(texts)]
    few = config(max_sequences=2, micro_batches=micro_batches, kv_blocks=256)
    cluster = LocalCluster.build(source, few, attention=1, experts=2)
    many = LocalCluster.build(source, config(kv_blocks=256), attention=1, experts=2)
    assert collect(cluster.run(wanted)) == collect(many.run(wanted))
    assert cluster.attention[0].stats().preemptions and not many.attention[0].stats().preemptions
