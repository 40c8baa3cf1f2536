"""Drafts change nothing: every family, drafter and topology, drafts that are never, sometimes and always right.

What is compared is all that a request is told: tokens, log-probabilities, experts, vectors, and how it ended.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from afserve.config import ModelSource
from afserve.engine.attention_node import AttentionNode
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import NO_TENANT, GenerationRequest, SamplingParams, Tenant, TokenEvent
from tests.conftest import TINY
from tests.engine.driving import FAMILIES, config
from tests.engine.known_answers import KnownAnswers
from tests.engine.local_cluster import LocalCluster
from tests.engine.phased import Phased
from tests.families import tiny

NEW, VOCAB = 20, 211
RIGHT = (0.0, 0.3, 0.7, 1.0)
PLACES = ("colocated", "1x1", "2x3", "prefill and decode")
DRAFTERS = (*RIGHT, "ngram:3", "suffix:8")
KINDS: dict[str, dict[str, Any]] = {  # of numbers
    "float32": {},
    "bfloat16": {},
    "int4": {"expert_dtype": "int4", "dense_dtype": "int8", "wire_dtype": "fp8"},
}
Drafter = float | str


@dataclass
class Told:
    """All that a request is told. Which of its tokens were cached is nobody's answer."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    routed: bytes = b""


def told(events: Iterable[TokenEvent]) -> dict[int, Told]:
    found: dict[int, Told] = {}
    for event in events:
        assert event.error is None
        one = found.setdefault(event.handle, Told())
        one.tokens += event.token_ids
        one.logprobs += event.logprobs
        one.others += [event.finish_reason, event.stop_token_id] if event.finish_reason else []
        one.others += [event.pooled] if event.pooled else []
        one.others += event.prompt_logprobs
        one.routed += b"" if event.routed is None else event.routed.data
    return found


def asked_of(dice: random.Random, count: int) -> list[GenerationRequest]:
    """Of all kinds; half of the prompts repeat themselves or go on behind a common beginning."""
    common = tuple(dice.randrange(3, VOCAB) for _ in range(19))
    found: list[GenerationRequest] = []
    while len(found) < count:
        prompt = tuple(dice.randrange(3, VOCAB) for _ in range(dice.randint(1, 30)))
        prompt = dice.choice([prompt, prompt[:6] * 5, common + prompt[:9], prompt])
        params = params_of(dice)
        extra: dict[str, Any] = {"priority": dice.choice([0, 0, 1])}
        extra |= {"cache_salt": dice.choice(["", "", "salt"])}
        extra |= {"tenant": dice.choice([NO_TENANT, Tenant("a"), Tenant("b", 2)])}
        extra |= {"prediction": dice.choice([(), (), prompt[::-1], prompt * 2])}
        if params.logprobs is not None and dice.random() < 0.3:
            params = replace(params, prompt_logprobs=1)
        params = replace(params, return_routed_experts=len(found) % 3 == 0)
        if dice.random() < 0.1:
            params, extra = SamplingParams(max_tokens=1, temperature=0.0, pooled=True), {}
        for choice in params.choices():
            found.append(GenerationRequest(len(found), prompt, choice, **extra))
    return found[:count]


