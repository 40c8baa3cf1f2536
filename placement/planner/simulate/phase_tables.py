"""The closed forms of one device kind, tabulated by rows, so that the seconds of a step cost microseconds.

It knows attention, experts, caches and hand-overs, each for itself; `phase_stages` makes steps of them.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from afserve.placement.planner.perf.attention import prefill_step
from afserve.placement.planner.perf.drafting import NO_DRAFTS
from afserve.placement.planner.perf.halves import attention_half, expert_half
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.perf.kv import cache_bytes, expert_weight_bytes
from afserve.placement.planner.perf.room import cache_room, hold_experts
from afserve.placement.planner.perf.setting import Setting

_ROWS = np.unique(np.round(np.geomspace(1, 1 << 21, 64)))
_SIZES: list[float] = _ROWS.tolist()
_CONTEXTS = [1.0, 512.0, 2048.0, 8192.0, 32768.0, 131072.0]
Array = NDArray[np.float64]
_WHOLE_BLOCKS = 4096.0  # tokens of a request; of shorter ones, blocks that are partly filled are not counted
_LOG = math.log(1.02)


class Work(NamedTuple):
    """A step: `requests` decoded by the fullest rank and `all_requests` by all ranks, which have `context` tokens each;
    `tokens` of prompts on the fullest rank, that attend to `pairs` tokens in sum, and `all_tokens` on all ranks."""

    requests: float = 0.0
    all_requests: float = 0.0
    context: float = 0.0
    tokens: float = 0.0
    pairs: float = 0.0
    all_tokens: float = 0.0

    def sizes(self) -> tuple[float, int, int, int, int, int]:
        """Requests of a rank, and for the rest which power of 1.02 is near: so steps are alike."""
        return (
            self.requests,
            power(self.all_requests),
            power(self.context),
            power(self.tokens),
            power(self.pairs),
            power(self.all_tokens),
        )

    def rounded(self) -> "Work":
        requests, *others = self.sizes()
        return Work(requests, *map(near, others))

    def part(self, count: int) -> "Work":
        """One of `count` micro-batches."""
        if count == 1:
            return self
        return Work(
            self.requests / count,
            self.all_requests / count,
            self.context,
            self.tokens / count,
            self.pairs / count,
            self.all_tokens / count,
        )


NONE = -(1 << 30)  # the power of nothing


def power(size: float) -> int:
    """Of 1.02, that is nearest to it."""
    return round(math.log(size) / _LOG) if size > 0 else NONE


def near(exponent: int) -> float:
    return 1.02**exponent if exponent != NONE else 0.0


def interpolate(table: Sequence[float], size: float) -> float:
    """What a table by rows says of `size` rows: np.interp of a single number, ten times sooner."""
    if size <= _SIZES[0]:
        return table[0]
    if size >= _SIZES[-1]:
        return table[-1]
    at = bisect_right(_SIZES, size) - 1
    slope = (table[at + 1] - table[at]) / (_SIZES[at + 1] - _SIZES[at])
    return slope * (size - _SIZES[at]) + table[at]


class StepTimes(NamedTuple):
    """`seconds` of a step. Shares of them, 0 to 1: how long it has the expert devices and the links to them, and, where
    attention and experts share devices, its own devices (`busy`). `piece`: seconds until it lets another one in."""

    seconds: float
    experts: float = 0.0
    links: float = 0.0
    piece: float = 0.0
    busy: float = 0.0

    def shares(self) -> tuple[bool, float, float, int, float]:
        """What it does to another pool, in hundredths; a piece to 2 %."""
        return (
            self.seconds > 0,
            round(self.experts, 2),
            round(self.links, 2),
            power(self.piece),
            round(self.busy, 2),
        )

    def rounded(self) -> "StepTimes":
        there, experts, links, piece, busy = self.shares()
        return StepTimes(float(there), experts, links, near(piece), busy)


class StageTables:
    """The closed forms of one device kind, tabulated; an attention rank has `tensor_parallel` devices."""

    def __init__(self, setting: Setting, chip: Hardware, tensor_parallel: int = 1) -> None:
        self.setting, self.chip, self.tensor_parallel = setting, chip, tensor_parallel
        self.layers = setting.shape.experts.layers
        one = np.ones(1)
        halves = [
            attention_half(_at(setting, float(context)), chip, tensor_parallel, one, _ROWS, True)
            for context in _CONTEXTS
        ]
        self._decode: list[list[float]] = [half.moe_layers.tolist() for half in halves]
        outside = [half.outside for half in halves]
        passes, self.passes = setting.drafts.passes, list[tuple[StageTables, int]]()
        for rows in sorted(set(passes)):
            drafter, count = setting.drafter_pass(rows), passes.count(rows)
            if drafter.shape.experts.layers:
                self.passes.append((StageTables(drafter, chip, tensor_parallel), count))
            else:
                outside = [
                    seconds
                    + count * attention_half(_at(drafter, at), chip, tensor_parallel, one, _ROWS).outside
                    for seconds, at in zip(outside, _CONTEXTS, strict=True)
                ]
        self._outside: list[list[float]] = [seconds.tolist() for seconds in outside]
        first, later = (
            prefill_step(
                setting.held, chip, setting.curves, setting.precision, _ROWS, before, tensor_parallel
            )
            for before in (0.0, 1.0)
        )
        self._pair = float((later - first)[-1] / _ROWS[-1])
        self._rows: list[float] = (first - self._pair * _ROWS**2 / 2).tolist()
        self._attention: dict[Work, tuple[float, float]] = {}
        self._experts: dict[tuple[int, bool], list[float]] = {}
        self._steps: dict[Hashable, dict[Hashable, StepTimes]] = {}

    def attention(self, work: Work) -> tuple[float, float]:
        """(seconds of all layers, seconds outside of them): rows of both kinds share products."""
        found = self._attention.get(work)
        if found is None:
            found = self._attention[work] = self._attention_of(work)
        return found

    def _attention_of(self, work: Work) -> tuple[float, float]:
        decode = outside = shared = 0.0
        if work.requests:
            decode = self._at_context(self._decode, work)
            outside = self._at_context(self._outside, work)
            shared = interpolate(self._rows, self.rows(work) - work.tokens)
        if not work.tokens:
            return decode, outside
        rows = interpolate(self._rows, self.rows(work)) - shared
        return decode + max(rows, 0.0) + self._pair * work.pairs, outside or self._outside[0][0]

    def _at_context(self, table: list[list[float]], work: Work) -> float:
        above = min(max(bisect_left(_CONTEXTS, work.context), 1), len(_CONTEXTS) - 1)
        low, high = (interpolate(table[i], work.requests) for i in (above - 1, above))
        share = (work.context - _CONTEXTS[above - 1]) / (_CONTEXTS[above] - _CONTEXTS[above - 1])
        return low + share * (high - low)

    def rows(self, work: Work) -> float:
        """Of the fullest rank: each request has those of its drafts."""
        return work.requests * self.setting.drafts.rows + work.tokens

    def all_rows(self, work: Work) -> float:
        """Of all ranks."""
        return work.all_requests * self.setting.drafts.rows + work.all_tokens

    def experts(self, devices: int, work: Work) -> list[float]:
        """Of one layer, by rows over all ranks; for `interpolate`. Where anything is decoded, rows are taken to share
        experts as those of drafts do."""
        drafted = work.requests > 0 and self.setting.drafts.tokens > 0
        found = self._experts.get((devices, drafted))
        if found is None:
            setting = self.setting if drafted else replace(self.setting, drafts=NO_DRAFTS)
            seconds = expert_half(setting, self.chip, _ROWS, np.full_like(_ROWS, devices))
            found = self._experts[devices, drafted] = seconds.tolist()
        return found

    def steps(self, pool: Hashable) -> "dict[Hashable, StepTimes]":
        """What is known of the steps of such a pool: pools of several layouts are alike."""
        return self._steps.setdefault(pool, {})

    def forget_steps(self) -> None:
        """A search sees millions of them, gigabytes."""
        for steps in self._steps.values():
            steps.clear()

    def kv_tokens(self, devices: int, experts: int) -> float:
        """Tokens of caches that fit on `devices`, of which each holds 1/`experts` of the experts (0: none). Devices of
        a rank have a part of its heads each, or all where there are fewer heads than devices."""
        held = self._expert_bytes(experts) if experts else np.zeros(1)
        whole = self.setting.workload.mean_prompt + self.setting.workload.mean_answer
        room = cache_room(self.setting, self.chip, self.tensor_parallel, held, max(whole, _WHOLE_BLOCKS))
        return devices / self.tensor_parallel * float(room.tokens[0])

    def hold_experts(self, devices: int) -> bool:
        """Whether the experts fit on devices that have nothing else."""
        return bool(hold_experts(self.setting, self.chip, self._expert_bytes(devices))[0])

    def _expert_bytes(self, devices: int) -> Array:
        """On each of so many."""
        setting = self.setting
        return expert_weight_bytes(
            setting.held, setting.precision, setting.routing, np.array([float(devices)])
        )

    def hand_over(self, tokens: float) -> float:
        """Seconds until the KV of a prompt is at another device, over the network."""
        moved = cache_bytes(self.setting.held, self.setting.precision, tokens)
        return self.chip.network_latency + moved / self.chip.network


def _at(setting: Setting, context: float) -> Setting:
    return replace(setting, workload=replace(setting.workload, context_mean=context, context_deviation=0.0))
