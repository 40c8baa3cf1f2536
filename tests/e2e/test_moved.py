"""A request that moves between two attention nodes at any token gives the answer of one that stayed where it was.

What moves is what a gateway keeps: the request and the tokens so far. No KV travels; the other node computes it again.
"""

import random
from dataclasses import dataclass, field, replace

import pytest

from afserve.config import ModelSource
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams, TokenEvent, TokenLogprob
from afserve.engine.scheduling.routed_experts import RoutedExperts, joined
from afserve.launch.plan.models import CONFIGS
from afserve.server.replies.choice import ChoiceDecoder
from afserve.tokens.tokenizer import Tokenizer
from tests.conftest import TINY
from tests.engine.driving import GREEDY, config
from tests.engine.local_cluster import LocalCluster

NAMES = sorted(TINY)
VOCAB = 211
MINE, NOISE = 1, 100
IN_CI, ALL = 36, 1000
LOGPROB = 1e-5


@dataclass
class Answer:
    """What a client is told, over all nodes that the request was on."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt: tuple[TokenLogprob | None, ...] = ()
    end: tuple[str | None, int | None] = (None, None)
    routed: list[RoutedExperts] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)

    def add(self, event: TokenEvent) -> None:
        assert event.error is None
        assert not (event.prompt_logprobs and self.tokens), "the prompt is told once"
        self.tokens += event.token_ids
        self.logprobs += event.logprobs
        self.routed += () if event.routed is None else (event.routed,)
        self.prompt = self.prompt or event.prompt_logprobs
        self.end = event.finish_reason, event.stop_token_id
        self.events.append(event)


def served(cluster: LocalCluster, request: GenerationRequest, moves: list[int]) -> Answer:
    """At the first node until there are `moves[0]` tokens, then at the other until there are `moves[1]`, and so on."""
    answer, turn = Answer(), 0
    while answer.end[0] is None:
        node, until = cluster.attention[turn % 2], (*moves, 1 << 30)[turn]
        node.submit(replace(request, generated=tuple(answer.tokens)))
        while len(answer.tokens) < until and answer.end[0] is None:
            for event in cluster.step():
                if event.handle == request.handle:
                    answer.add(event)
        node.cancel(request.handle)
        while request.handle in node._scheduler.open:  # it was in flight: its late end is nobody's answer
            cluster.step()
        turn += 1
    return answer


def beside(cluster: LocalCluster, dice: random.Random) -> None:
    """Other requests at either node, so that the batches are not the same."""
    for node in cluster.attention:
        for number in range(dice.randint(0, 2)):
            prompt = tuple(dice.randrange(3, VOCAB) for _ in range(dice.randint(1, 30)))
            node.submit(
                GenerationRequest(NOISE + number, prompt, replace(GREEDY, max_tokens=dice.randint(1, 60)))
            )


def quiet(cluster: LocalCluster) -> None:
    for node in cluster.attention:
        for number in range(2):
            node.cancel(NOISE + number)
    while any(node.busy for node in cluster.attention):
        cluster.step()
    for node in cluster.attention:
        node.check()
        assert node.stats().kv_blocks_used == 0


def asked(dice: random.Random) -> GenerationRequest:
    most = dice.randint(2, 30)
    fields: dict[str, object] = {"max_tokens": most, "temperature": 0.0}
    if dice.random() < 0.7:
        fields |= {"temperature": dice.uniform(0.3, 1.5), "seed": dice.randint(-(1 << 63), (1 << 63) - 1)}
        fields |= {
            "top_p": dice.choice([1.0, 0.9]),
            "top_k": dice.choice([0, 20]),
            "min_p": dice.choice([0.0, 0.02]),
        }
    if dice.random() < 0.5:
        fields |= {"repetition_penalty": dice.choice([0.8, 1.3]), "presence_penalty": dice.choice([0.0, 0.7])}
        fields |= {"frequency_penalty": dice.choice([-0.5, 0.0, 1.1])}
    if dice.random() < 0.5:
        fields |= {
            "stop_token_ids": tuple(dice.sample(range(VOCAB), 12)),
            "min_tokens": dice.randint(0, most),
        }
    if dice.random() < 0.5:
        fields |= {"logprobs": dice.randint(0, 4), "prompt_logprobs": dice.choice([None, 0, 2])}
    if dice.random() < 0.2:
        fields |= {
            "logit_bias": tuple((token, dice.uniform(-3, 3)) for token in dice.sample(range(VOCAB), 5))
        }
    prompt = tuple(dice.randrange(3, VOCAB) for _ in range(dice.randint(1, 40)))
    return GenerationRequest(MINE, prompt, SamplingParams(**fields))  # type: ignore[arg-type]


def same_logprobs(found, wanted) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        if other is None:
            assert one is None
            continue
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=LOGPROB)
        assert [v for _, v in one.top] == pytest.approx([v for _, v in other.top], abs=LOGPROB)


def read(tokenizer: Tokenizer, answer: Answer, params: SamplingParams) -> tuple[str, int, str | None]:
    """What the server makes of the events, with stop strings: (text, tokens, reason)."""
    decoder, text, tokens = ChoiceDecoder(tokenizer, params), "", 0
    for event in answer.events:
        piece = decoder.decode_event(event)
        text, tokens = text + piece.text, tokens + piece.tokens
        if piece.finish_reason is not None:
            return text, tokens, piece.finish_reason
    raise AssertionError("the answer has no end")


@pytest.fixture(scope="module")
def cluster_of(tiny_checkpoint):
    made: dict[tuple[str, bool], LocalCluster] = {}

    def cluster(name: str, caching: bool) -> LocalCluster:
        if (name, caching) not in made:
            engine = config(micro_batches=2, max_batch_tokens=13, prefix_caching=caching)
            source = ModelSource(str(tiny_checkpoint(name)), name)
            made[name, caching] = LocalCluster.build(source, engine, attention=2, experts=2)
        return made[name, caching]

    yield cluster
    for one in made.values():
        one.close()


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(CONFIGS / "nano")


def moved_is_unmoved(number: int, cluster_of, tokenizer: Tokenizer) -> int:
    """One seeded request; how often it moved."""
    dice = random.Random(number)
    cluster = cluster_of(NAMES[number % len(NAMES)], bool(number // len(NAMES) % 2))
    request = asked(dice)
    routed = replace(request.params, return_routed_experts=number // len(NAMES) % 3 == 0)
    request = replace(request, params=routed)
    stayed = served(cluster, request, [])
    most = len(stayed.tokens) - 1
    moves = sorted(dice.randint(0, most) for _ in range(dice.choice([1, 1, 2, 3])))
    beside(cluster, dice)
    moved = served(cluster, request, moves)
    quiet(cluster)
    assert (moved.tokens, moved.end) == (stayed.tokens, stayed.end)
    assert joined(moved.routed) == joined(stayed.routed)
    assert bool(stayed.routed) == routed.return_routed_experts
    same_logprobs(moved.logprobs, stayed.logprobs)
    same_logprobs(moved.prompt, stayed.prompt)
    text, _, _ = read(tokenizer, stayed, replace(request.params, min_tokens=0))
    at = dice.randint(0, len(text))
    stops = replace(request.params, stop=(text[at : at + 3] or "never",))
    assert read(tokenizer, moved, stops) == read(tokenizer, stayed, stops)
    return len(moves)


@pytest.mark.by_day(every=2)
@pytest.mark.parametrize("name", NAMES)
def test_a_moved_request_gives_the_answer_of_an_unmoved_one(name, cluster_of, tokenizer):
    cases = [number for number in range(IN_CI) if NAMES[number % len(NAMES)] == name]
    assert sum(moved_is_unmoved(number, cluster_of, tokenizer) for number in cases) >= len(cases)


@pytest.mark.long
def test_a_thousand_moved_requests(cluster_of, tokenizer):
    for number in range(IN_CI, ALL):
        moved_is_unmoved(number, cluster_of, tokenizer)
