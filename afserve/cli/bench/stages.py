"""Measures stage times of the real engine: attention halves, whole steps, expert calls.

An attention node runs decode steps over the link that it is given, and the link decides what a step contains. A part is
measured in turns: a few steps or calls each time it is asked, with other parts in between, so that a slow second of the
machine is in no part alone. A turn counts by its mean, because a run is the sum of its steps; of several turns the
median is taken. This file knows no planner and no processes. Shapes: T tokens, H hidden, K top-k.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Generic

import torch

from afserve.cli.bench.case import prompts
from afserve.cli.bench.marked import MarkedLink
from afserve.clock import Clock, MonotonicClock
from afserve.comm.m2n.link_contract import Link
from afserve.config import EngineConfig, ModelSource
from afserve.engine.attention_node import AttentionNode
from afserve.engine.build import AnyBank, build_expert_bank, dtype_of, spec_of, tensors_of
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.engine.step.runner import T
from afserve.families.table import naming_of
from afserve.kernels.ops import Ops
from afserve.models.decoder import AttentionModel, DecoderLayer

Row = dict[str, object]
BLOCK = 16
_CALLS = 24  # timed calls of each size, where there is one turn
_DENSE = 4  # timed calls of a dense FFN in each turn
_SLOTS = 16  # different choices of experts of each size
_PARK = 0.05
WARM = 3
"""Steps before a turn that are not timed: the first ones after other work are longer."""


@dataclass(frozen=True, slots=True)
class StepMeans:
    """Means over decode steps: seconds of one, and those in which rows were under way, `waited` of which this node did
    nothing. dispatches: of all steps."""

    seconds: float
    under_way: float
    waited: float
    dispatches: int


class Decoding(Generic[T]):
    """A node all of whose sequences decode. `go` takes the next steps, as many in all as the node was made for; where
    one call has several tokens, up to `MOST_PASSES` - 1 more."""

    def __init__(self, node: AttentionNode[T], clock: Clock) -> None:
        self._node, self._clock = node, clock

    def go(self, count: int) -> StepMeans:
        """Raises RuntimeError where the sequences end before."""
        node, before, begin, steps = self._node, self._node.stats(), self._clock.now(), 0
        while steps < count:
            steps += max(_turn(node).values(), default=0)
            if not node.busy:
                raise RuntimeError(f"requests ended after {steps} of {count} steps")
        seconds, after = self._clock.now() - begin, node.stats()
        return StepMeans(
            seconds / steps,
            (after.under_way_seconds - before.under_way_seconds) / steps,
            (after.parked_seconds - before.parked_seconds) / steps,
            after.dispatches - before.dispatches,
        )


class AttentionSide:
    """One attention side, built once; `node` gives it a cache and a link, `bank` reads all experts."""

    def __init__(self, source: ModelSource, ops: Ops, longest: int, clock: Clock | None = None) -> None:
        self.source, self.ops, self.longest = source, ops, longest
        self.spec = spec_of(source)
        self.dtype = dtype_of(source, self.spec)
        self.clock = clock or MonotonicClock()
        tensors = tensors_of(source, self.spec, ops.device)
        self.model = AttentionModel(self.spec, tensors, naming_of(self.spec), ops, self.dtype, longest)

    def bank(self) -> AnyBank:
        spec = self.spec
        held = [(layer, expert, expert) for layer in range(spec.moe_layers) for expert in range(spec.experts)]
        return build_expert_bank(self.source, held, spec.experts, ops=self.ops)

    def decode_batch(self, link: Link[T], requests: int, context: int, most: int) -> Decoding[T]:
        """One micro-batch that can take `most` steps; the contexts have `context` tokens in the middle of them."""
        return Decoding(self._filled(link, requests, max(1, context - most // 2), most), self.clock)

    def _filled(self, link: Link[T], requests: int, prompt: int, count: int) -> AttentionNode[T]:
        """A node whose sequences all have their first token, and one step more behind them."""
        longest = prompt + count + requests + 8
        config = EngineConfig(
            self.longest,
            requests * (longest // BLOCK + 2) + 1,
            block_size=BLOCK,
            micro_batches=1,
            prefix_caching=False,
            threads=self.ops.threads,
        )
        node = AttentionNode(self.model, link, config)
        params = SamplingParams(max_tokens=longest - prompt, temperature=0.0, ignore_eos=True)
        for index, ids in enumerate(prompts(self.spec.vocab_size, requests, prompt, seed=0)):
            node.submit(GenerationRequest(index, tuple(ids), params))
        started: set[int] = set()
        while len(started) < requests:
            started |= _turn(node).keys()
        while not _turn(node):
            if not node.busy:
                raise RuntimeError(
                    f"requests ended while their cache was filled: {requests} of {prompt} tokens"
                )
        return node


def _turn(node: AttentionNode[T]) -> Counter[int]:
    """As a node's own loop takes it: one turn, and a park when nothing can go on. Who got a token, and how many."""
    events = node.step()
    if node.stalled:
        node.wait(_PARK)
    return Counter(event.handle for event in events for _ in event.token_ids)


