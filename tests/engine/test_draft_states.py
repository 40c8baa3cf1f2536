"""Drafts of a model with recurrent states, which cannot go back to what was confirmed: the tokens without drafts, from
nodes apart, from a cache that is too small, behind a prefix, and handed over."""

import pytest

from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from tests.engine.driving import collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster
from tests.engine.phased import Phased
from tests.engine.told_drafts import tell_nodes

LENGTHS = (5, 41, 90, 120)
ASKED = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
SMALL = {"max_batch_tokens": 32, "prefill_tokens": 32}


@pytest.fixture(scope="module")
def source(tiny_checkpoint):
    return ModelSource(str(tiny_checkpoint("qwen3-next")), "qwen3-next")


@pytest.fixture(scope="module")
def asked():
    return requests(prompts(LENGTHS), ASKED)


@pytest.fixture(scope="module")
def alone(source, asked):
    return collect(drive(colocated(source, config(**SMALL)), asked))


@pytest.fixture(autouse=True)
def told(alone, asked, monkeypatch):
    texts = [(*request.prompt_ids, *alone[request.handle]) for request in asked]
    tell_nodes(monkeypatch, texts)


@pytest.mark.slow
def test_a_cache_that_is_too_small(source, asked, alone):
    node = colocated(source, config(kv_blocks=26, **SMALL))
    assert collect(drive(node, asked)) == alone
    assert node.stats().preemptions and node.stats().drafts.accepted


@pytest.mark.slow
def test_states_at_the_ends_of_blocks_are_those_of_confirmed_tokens(source, asked, alone):
    """Blocks of 8, so that drafts pass over their ends at every place; what is found is gone on with."""
    node = colocated(source, config(**SMALL))
    assert collect(drive(node, asked)) == alone
    assert 0 < node.stats().drafts.accepted < node.stats().drafts.tokens
    for request in asked:
        text, left = (*request.prompt_ids, *alone[request.handle][:39]), SamplingParams(1, temperature=0.0)
        (event,) = drive(node, [GenerationRequest(9, text, left)])
        assert list(event.token_ids) == alone[request.handle][39:]
        assert event.cached_tokens == (len(text) - 1) // 8 * 8


@pytest.mark.slow
def test_two_by_three_in_two_micro_batches(source, asked, alone):
    cluster = LocalCluster.build(source, config(micro_batches=2, **SMALL), attention=2, experts=3)
    assert collect(cluster.run(asked)) == alone
    assert all(node.stats().drafts.accepted for node in cluster.attention)


@pytest.mark.slow
@pytest.mark.parametrize("faulty", [0.0, 0.3])
def test_prompts_of_a_prefill_node(source, asked, alone, faulty):
    made = config(micro_batches=2, **SMALL)
    world = Phased(LocalCluster.build(source, made, attention=2, experts=2), 1, faulty=faulty)
    for request in asked:
        world.submit(request, world.prefilling[0], world.decoding[0])
    world.run()
    assert [world.said[request.handle] for request in asked] == alone
    assert world.decoding[0].node.stats().drafts.accepted
