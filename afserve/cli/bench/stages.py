"""Measures stage times of the real engine: attention halves, whole steps, expert calls. Medians of repeats.

An attention node runs decode steps over the link that it is given, and the link decides what a step contains. Rows are
plain values as `placement/planner/calibration.py` reads them; this file knows no planner and no processes.
Shapes: T tokens, H hidden, K top-k.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from afserve.cli.bench.case import prompts
from afserve.cli.bench.marked import MarkedLink
from afserve.clock import Clock, MonotonicClock
from afserve.comm.m2n.link import Link
from afserve.config import EngineConfig, ModelSource
from afserve.engine.attention_node import AttentionNode
from afserve.engine.build import build_expert_bank, dtype_of, spec_of, tensors_of
from afserve.engine.micro_batch import T
from afserve.engine.request import GenerationRequest, SamplingParams
from afserve.families.table import naming_of
from afserve.kernels.ops import Ops
from afserve.models.decoder import AttentionModel, DecoderLayer
from afserve.models.experts import ExpertBank

Row = dict[str, object]
BLOCK = 16
_CALLS = 24  # timed calls of each size
_PARK = 0.05


@dataclass(frozen=True, slots=True)
class Steps:
    """Medians over decode steps: seconds of one, and how long the attention node computed in it."""

    seconds: float
    busy: float


class Engine:
    """One attention side, built once; `node` gives it a cache and a link, `bank` reads all experts."""

    def __init__(self, source: ModelSource, ops: Ops, longest: int, clock: Clock | None = None) -> None:
        self.source, self.ops, self.longest = source, ops, longest
        self.spec = spec_of(source)
        self.dtype = dtype_of(source, self.spec)
        self.clock = clock or MonotonicClock()
        tensors = tensors_of(source, self.spec, ops.device)
        self.model = AttentionModel(self.spec, tensors, naming_of(self.spec), ops, self.dtype, longest)

    def bank(self) -> ExpertBank:
        spec = self.spec
        held = [(layer, expert, expert) for layer in range(spec.moe_layers) for expert in range(spec.experts)]
        return build_expert_bank(self.source, held, spec.experts, ops=self.ops)

    def steps(self, link: Link[T], requests: int, context: int, count: int) -> Steps:
        """`count` decode steps of one micro-batch whose contexts have `context` tokens on average."""
        node, seconds, busy = self._filled(link, requests, context - count // 2, count), [], []
        if isinstance(link, MarkedLink):
            link.clear()
        for _ in range(count):
            before, begin = node.stats().busy_seconds, self.clock.now()
            while not _turn(node):
                pass
            seconds.append(self.clock.now() - begin)
            busy.append(node.stats().busy_seconds - before)
        return Steps(median(seconds), median(busy))

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
            started |= _turn(node)
        while not _turn(node):
            pass
        return node


def _turn(node: AttentionNode[T]) -> set[int]:
    """As a node's own loop takes it: one turn, and a park when nothing can go on. Who got a token."""
    events = node.step()
    if node.stalled:
        node.wait(_PARK)
    return {event.handle for event in events}


def attention_rows(engine: Engine, requests: int, context: int, count: int) -> Iterator[Row]:
    """One layer's attention half, and a step outside its layers, with nobody at the other end."""
    spec = engine.spec
    link = MarkedLink(engine.clock, spec.hidden)
    step = engine.steps(link, requests, context, count)
    layers = spec.moe_layers
    between = [link.left[i] - link.back[i - 1] for i in range(1, len(link.left)) if i % layers]
    half = median(between) if between else step.seconds / spec.layers
    away = median(
        sum(link.back[i + n] - link.left[i + n] for n in range(layers))
        for i in range(0, len(link.left), layers)
    )
    dense = _dense_seconds(engine, requests) + (spec.layers - layers) * half
    outside = step.seconds - layers * half - away - dense
    yield {"part": "attention", "requests": requests, "context": context, "seconds": half}
    yield {"part": "step", "requests": requests, "context": context, "seconds": max(outside, 1e-6)}


def _dense_seconds(engine: Engine, requests: int) -> float:
    """Of all dense layers' FFNs, which the planner prices apart."""
    x_TH = torch.randn(requests, engine.spec.hidden).to(engine.dtype)
    dense = [layer for layer in engine.model.layers if layer.moe_number is None]
    return sum(timed(engine.clock, partial(_local, layer, x_TH)) for layer in dense)


def _local(layer: DecoderLayer, x_TH: torch.Tensor, number: int) -> None:
    layer.local_ffn(x_TH)


def expert_rows(engine: Engine, bank: ExpertBank, tokens: int, share: float, held: float) -> Row:
    """One layer's experts. Tokens choose among `share` of the experts; the node holds `held` of those."""
    spec, made = engine.spec, torch.Generator().manual_seed(tokens)
    pool = max(spec.top_k, round(share * spec.experts))
    slots = [_slots(spec.experts, spec.top_k, tokens, pool, held, made) for _ in range(_CALLS)]
    x_TH = torch.randn(tokens, spec.hidden, generator=made).to(engine.dtype)
    weight_TK = torch.full((tokens, spec.top_k), 1.0 / spec.top_k)
    out_TH = torch.empty(tokens, spec.hidden)

    def call(number: int) -> None:
        slot_TK = slots[number % _CALLS]
        bank.forward(number % spec.moe_layers, x_TH, slot_TK, weight_TK, out_TH)

    seconds = timed(engine.clock, call)
    pairs = sum(int((slot_TK >= 0).sum()) for slot_TK in slots) / _CALLS
    active = sum(len(slot_TK[slot_TK >= 0].unique()) for slot_TK in slots) / _CALLS
    return {"part": "experts", "tokens": tokens, "rows": pairs, "active": active, "seconds": seconds}


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


def timed(clock: Clock, call: Callable[[int], object]) -> float:
    """The median of `_CALLS` calls, after a few to warm up."""
    seconds = []
    with torch.inference_mode():
        for number in range(_CALLS + 4):
            begin = clock.now()
            call(number)
            seconds.append(clock.now() - begin)
    return median(seconds[4:])