class AttentionPoint:
    """One layer's attention half, and a step outside its layers, with nobody at the other end."""

    def __init__(self, engine: AttentionSide, requests: int, context: int, steps: int, turns: int) -> None:
        self._engine, self._steps = engine, steps
        self._size: Row = {"requests": requests, "context": context}
        self.requests = requests
        self._link = MarkedLink(engine.clock, engine.spec.expert_width)
        self._decoding = engine.decode_batch(self._link, requests, context, (steps + WARM) * turns)
        self.halves: list[float] = []
        self._outside: list[float] = []

    def turn(self) -> None:
        self._decoding.go(WARM)
        self._link.clear_marks()
        step = self._decoding.go(self._steps)
        spec, left, back = self._engine.spec, self._link.left, self._link.back
        layers = spec.moe_layers
        between = [left[i] - back[i - 1] for i in range(1, len(left)) if i % layers]
        half = fmean(between) if between else step.seconds / spec.layers
        away = sum(there - here for here, there in zip(left, back, strict=True)) / self._steps
        dense = _dense_seconds(self._engine, self.requests) + (spec.layers - layers) * half
        self.halves.append(half)
        self._outside.append(step.seconds - layers * half - away - dense)

    def rows(self) -> Iterator[Row]:
        yield {"part": "attention", **self._size, "seconds": median(self.halves)}
        yield {"part": "step", **self._size, "seconds": max(median(self._outside), 1e-6)}


def _dense_seconds(engine: AttentionSide, requests: int) -> float:
    """Of all dense layers' FFNs, which the planner prices apart."""
    x_TH = torch.randn(requests, engine.spec.hidden).to(engine.dtype)
    dense = [layer for layer in engine.model.layers if layer.moe_number is None]
    return sum(timed(engine.clock, partial(_local, layer, x_TH), _DENSE) for layer in dense)


def _local(layer: DecoderLayer, x_TH: torch.Tensor, number: int) -> None:
    layer.local_ffn(x_TH, x_TH)


class ExpertCalls:
    """One layer's experts. Tokens choose among `share` of the experts; the node holds `held` of those."""

    def __init__(self, engine: AttentionSide, bank: AnyBank, tokens: int, share: float, held: float) -> None:
        spec, made = engine.spec, torch.Generator().manual_seed(tokens)
        pool = max(spec.top_k, round(share * spec.experts))
        self._engine, self._bank, self._tokens = engine, bank, tokens
        self._slots = [_slots(spec.experts, spec.top_k, tokens, pool, held, made) for _ in range(_SLOTS)]
        self._x_TH = torch.randn(tokens, spec.expert_width, generator=made).to(engine.dtype)
        self._weight_TK = torch.full((tokens, spec.top_k), 1.0 / spec.top_k)
        self._out_TH = torch.empty(tokens, spec.expert_width)
        self.turns: list[float] = []

    @property
    def median_seconds(self) -> float:
        return median(self.turns)

    def turn(self, calls: int = _CALLS) -> None:
        self.turns.append(timed(self._engine.clock, self._call, calls))

    def row(self) -> Row:
        held = [slot_TK[slot_TK >= 0] for slot_TK in self._slots]
        pairs, active = (fmean(counts) for counts in (map(len, held), (len(one.unique()) for one in held)))
        return {
            "part": "experts", "tokens": self._tokens, "rows": pairs, "active": active, "seconds": self.median_seconds
        }  # fmt: skip

    def _call(self, number: int) -> None:
        slot_TK = self._slots[number % _SLOTS]
        layer = number % self._engine.spec.moe_layers
        self._bank.forward(layer, self._x_TH, slot_TK, self._weight_TK, self._out_TH)


def _slots(
    experts: int, top_k: int, tokens: int, pool: int, held: float, made: torch.Generator
) -> torch.Tensor:
    """Each token's experts, all different, from the first `pool` of a random order; those not held are -1."""
    order = torch.randperm(experts, generator=made)[:pool]
    picked = torch.rand(tokens, pool, generator=made).argsort(1)[:, :top_k]
    slot_TK = order[picked].to(torch.int32)
    here = torch.zeros(experts, dtype=torch.bool)
    here[order[: max(1, round(held * pool))]] = True
    return torch.where(here[slot_TK.long()], slot_TK, torch.tensor(-1, dtype=torch.int32))


def timed(clock: Clock, call: Callable[[int], object], calls: int = _CALLS) -> float:
    """The mean of so many calls, after two to warm up."""
    with torch.inference_mode():
        for number in range(2):
            call(number)
        begin = clock.now()
        for number in range(calls):
            call(number + 2)
    return (clock.now() - begin) / calls
