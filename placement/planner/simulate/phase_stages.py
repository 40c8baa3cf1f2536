"""Seconds of one step of a pool that reads prompts, decodes, or does both, from the stage times of the plan.

Three kinds of pool: `Together` has the experts on its own devices (expert parallelism); `Apart` has attention only and
sends rows to expert devices, which another pool may use as well; of `Beside`, two pools share experts that are spread
over the devices of both. Ranks of a pool step together: a step lasts as long as its fullest rank needs. Only ranks that
read prompts beside shared experts step each by itself; rows of theirs that meet at a layer share a call. It knows no
requests and no clock.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from afserve.config import MAX_MICRO_BATCHES
from afserve.placement.pipeline import layer_period, step_seconds
from afserve.placement.planner.perf.exchange import m2n_ways
from afserve.placement.planner.perf.ffn import COMBINE_BYTES, DISPATCH_BYTES, distinct_targets, transfer
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.simulate.phase_tables import StageTables, StepTimes, Work, interpolate
from afserve.placement.planner.simulate.phase_wires import Wire, line_of, quickest, wires

IDLE = StepTimes(0.0)


def together(steps: Iterable[StepTimes]) -> StepTimes:
    """What several pools or ranks do to another pool."""
    busy = [step for step in steps if step.seconds]
    if not busy:
        return IDLE
    return StepTimes(
        max(step.seconds for step in busy),
        min(1.0, sum(step.experts for step in busy)),
        min(1.0, sum(step.links for step in busy)),
        max(step.piece for step in busy),
        max(step.busy for step in busy),
    )


@dataclass(frozen=True, slots=True)
class Pieces:
    """How expert devices compute prompts while others decode: in pieces of `seconds`. Cut by `rows`, a piece reads the
    experts again, so it is longer, until calls take at most `overhead` of the rows' own time; cut at a GPU's blocks, it
    does not. `floor` of the time goes to prompts that wait, at least."""

    seconds: float
    overhead: float
    floor: float
    by_rows: bool = True

    def cut(self, experts: list[float], tokens: float, whole: float) -> tuple[float, float]:
        """(seconds of a piece, of all pieces of a layer's rows); `whole`: in one call."""
        if not self.by_rows:
            return min(self.seconds, whole), whole
        half, all_ = interpolate(experts, tokens / 2), interpolate(experts, tokens)
        row = max((all_ - half) / (tokens / 2), 1e-12)
        call = max(interpolate(experts, tokens / 16) - row * tokens / 16, 0.0)
        size = min(tokens, max(1.0, max(self.seconds - call, call / self.overhead) / row))
        one = interpolate(experts, size)
        return one, whole if size >= tokens else one * tokens / size


# FLOP per hidden column of a thread block: 128 rows by 128 columns of gate and of up.
_BLOCK = 2 * 2 * 128 * 128
_OF_PEAK, _MULTIPROCESSORS = 0.6, 132  # that products reach, and among how many it is shared: an H200's
# Products of a decode call, each of which begins where blocks of prompts end: gate and up, then down.
_WAITS = 2


def pieces_on_gpu(chip: Hardware, hidden: int, precision: str, floor: float) -> Pieces:
    """A GPU ends blocks by itself and then takes one of a decode call first, so that no expert is read again. Example:
    an H200 in FP8 with 7,168 columns takes 52 us for a block, and a decode call waits for two of them, 104 us."""
    block = _BLOCK * hidden / (_OF_PEAK * chip.flops(precision) / _MULTIPROCESSORS)
    return Pieces(_WAITS * block, 0.0, floor, by_rows=False)


@dataclass(frozen=True)
class Together:
    """Ranks on `devices`, with the experts spread over these."""

    tables: StageTables
    devices: int

    @cached_property
    def drafters(self) -> "tuple[tuple[Together, int], ...]":
        return tuple((replace(self, tables=tables), count) for tables, count in self.tables.passes)

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

    def step(self, work: Work, other: StepTimes = IDLE, pieces: Pieces | None = None) -> StepTimes:
        key = work.sizes()
        found = self._known.get(key)
        if found is None:
            work = work.rounded()
            both = (self._step(work.part(count), count) for count in (1, 2))
            found = self._known[key] = _drafted(self, min(both, key=lambda one: one.seconds), work)
        return found

    @cached_property
    def _known(self) -> dict[Hashable, StepTimes]:
        return self.tables.steps(self)

    def _step(self, part: Work, micro_batches: int) -> StepTimes:
        layers = self.tables.layers
        attention, outside = self.tables.attention(part)
        experts = interpolate(self.tables.experts(self.devices, part), self.tables.all_rows(part))
        rows = self.tables.rows(part) / self.tables.tensor_parallel  # a device sends its part of them
        (there, per_there), (back, per_back) = quickest(wires(self.tables, self.devices), rows)
        dispatch, combine = there + per_there * rows, back + per_back * rows
        if self.devices == 1:
            dispatch = combine = 0.0
        exchange = 4 * self.tables.setting.exchange * (micro_batches > 1)
        busy = attention / layers + experts + exchange
        period = layer_period(busy, 0.0, dispatch, combine, micro_batches)
        return StepTimes(step_seconds(busy, 0.0, period, outside, layers, micro_batches))


class _Sharing(ABC):
    """A pool of attention ranks whose experts another pool uses too."""

    tables: StageTables
    micro_batches: int

    @property
    @abstractmethod
    def drafters(self) -> "tuple[tuple[_Sharing, int], ...]":
        """The drafter's layers on the same devices, and how often a step passes them."""

    def step(self, work: Work, other: StepTimes = IDLE, pieces: Pieces | None = None) -> StepTimes:
        """`other` is the step that the other pool of these experts is in; decoding comes first. Where nothing is
        decoded it is the step of one rank, and `all_tokens` are those of all ranks that read meanwhile."""
        key = work.sizes(), other.shares(), pieces
        found = self._known.get(key)
        if found is None:
            work, other = work.rounded(), other.rounded()
            counts = range(1, self.micro_batches + 1)
            tried = (self._step(work.part(count), other, pieces, count) for count in counts)
            found = self._known[key] = _drafted(self, min(tried, key=lambda one: one.seconds), work)
        return found

    @cached_property
    def _known(self) -> dict[Hashable, StepTimes]:
        return self.tables.steps(self)

    @abstractmethod
    def _step(self, part: Work, other: StepTimes, pieces: Pieces | None, micro_batches: int) -> StepTimes:
        """Of one of so many micro-batches."""


@dataclass(frozen=True)
class Apart(_Sharing):
    """`ranks` attention ranks that use `experts` expert devices, beside another pool or alone, with at most so many
    micro-batches. `one_host`: all of them, and the other pool, are on one fast link."""

    tables: StageTables
    ranks: int
    experts: int
    micro_batches: int = MAX_MICRO_BATCHES
    one_host: bool = False

    @property
    def held(self) -> int:
        """Devices that hold its experts."""
        return self.experts

    @cached_property
    def drafters(self) -> "tuple[tuple[Apart, int], ...]":
        return tuple((replace(self, tables=tables), count) for tables, count in self.tables.passes)

    @cached_property
    def kv_tokens(self) -> float:
        """Tokens of caches that fit; 0 where not even the weights do, or the experts on theirs."""
        tables = self.tables
        if not tables.hold_experts(self.experts):
            return 0.0
        return tables.kv_tokens(self.ranks * tables.tensor_parallel, 0)

    @cached_property
    def _wires(self) -> Wire:
        setting, chip, degree = self.tables.setting, self.tables.chip, self.tables.tensor_parallel
        ranks, devices = np.array([float(self.ranks)]), np.array([float(self.experts)])

        def near(rows: float) -> tuple[float, float]:
            copies = distinct_targets(setting.shape.experts.top_k, self.experts)
            row = np.array([rows * setting.shape.expert_row]) * copies
            there, back = (
                transfer(chip, chip, setting.curves, out / degree, out * ranks / devices, same_domain=True)
                for out in (row * DISPATCH_BYTES[setting.precision.experts], row * COMBINE_BYTES)
            )
            return float(there[0]), float(back[0])

        def m2n(rows: float) -> tuple[float, float]:
            there, back = m2n_ways(setting, chip, chip, degree, ranks, devices, np.array([rows]))
            return float(there.seconds[0]), float(back.seconds[0])

        return line_of(near if self.one_host else m2n)

    @cached_property
    def _exchange(self) -> Wire:
        """Device seconds of sending and receiving: at attention and at experts."""
        setting, peers = self.tables.setting, np.array([float(self.experts)])
        here = float(distinct_targets(setting.shape.experts.top_k, self.experts)) / self.experts
        messages = np.array([float(self.ranks)])

        def both(rows: float) -> tuple[float, float]:
            size = np.array([rows / self.tables.tensor_parallel])
            answered = setting.exchange_at_experts(np.array([rows * here]), messages)
            return float(setting.exchange_at_attention(size, peers)[0]), float(answered[0])

        return line_of(both)

    def _step(self, part: Work, other: StepTimes, pieces: Pieces | None, micro_batches: int) -> StepTimes:
        layers = self.tables.layers
        seconds, outside = self.tables.attention(part)
        rows, tokens = self.tables.rows(part), self.tables.all_rows(part)
        (packing, per_packed), (answering, per_answer) = self._exchange
        experts = self.tables.experts(self.experts, part)
        attention = seconds / layers + packing + per_packed * rows
        own = interpolate(experts, tokens) + answering + per_answer * rows
        (there, per_there), (back, per_back) = self._wires
        wire = per_there * rows, per_back * rows
        piece, waits, taken = 0.0, 0.0, own
        if pieces is not None and part.tokens and other.seconds:
            piece, own = pieces.cut(experts, tokens, own)
            taken = own / max(1 - other.experts, pieces.floor)
        elif pieces is not None and other.seconds:
            waits = other.piece * longest_wait(other.experts, self.experts)
            taken = own / (1 - min(pieces.floor, other.experts))
        shared = 1 + other.links  # bulk and small messages share a link evenly
        dispatch, combine = there + wire[0] * shared + waits, back + wire[1] * shared
        period = layer_period(attention, taken, dispatch, combine, micro_batches)
        step = step_seconds(attention, taken, period, outside, layers, micro_batches)
        passes = micro_batches * layers / step
        mine, near = (1.0, 1.0) if part.requests else (part.tokens / part.all_tokens, 1 / self.ranks)
        return StepTimes(step, mine * min(1.0, own * passes), near * min(1.0, max(wire) * passes), piece)


@dataclass(frozen=True)
class Beside(_Sharing):
    """`ranks` attention ranks on some of `devices`, which all hold a part of the experts, so that a device has both;
    the rest of the devices are another pool's. What decodes goes first on every device, in attention and in experts."""

    tables: StageTables
    ranks: int
    devices: int
    micro_batches: int = MAX_MICRO_BATCHES

    @property
    def held(self) -> int:
        """Devices that hold its experts."""
        return self.devices

    @cached_property
    def drafters(self) -> "tuple[tuple[Beside, int], ...]":
        return tuple((replace(self, tables=tables), count) for tables, count in self.tables.passes)

    @cached_property
    def kv_tokens(self) -> float:
        """Tokens of caches that fit; 0 where not even the weights do."""
        return self.tables.kv_tokens(self.ranks * self.tables.tensor_parallel, self.devices)

    def _step(self, part: Work, other: StepTimes, pieces: Pieces | None, micro_batches: int) -> StepTimes:
        layers, degree = self.tables.layers, self.tables.tensor_parallel
        seconds, outside = self.tables.attention(part)
        tokens, table = self.tables.all_rows(part), self.tables.experts(self.devices, part)
        exchange = 2 * self.tables.setting.exchange
        attention, experts = seconds / layers + exchange, interpolate(table, tokens) + exchange
        rows = (1 + other.links) * self.tables.rows(part) / degree  # the other pool's use the same links
        (out, per_out), (back, per_back) = quickest(wires(self.tables, self.devices), rows)
        moved = out + per_out * rows, back + per_back * rows
        piece = waits = 0.0
        here, there = attention + experts, experts  # of a device of its own, of one of the other pool
        if pieces is not None and part.tokens and other.seconds:
            piece, experts = pieces.cut(table, tokens, experts)
            free = max(1 - other.experts, pieces.floor)
            attention, here = attention / free, (attention + experts) / free
            there = experts / max(1 - other.busy, pieces.floor)
        elif pieces is not None and other.seconds:
            waits = other.piece * (other.experts + longest_wait(other.busy, self.devices))
            attention /= 1 - min(pieces.floor, other.experts)
            there = experts / (1 - min(pieces.floor, other.busy))
            here = attention + experts / (1 - min(pieces.floor, other.experts))
        trip = attention + max(here - attention, there) + sum(moved) + waits
        period = max(micro_batches * max(here, there, *moved), trip)
        step = step_seconds(here, 0.0, period, outside, layers, micro_batches)
        passes = micro_batches * layers / step
        mine = 1.0 if part.requests else part.tokens / part.all_tokens
        near = (self.ranks if part.requests else 1) * degree / self.devices
        own = seconds / layers + exchange + experts
        return StepTimes(
            step,
            mine * min(1.0, experts * passes),
            near * min(1.0, max(per_out, per_back) * rows / (1 + other.links) * passes),
            piece,
            min(1.0, own * passes),
        )


def _drafted(pool: "Together | _Sharing", step: StepTimes, work: Work) -> StepTimes:
    """`step` and the passes of the drafter behind it, in which devices are as busy."""
    if not work.requests or not pool.drafters:
        return step
    decoding = Work(work.requests, work.all_requests, work.context)
    more = sum(count * drafter.step(decoding).seconds for drafter, count in pool.drafters)
    return step._replace(seconds=step.seconds + more)


def longest_wait(busy: float, devices: int) -> float:
    """Of a piece: what is left of it on that device where most is left, each being in one for `busy` of the time. The
    mean of the largest of `devices` values that are 0, or else even between 0 and 1."""
    return 1 - (1 - (1 - busy) ** (devices + 1)) / ((devices + 1) * busy) if busy > 0 else 0.0