def params_of(dice: random.Random) -> SamplingParams:
    ends = tuple(dice.sample(range(3, VOCAB), 12)) if dice.random() < 0.3 else ()
    fields: dict[str, Any] = {
        "max_tokens": dice.randint(1, NEW),
        "temperature": dice.choice([0.0, 0.0, 0.0, 0.7, 1.2]),
        "seed": dice.randrange(-(1 << 40), 1 << 40),
        "stop_token_ids": ends,
    }
    if dice.random() < 0.4:
        fields |= {"top_p": dice.choice([0.5, 0.9]), "top_k": dice.choice([-1, 5]), "n": dice.choice([1, 3])}
    if dice.random() < 0.3:
        fields |= {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": -0.2}
    if dice.random() < 0.2:
        fields |= {"logit_bias": tuple((dice.randrange(VOCAB), dice.choice([-100.0, 4.0])) for _ in range(5))}
    if dice.random() < 0.2:
        fields |= {"min_tokens": dice.randint(0, fields["max_tokens"])}
    if dice.random() < 0.4:
        fields |= {"logprobs": dice.choice([0, 2])}
    return SamplingParams(**fields, ignore_eos=True, draft=dice.choice([None, None, 0, 2]))


def know(nodes: Many[AttentionNode[Any]], right: Drafter, answers: Mapping[int, Told]) -> None:
    if isinstance(right, float):
        for node in nodes:
            assert node._drafting is not None
            known = KnownAnswers(lambda s: answers[s.request.handle].tokens, right)
            node._drafting._told, node._drafting._searching = [known], []


def answered(
    source: ModelSource,
    place: str,
    asked: list[GenerationRequest],
    drafter: Drafter = "off",
    known: Mapping[int, Told] = MappingProxyType({}),
    **fields: Any,
) -> dict[int, Told]:
    """What they are told there. With a number for a drafter so much is right of what is drafted of `known`."""
    several = {} if place == "colocated" else {"micro_batches": 2}
    made = config(draft=drafter if isinstance(drafter, str) else "ngram:4", **(several | fields))
    nodes: Many[AttentionNode[Any]]
    if place == "colocated":
        nodes = [colocated(source, made)]
        know(nodes, drafter, known)
        found = told(play(nodes, asked))
    else:
        attention, experts = {"1x1": (1, 1), "2x3": (2, 3), "prefill and decode": (3, 2)}[place]
        cluster = LocalCluster.build(source, made, attention=attention, experts=experts)
        nodes = cluster.attention
        know(nodes, drafter, known)
        if place == "prefill and decode":
            found = handed_over(Phased(cluster, 1), asked)
        else:
            found = told(play(nodes, asked, lambda: [expert.poll() for expert in cluster.experts]))
        cluster.close()
    drafts = [node.stats().drafts for node in nodes]
    verified, accepted = (sum(getattr(one, name) for one in drafts) for name in ("tokens", "accepted"))
    assert accepted <= verified
    if isinstance(drafter, float):
        assert verified and (accepted == 0) == (drafter == 0.0) and (accepted == verified) == (drafter == 1.0)
    elif drafter.split(":")[0] not in (
        "off",
        "ngram",
        "suffix",
    ):  # texts that do not repeat give these nothing
        assert verified
    assert all(node.stats().kv_blocks_used == 0 for node in nodes)
    return found


def play(
    nodes: Many[AttentionNode[Any]], asked: list[GenerationRequest], turn: Callable[[], object] = int
) -> list[TokenEvent]:
    for number, request in enumerate(asked):
        nodes[number % len(nodes)].submit(request)
    events: list[TokenEvent] = []
    for _ in range(100_000):
        if not any(node.busy for node in nodes):
            return events
        for node in nodes:
            events += node.step()
            node.check()
        turn()
    raise AssertionError("a hang")


def handed_over(world: Phased, asked: list[GenerationRequest]) -> dict[int, Told]:
    """That world keeps tokens alone; all events pass by here too."""
    events: list[TokenEvent] = []
    for end in world.decoding:
        end.node.step = noted(end.node.step, events)  # type: ignore[method-assign]
    for request in asked:
        world.submit(request, world.prefilling[0], world.decoding[request.handle % 2])
    world.run()
    return told(events)


def noted(step: Callable[[], list[TokenEvent]], events: list[TokenEvent]) -> Callable[[], list[TokenEvent]]:
    def stepped() -> list[TokenEvent]:
        new = step()
        events.extend(new)
        return new

    return stepped


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint, tmp_path_factory):
    made: dict[str, Path] = {}

    def source(name: str, kind: str) -> ModelSource:
        if name not in made:
            folder = made[name] = tiny_checkpoint(name) if name in TINY else tmp_path_factory.mktemp("family")
            if name not in TINY:
                tiny.build(name, folder)
        return ModelSource(str(made[name]), name, dtype="float32" if kind == "float32" else "bfloat16")

    return source


@pytest.fixture(scope="module")
def without(checkpoint):
    """Requests and what they are told without drafts, by model, place, seed, count and the type of experts. Several
    expert nodes add their parts in another order than one, which is seen in the last bits of log-probabilities."""
    found: dict[Any, tuple[list[GenerationRequest], dict[int, Told]]] = {}

    def answers(name: str, kind: str, place: str, seed: int, count: int):
        key = name, kind, place, seed, count
        if key not in found:
            asked = asked_of(random.Random(seed), count)
            found[key] = asked, answered(checkpoint(name, kind), place, asked, **KINDS[kind])
            assert any(one.routed for one in found[key][1].values())
        return found[key]

    return answers


CASES = [  # by day half of them, in which every drafter meets every kind of numbers
    pytest.param(
        name,
        [*KINDS][(at + turn) % 3],
        PLACES[(at + turn) % 4],
        drafter,
        marks=[pytest.mark.long] * ((at + 2 * turn) % 4 > 1),
    )
    for turn, name in enumerate(FAMILIES)
    for at, drafter in enumerate(DRAFTERS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "place", "drafter"), CASES)
def test_all_is_told_as_without_drafts(name, kind, place, drafter, checkpoint, without):
    asked, wanted = without(name, kind, place, len(name), 16)
    assert any(one.routed for one in wanted.values())
    assert answered(checkpoint(name, kind), place, asked, drafter, wanted, **KINDS[kind]) == wanted


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({*TINY, *tiny.TINY} - {*FAMILIES}))
def test_all_is_told_of_every_family(name, checkpoint, without):
    """40 requests of each, all drafters, kinds of numbers and places."""
    for at, (kind, place) in enumerate(product(KINDS, PLACES)):
        asked, wanted = without(name, kind, place, at, 40)
        for drafter in DRAFTERS:
            found = answered(checkpoint(name, kind), place, asked, drafter, wanted, **KINDS[kind])
            assert found == wanted, (kind, place, drafter)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "count"),
    [
        (0.7, 100),
        pytest.param("suffix", 1000, marks=pytest.mark.long),
        pytest.param(0.7, 1000, marks=pytest.mark.long),
    ],
)
def test_many_requests_are_told_as_without_drafts(drafter, count, checkpoint, without):
    """Over two attention and three expert nodes."""
    asked, wanted = without("qwen3", "float32", "2x3", count, count)
    assert len(wanted) == count
    found = answered(checkpoint("qwen3", "float32"), "2x3", asked, drafter, wanted, **KINDS["float32"])
    assert found == wanted
