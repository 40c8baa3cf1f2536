"""What pools of other sizes would make of a demand, by rates that this deployment was measured at.

A node's rate is the seconds that it is busy with a token, and with a step whatever is in it: where few requests run, a
step is mostly that, and more of them share it. Times stretch as a pool is busy with tokens: a token's by 1 / (1 - busy)
of both pools that it passes, a first token's by the wait for a free reader. What they are without load follows from
what was measured under load.
"""

import math
from dataclasses import dataclass, fields, replace

from afserve.control.pilot.observed import SeenWindow
from afserve.control.pilot.queue import QueueWait
from afserve.control.pilot.sizes import Demand, Expected, PoolSizes, TargetTimes

_NEWEST = 0.2  # weight of a window in the mean of a rate
_LEAST_TOKENS = 20.0  # of a window that is worth learning from
_LITTLE = 0.05  # share of a rate that does not count
_LEARNT = 0.9
_FULL = 0.98  # busy for more of the time, a pool falls behind
_KEPT = 0.97  # of all windows before, in the sums that steps are told from tokens by
_ALIKE = 0.02  # of 1: so much must not be explained by one of both, or nothing is told apart
_LEAST_EACH = 0.25  # of the seconds by token, that a token takes at least
_ROUNDS = 4  # in which the time between tokens and the steps are fitted to each other


@dataclass(slots=True)
class NodeSeconds:
    """Seconds of a node for each token: of prompts where they are read, of answers, and of either at the experts.
    `decode_step` are those for each step where it is decoded, and `experts_step` those of each expert node for it.
    `calm_first` and `calm_rest` are seconds to a first token and between tokens, without load."""

    read: float = 0.0
    decode: float = 0.0
    experts: float = 0.0
    decode_step: float = 0.0
    experts_step: float = 0.0
    calm_first: float = 0.0
    calm_rest: float = 0.0


@dataclass(slots=True)
class StepCost:
    """Busy seconds told apart by steps and tokens: least squares over windows that fade, neither below 0. Windows with
    as many tokens in each step tell nothing apart: a step then costs as many tokens as it did, and at first one."""

    sums: tuple[float, ...] = (0.0,) * 5  # of squares and products
    step: float = 1.0
    each: float = 1.0

    def apart(self, steps: float, tokens: float, busy: float) -> tuple[float, float]:
        """(seconds of a step, of a token) of one more window of so many busy seconds."""
        fresh = (steps * steps, tokens * tokens, steps * tokens, busy * steps, busy * tokens)
        self.sums = steps2, tokens2, both, by_steps, by_tokens = tuple(
            _KEPT * old + new for old, new in zip(self.sums, fresh, strict=True)
        )
        free = steps2 * tokens2 - both**2
        if free > _ALIKE * steps2 * tokens2:
            alone = by_tokens / tokens2
            self.each = min(max((by_tokens * steps2 - by_steps * both) / free, _LEAST_EACH * alone), alone)
            self.step = max(by_steps - self.each * both, 0.0) / steps2
        whole = self.step * steps
        share = whole / max(whole + self.each * tokens, 1e-9)
        return share * busy / max(steps, 1.0), (1 - share) * busy / max(tokens, 1.0)


