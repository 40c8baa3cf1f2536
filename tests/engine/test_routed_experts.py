"""The experts of an answer's tokens: those of transformers' routers, and the same whatever computes the answer."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from afserve.config import ModelSource
from afserve.engine.attention_node import AttentionNode
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import SamplingParams, TokenEvent
from afserve.engine.scheduling.routed_experts import MOST_BYTES, RoutedExperts, check_size, joined, width_of
from afserve.errors import RequestError
from tests.engine.driving import collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster
from tests.engine.phased import Phased
from tests.engine.told_drafts import tell_nodes

LENGTHS = (5, 41, 90)
ASKED = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, return_routed_experts=True)
SMALL = {"max_batch_tokens": 32, "prefill_tokens": 32}


def asked(params=ASKED):
    return requests(prompts(LENGTHS), params)


def routed(events):
    """Of each request the experts of all events, which were told in time."""
    parts: dict[int, list[RoutedExperts]] = {}
    tokens: dict[int, int] = {}
    for event in events:
        assert event.error is None
        tokens[event.handle] = tokens.get(event.handle, LENGTHS[event.handle]) + len(event.token_ids)
        if event.routed is not None:
            parts.setdefault(event.handle, []).append(event.routed)
        assert sum(part.tokens for part in parts[event.handle]) == tokens[event.handle] - 1
    return [joined(parts[handle]) for handle in sorted(parts)]


@pytest.fixture(scope="module")
def source(tiny_checkpoint):
    return ModelSource(str(tiny_checkpoint("qwen3")), "qwen3")


@pytest.fixture(scope="module")
def alone(source):
    """Events of a node that computes everything itself."""
    return drive(colocated(source, config(**SMALL)), asked())


def test_they_are_those_of_transformers(source, alone, oracle):
    model, said, found = oracle("qwen3"), collect(alone), routed(alone)
    for request, tokens, experts in zip(asked(), said, found, strict=True):
        text = torch.tensor([[*request.prompt_ids, *tokens[:-1]]])
        with torch.no_grad():
            logits = model(text, output_router_logits=True).router_logits
        wanted = torch.stack([one.topk(experts.top_k).indices for one in logits], 1).numpy()
        assert experts.dtype == "uint8" and experts.shape == wanted.shape
        given = np.frombuffer(experts.data, experts.dtype).reshape(experts.shape)
        assert (given == wanted).all()


def test_who_does_not_ask_gets_none(source, alone):
    events = drive(colocated(source, config(**SMALL)), asked(replace(ASKED, return_routed_experts=False)))
    assert collect(events) == collect(alone) and not any(event.routed for event in events)


@pytest.mark.parametrize("shape", [(1, 1), (2, 3)])
def test_any_topology(source, alone, shape):
    cluster = LocalCluster.build(
        source, config(micro_batches=2, **SMALL), attention=shape[0], experts=shape[1]
    )
    assert routed(cluster.run(asked())) == routed(alone)


def test_steps_that_are_one_call_over_an_exchange(source, alone):
    from tests.engine.test_exchange import World  # which is skipped where there is no native library

    world = World(source, config(**SMALL), experts=2)
    with world.serving() as node:
        for request in asked():
            node.submit(request)
        events = []
        while node.busy:
            events += node.step()
            if node.stalled:
                node.wait(0.02)
    world.close()
    assert routed(events) == routed(alone)


def test_a_prefix_in_the_cache_is_computed_again(source, alone):
    node = colocated(source, config(**SMALL))
    for _ in range(2):
        events = drive(node, asked())
        assert routed(events) == routed(alone) and not any(event.cached_tokens for event in events)


def test_preemption_tells_nothing_twice(source, alone):
    node = colocated(source, config(kv_blocks=19, **SMALL))
    assert routed(drive(node, asked())) == routed(alone)
    assert node.stats().preemptions


@pytest.mark.parametrize("name", ["qwen3", "qwen3-next"])
def test_drafts(name, tiny_checkpoint, monkeypatch):
    """Only of tokens that were confirmed."""
    source = ModelSource(str(tiny_checkpoint(name)), name)
    plain = drive(colocated(source, config(**SMALL)), asked())
    texts = [(*r.prompt_ids, *t) for r, t in zip(asked(), collect(plain), strict=True)]
    tell_nodes(monkeypatch, texts)
    node = colocated(source, config(**SMALL))
    assert routed(drive(node, asked())) == routed(plain)
    drafts = node.stats().drafts
    assert 0 < drafts.accepted < drafts.tokens


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["ngram:4", "mtp:2"])
def test_drafts_that_the_bundled_model_s_nodes_make(draft):
    """Its layer of multi-token prediction has experts of its own, which are no part of the answer's."""
    source, wanted = ModelSource("configs/nano", "nano"), asked(replace(ASKED, max_tokens=40))
    node = colocated(source, config(draft=draft, **SMALL))
    assert routed(drive(node, wanted)) == routed(drive(colocated(source, config(**SMALL)), wanted))
    assert node.stats().drafts.accepted


