"""Seconds of one step of a pool that reads prompts, decodes, or does both, from the stage times of the plan.

Two kinds of pool: `Together` has the experts on its own devices (expert parallelism); `Apart` has attention only and
sends rows to expert devices, which another pool may use as well. Ranks of a pool step together: a step lasts as long as
its fullest rank needs. Only ranks that read prompts beside expert devices step each by itself; rows of theirs that meet
at a layer share a call. Closed forms are tabulated once, so that a step costs microseconds. It knows no requests and no
clock.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from afserve.config import MAX_MICRO_BATCHES
from afserve.pipeline import layer_period, step_seconds
from afserve.placement.planner.hardware import Hardware
from afserve.placement.planner.kv import USABLE, attention_weight_bytes, cache_bytes, expert_weight_bytes
from afserve.placement.planner.perf import all_to_all, attention_half, expert_half, m2n_transfer
from afserve.placement.planner.perf_attention import prefill_step
from afserve.placement.planner.perf_ffn import distinct_targets
from afserve.placement.planner.setting import Setting

Array = NDArray[np.float64]
_ROWS = np.unique(np.round(np.geomspace(1, 1 << 21, 64)))
_CONTEXTS = np.array([1.0, 512, 2048, 8192, 32768, 131072])
_LOG = math.log(1.02)
_AT = 4096.0  # rows at which the slope of a transfer is taken


@dataclass(frozen=True, slots=True)
class Work:
    """A step: `requests` decoded by the fullest rank and `all_requests` by all ranks, which have `context` tokens each;
    `tokens` of prompts on the fullest rank, that attend to `pairs` tokens in sum, and `all_tokens` on all ranks."""

    requests: float = 0.0
    all_requests: float = 0.0
    context: float = 0.0
    tokens: float = 0.0
    pairs: float = 0.0
    all_tokens: float = 0.0

    def rounded(self) -> "Work":
        """To sizes 2 % apart, requests of a rank to whole ones: so steps are alike, and are computed once."""
        return Work(
            self.requests,
            _near(self.all_requests),
            _near(self.context),
            _near(self.tokens),
            _near(self.pairs),
            _near(self.all_tokens),
        )


@dataclass(frozen=True, slots=True)
class Step:
    """`seconds` of a step; the share of them that the expert devices and the links to them are busy with it."""

    seconds: float
    experts: float = 0.0
    links: float = 0.0
    piece: float = 0.0

    def rounded(self) -> "Step":
        """What it does to another pool, in hundredths; a piece to 2 %."""
        return Step(float(self.seconds > 0), round(self.experts, 2), round(self.links, 2), _near(self.piece))


IDLE = Step(0.0)


def together(steps: Iterable[Step]) -> Step:
    """What several pools or ranks do to another pool."""
    busy = [step for step in steps if step.seconds]
    if not busy:
        return IDLE
    return Step(
        max(step.seconds for step in busy),
        min(1.0, sum(step.experts for step in busy)),
        min(1.0, sum(step.links for step in busy)),
        max(step.piece for step in busy),
    )


@dataclass(frozen=True, slots=True)
class Pieces:
    """How expert devices compute prompts while others decode: in pieces of `seconds`. Cut by `rows`, a piece reads the
    experts again, so it is longer, until calls take at most `overhead` of the rows' own time; cut at tiles, it does
    not. `floor` of the time goes to prompts that wait, at least."""

    seconds: float
    overhead: float
    floor: float
    by_rows: bool = True


class Tables:
    """The closed forms of one device kind, tabulated; an attention rank has `tensor_parallel` devices."""

    def __init__(self, setting: Setting, chip: Hardware, tensor_parallel: int = 1) -> None:
        self.setting, self.chip, self.tensor_parallel = setting, chip, tensor_parallel
        self.layers = setting.shape.experts.layers
        one = np.ones(1)
        halves = [
            attention_half(_at(setting, float(context)), chip, tensor_parallel, one, _ROWS, True)
            for context in _CONTEXTS
        ]
        self._decode = np.array([half.moe_layers for half in halves])
        self._outside = np.array([half.outside for half in halves])
        first, later = (
            prefill_step(
                setting.shape, chip, setting.curves, setting.precision, _ROWS, before, tensor_parallel
            )
            for before in (0.0, 1.0)
        )
        self._pair = float((later - first)[-1] / _ROWS[-1])
        self._rows = first - self._pair * _ROWS**2 / 2

    def attention(self, work: Work) -> tuple[float, float]:
        """(seconds of all layers, seconds outside of them): rows of both kinds share products."""
        decode = outside = shared = 0.0
        if work.requests:
            decode = self._at_context(self._decode, work)
            outside = self._at_context(self._outside, work)
            shared = float(np.interp(work.requests, _ROWS, self._rows))
        if not work.tokens:
            return decode, outside
        rows = float(np.interp(work.requests + work.tokens, _ROWS, self._rows)) - shared
        return decode + max(rows, 0.0) + self._pair * work.pairs, outside or float(self._outside[0, 0])

    def _at_context(self, table: Array, work: Work) -> float:
        above = int(np.clip(np.searchsorted(_CONTEXTS, work.context), 1, len(_CONTEXTS) - 1))
        low, high = (float(np.interp(work.requests, _ROWS, table[i])) for i in (above - 1, above))
        share = (work.context - _CONTEXTS[above - 1]) / (_CONTEXTS[above] - _CONTEXTS[above - 1])
        return low + float(share) * (high - low)

    def experts(self, devices: int) -> Array:
        """Of one layer, by tokens over all ranks (`_ROWS`)."""
        return expert_half(self.setting, self.chip, _ROWS, np.full_like(_ROWS, devices))

    def kv_tokens(self, devices: int, experts: int) -> float:
        """Tokens of caches that fit on `devices`, of which each holds 1/`experts` of the experts (0: none). Devices of
        a rank have a part of its heads each, or all where there are fewer heads than devices."""
        shape, precision = self.setting.shape, self.setting.precision
        free = self.chip.memory * USABLE - attention_weight_bytes(shape, precision, self.tensor_parallel)
        if experts:
            held = expert_weight_bytes(shape, precision, self.setting.routing, np.array([float(experts)]))
            free -= float(held[0])
        split = min(self.tensor_parallel, *(group.kv_heads for group in shape.attention))
        ranks = devices / self.tensor_parallel
        return max(0.0, ranks * split * free / cache_bytes(shape, precision, 1.0))

    def hold_experts(self, devices: int) -> bool:
        """Whether the experts fit on devices that have nothing else."""
        setting = self.setting
        held = expert_weight_bytes(
            setting.shape, setting.precision, setting.routing, np.array([float(devices)])
        )
        return bool(held[0] <= self.chip.memory * USABLE)

    def hand_over(self, tokens: float) -> float:
        """Seconds until the KV of a prompt is at another device, over the network."""
        moved = cache_bytes(self.setting.shape, self.setting.precision, tokens)
        return self.chip.network_latency + moved / self.chip.network


@dataclass(frozen=True)
class Together:
    """Ranks on `devices`, with the experts spread over these."""

    tables: Tables
    devices: int

    @cached_property
    def kv_tokens(self) -> float:
        """Tokens of caches that fit; 0 where not even the weights do."""
        return self.tables.kv_tokens(self.devices, self.devices)

    @property
    def ranks(self) -> int:
        return self.devices // self.tables.tensor_parallel

    @property
    def held(self) -> int:
        """Devices that hold its experts."""
        return self.devices

    @cached_property
    def _experts(self) -> Array:
        return self.tables.experts(self.devices)

    @cached_property
    def _wires(self) -> tuple[tuple[tuple[float, float], tuple[float, float]], ...]:
        """Per kernel, (dispatch, combine) as (seconds at no rows, seconds per row): a copy to each device that is
        chosen, or one to each host, which passes it on."""
        setting, chip = self.tables.setting, self.tables.chip
        devices = np.array([float(self.devices)])
        hosts = np.ceil(devices / max(chip.devices, 1))
        away = float(1 - 1 / hosts[0])

        def by_host(rows: float) -> tuple[float, float]:
            pair = m2n_transfer(setting, chip, chip, 1, devices, devices, np.array([rows]))
            return float(pair[0][0]), float(pair[1][0])

        def by_device(rows: float) -> tuple[float, float]:
            pair = all_to_all(setting, chip, devices, np.array([rows]))
            return float(pair[0][0]), float(pair[1][0])

        kinds = [_line(by_device)]
        if away:
            there, back = _line(by_host)
            kinds.append(((there[0], there[1] * away), (back[0], back[1] * away)))
        return tuple(kinds)

    def step(self, work: Work, other: Step = IDLE, pieces: Pieces | None = None) -> Step:
        work = work.rounded()
        if work not in self._known:
            self._known[work] = min(
                (self._step(work, count) for count in (1, 2)), key=lambda one: one.seconds
            )
        return self._known[work]

    @cached_property
    def _known(self) -> dict[Work, Step]:
        return {}

    def _step(self, work: Work, micro_batches: int) -> Step:
        part, layers = _part(work, micro_batches), self.tables.layers
        attention, outside = self.tables.attention(part)
        experts = float(np.interp(part.all_requests + part.all_tokens, _ROWS, self._experts))
        rows = (part.requests + part.tokens) / self.tables.tensor_parallel  # a device sends its part of them
        dispatch, combine = min(
            ((there[0] + there[1] * rows, back[0] + back[1] * rows) for there, back in self._wires), key=sum
        )
        if self.devices == 1:
            dispatch = combine = 0.0
        exchange = 4 * self.tables.setting.exchange * (micro_batches > 1)
        busy = attention / layers + experts + exchange
        period = layer_period(busy, 0.0, dispatch, combine, micro_batches)
        return Step(step_seconds(busy, 0.0, period, outside, layers, micro_batches))


@dataclass(frozen=True)
class Apart:
    """`ranks` attention devices that use `experts` expert devices, beside another pool or alone, with at most so many
    micro-batches."""

    tables: Tables
    ranks: int
    experts: int
    micro_batches: int = MAX_MICRO_BATCHES

    @property
    def held(self) -> int:
        """Devices that hold its experts."""
        return self.experts

    @cached_property
    def kv_tokens(self) -> float:
        """Tokens of caches that fit; 0 where not even the weights do, or the experts on theirs."""
        return self.tables.kv_tokens(self.ranks, 0) if self.tables.hold_experts(self.experts) else 0.0

    @cached_property
    def _experts(self) -> Array:
        return self.tables.experts(self.experts)

    @cached_property
    def _wires(self) -> tuple[tuple[float, float], tuple[float, float]]:
        setting, chip = self.tables.setting, self.tables.chip
        ranks, devices = np.array([float(self.ranks)]), np.array([float(self.experts)])

        def m2n(rows: float) -> tuple[float, float]:
            pair = m2n_transfer(setting, chip, chip, 1, ranks, devices, np.array([rows]))
            return float(pair[0][0]), float(pair[1][0])

        return _line(m2n)

    def step(self, work: Work, other: Step = IDLE, pieces: Pieces | None = None) -> Step:
        """`other` is the step that the other pool of these experts is in; decoding comes first. Where nothing is
        decoded it is the step of one rank, and `all_tokens` are those of all ranks that read meanwhile."""
        work, other = work.rounded(), other.rounded()
        if (work, other, pieces) not in self._known:
            found = (self._step(work, other, pieces, count) for count in range(1, self.micro_batches + 1))
            self._known[work, other, pieces] = min(found, key=lambda one: one.seconds)
        return self._known[work, other, pieces]

    @cached_property
    def _known(self) -> dict[tuple[Work, Step, Pieces | None], Step]:
        return {}

    def _step(self, work: Work, other: Step, pieces: Pieces | None, micro_batches: int) -> Step:
        part, setting, layers = _part(work, micro_batches), self.tables.setting, self.tables.layers
        seconds, outside = self.tables.attention(part)
        rows, tokens = part.requests + part.tokens, part.all_requests + part.all_tokens
        own = float(np.interp(tokens, _ROWS, self._experts))
        here = rows * float(distinct_targets(setting.shape.experts.top_k, self.experts)) / self.experts
        size, peers = np.array([rows]), np.array([float(self.experts)])
        attention = seconds / layers + float(setting.exchange_at_attention(size, peers)[0])
        own += float(setting.exchange_at_experts(np.array([here]), np.array([float(self.ranks)]))[0])
        piece = 0.0
        (there, per_there), (back, per_back) = self._wires
        wire = per_there * rows, per_back * rows
        waits, taken = 0.0, own
        if pieces is not None and part.tokens and other.seconds:
            piece, own = self._in_pieces(tokens, own, pieces)
            taken = own / max(1 - other.experts, pieces.floor)
        elif pieces is not None and other.seconds:
            waits = other.experts * other.piece / 2
            taken = own / (1 - min(pieces.floor, other.experts))
        shared = 1 + other.links  # bulk and small messages share a link evenly
        dispatch, combine = there + wire[0] * shared + waits, back + wire[1] * shared
        period = layer_period(attention, taken, dispatch, combine, micro_batches)
        step = step_seconds(attention, taken, period, outside, layers, micro_batches)
        passes = micro_batches * layers / step
        mine, near = (1.0, 1.0) if part.requests else (part.tokens / part.all_tokens, 1 / self.ranks)
        return Step(step, mine * min(1.0, own * passes), near * min(1.0, max(wire) * passes), piece)

    def _in_pieces(self, tokens: float, whole: float, pieces: Pieces) -> tuple[float, float]:
        """(seconds of a piece, of all pieces of a layer's rows)."""
        if not pieces.by_rows:
            return min(pieces.seconds, whole), whole
        half, all_ = (float(np.interp(count, _ROWS, self._experts)) for count in (tokens / 2, tokens))
        row = max((all_ - half) / (tokens / 2), 1e-12)
        call = float(np.interp(tokens / 16, _ROWS, self._experts)) - row * tokens / 16
        call = max(call, 0.0)
        size = min(tokens, max(1.0, max(pieces.seconds - call, call / pieces.overhead) / row))
        one = float(np.interp(size, _ROWS, self._experts))
        return one, whole if size >= tokens else one * tokens / size


def _near(size: float) -> float:
    return 1.02 ** round(math.log(size) / _LOG) if size > 0 else 0.0


def _part(work: Work, count: int) -> Work:
    """One of `count` micro-batches."""
    return replace(
        work,
        requests=work.requests / count,
        all_requests=work.all_requests / count,
        tokens=work.tokens / count,
        pairs=work.pairs / count,
        all_tokens=work.all_tokens / count,
    )


def _line(
    transfer: Callable[[float], tuple[float, float]],
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Of (dispatch, combine) by rows: each as (seconds at no rows, seconds per row)."""
    empty, full = transfer(0.0), transfer(_AT)
    there, back = ((none, (some - none) / _AT) for none, some in zip(empty, full, strict=True))
    return there, back


def _at(setting: Setting, context: float) -> Setting:
    return replace(setting, workload=replace(setting.workload, context_mean=context, context_deviation=0.0))