class MeasuredModel:
    """It says other things once a rate has changed by more than a little, so that what was planned can be kept."""

    def __init__(self, rates: NodeSeconds | None = None) -> None:
        self.rates = rates or NodeSeconds()
        self._measured = replace(self.rates)
        self.decode, self.experts = StepCost(), StepCost()

    def begin_with(self, rates: NodeSeconds, decode: StepCost, experts: StepCost) -> None:
        """What was measured before."""
        self.rates, self._measured, self.decode, self.experts = rates, replace(rates), decode, experts

    @property
    def ready(self) -> bool:
        return self.rates.decode > 0 and self.rates.calm_rest > 0

    def learn_rates(self, window: SeenWindow) -> bool:
        load, rates = window.load, self._measured
        answered = load.rest_tokens + load.first
        if answered < _LEAST_TOKENS or not load.came:
            return False
        computed = load.first * max(load.prompt_tokens - load.found_tokens, 0.0) / load.came
        alone = window.sizes.prefill > 0
        decoded = answered if alone else computed + answered
        whole, each = self.decode.apart(load.decode_steps, decoded, load.decode_busy)
        rates.decode_step, rates.decode = _mean(rates.decode_step, whole), _mean(rates.decode, each)
        steps = load.decode_steps * window.sizes.experts  # each step is one of all expert nodes
        whole, each = self.experts.apart(steps, computed + answered, load.experts_busy)
        rates.experts_step, rates.experts = _mean(rates.experts_step, whole), _mean(rates.experts, each)
        if not alone:
            rates.read = rates.decode
        elif computed >= _LEAST_TOKENS:
            rates.read = _mean(rates.read, load.prefill_busy / computed)
        self._learn_calm(window, decoded)
        if all(_near(getattr(self.rates, one.name), getattr(rates, one.name)) for one in fields(NodeSeconds)):
            return False
        self.rates = replace(rates)
        return True

    def _learn_calm(self, window: SeenWindow, decoded: float) -> None:
        """A pool that is nearly full says little of times without load; it is heard where nothing else is known."""
        busy, rates = [min(one, _FULL) for one in window.busy], self._measured
        if max(busy) > _LEARNT and rates.calm_rest:
            return
        if window.tpot is not None:
            tokens = rates.decode * decoded / max(window.sizes.decode, 1) / window.seconds
            free = (1 - min(tokens, busy[1])) * (1 - busy[2])
            rates.calm_rest = _mean(rates.calm_rest, window.tpot * free)
        if window.ttft is not None and window.load.came:
            computed = max(window.load.prompt_tokens - window.load.found_tokens, 1.0) / window.load.came
            share = busy[0] if window.sizes.prefill else busy[1]
            wait = _wait(rates.read, window.sizes, computed, 1.0, share)
            rates.calm_first = _mean(rates.calm_first, max(window.ttft - wait.mean, 0.1 * window.ttft))

    def expect(self, sizes: PoolSizes, demand: Demand, wanted: TargetTimes) -> Expected:
        rates = self.rates
        read, answered = demand.rate * demand.computed, demand.rate * demand.answer
        alone = sizes.prefill > 0
        prefill = read * rates.read / sizes.prefill if alone else 0.0
        nodes = max(sizes.decode, 1)
        tokens = (answered * rates.decode + (0.0 if alone else read * rates.read)) / nodes
        tpot, decode, experts = rates.calm_rest, tokens, 0.0
        for _ in range(_ROUNDS if rates.decode_step or rates.experts_step else 1):
            # While anything runs, which is Poisson's.
            steps = -math.expm1(-answered / nodes * tpot) / tpot if tpot else 0.0
            decode = tokens + rates.decode_step * steps
            experts = (read + answered) * rates.experts / max(sizes.experts, 1)
            experts += rates.experts_step * steps * nodes
            tpot = rates.calm_rest / ((1 - min(tokens, _FULL)) * (1 - min(experts, _FULL)))
        wait = _wait(rates.read, sizes, demand.computed, demand.variation, prefill if alone else decode)
        busy = prefill, decode, experts
        return Expected(rates.calm_first + wait.mean, tpot, wait.late(wanted, rates.calm_first), busy)


def _wait(read: float, sizes: PoolSizes, computed: float, variation: float, share: float) -> QueueWait:
    return QueueWait(computed * read, sizes.prefill or max(sizes.decode, 1), share, variation)


def _near(known: float, measured: float) -> bool:
    return abs(measured - known) <= _LITTLE * known


def _mean(known: float, newest: float) -> float:
    return newest if not known else known + _NEWEST * (newest - known)