@pytest.mark.parametrize("after", [0, 1, 9])
def test_a_move_goes_on_where_it_was(source, alone, after):
    """To a node that has the blocks of the prompt in its cache."""
    there = colocated(source, config(**SMALL))
    drive(there, asked(replace(ASKED, return_routed_experts=False)))
    here, request = colocated(source, config(**SMALL)), asked()[2]
    here.submit(request)
    events: list[TokenEvent] = []
    while len([token for event in events for token in event.token_ids]) < after:
        events += here.step()
    said = tuple(token for event in events for token in event.token_ids)
    moved = drive(there, [replace(request, generated=said)])
    assert bool(moved[0].cached_tokens) == bool(after)
    parts = [event.routed for event in (*events, *moved) if event.routed is not None]
    assert joined(parts) == routed(alone)[2]


def test_a_prompt_of_a_prefill_node_brings_no_row(source, alone, monkeypatch):
    """A request that goes on behind its first tokens may be handed over: the row of its last token is computed here."""
    world = Phased(LocalCluster.build(source, config(micro_batches=2, **SMALL), attention=2, experts=1), 1)
    request = replace(asked()[2], generated=tuple(collect(alone)[2][:7]))
    found: list[TokenEvent] = []
    step = AttentionNode.step

    def heard(node):
        events = step(node)
        found.extend(events if node is world.decoding[0].node else ())
        return events

    monkeypatch.setattr(AttentionNode, "step", heard)
    world.submit(request, world.prefilling[0], world.decoding[0])
    world.run()
    mine = [event for event in found if event.handle == request.handle]
    assert [token for event in mine for token in event.token_ids] == collect(alone)[2][7:]
    whole = routed(alone)[2]
    assert joined(event.routed for event in mine if event.routed is not None) == whole.last(
        whole.tokens - (LENGTHS[2] + 6)
    )
    assert world.decoding[0].moves.stats().handed == 1


def test_more_than_a_request_gets_is_refused(source, monkeypatch):
    node = colocated(source, config())
    monkeypatch.setattr("afserve.engine.scheduling.routed_experts.MOST_BYTES", 100)
    with pytest.raises(RequestError, match="return_routed_experts: 29 tokens of "):
        node.submit(asked()[0])
    assert not node.busy
    monkeypatch.undo()
    check_size(MOST_BYTES, 1)


def test_numbers_that_are_no_tokens():
    for layers, top_k, width, data in [(2, 2, 1, b"123"), (2, 2, 3, b""), (0, 2, 1, b""), (-1, -2, 1, b"12")]:
        with pytest.raises(ValueError, match="routed experts"):
            RoutedExperts(layers, top_k, width, data)
    four = RoutedExperts(1, 2, 2, bytes(range(16)))
    assert four.shape == (4, 1, 2) and four.dtype == "uint16"
    assert joined([four.first(1), four.last(3)]) == four and not four.last(0).data
    assert [width_of(n) for n in (8, 256, 257, 1 << 16, 70_000)] == [1, 1, 2, 2, 4]
