"""What pools of other sizes would make of a demand, by rates that this deployment was measured at.

A node's rate is the seconds that it is busy with a token. Times stretch as a pool is busy: a token's by 1 / (1 - busy)
of both pools that it passes, a first token's by the wait for a free reader. What they are without load follows from
what was measured under load.
"""

from dataclasses import dataclass, fields, replace

from afserve.control.pilot.observed import SeenWindow
from afserve.control.pilot.queue import QueueWait
from afserve.control.pilot.sizes import Demand, Expected, PoolSizes, TargetTimes

_NEWEST = 0.2  # weight of a window in the mean of a rate
_LEAST_TOKENS = 20.0  # of a window that is worth learning from
_LITTLE = 0.05  # share of a rate that does not count
_LEARNT = 0.9
_FULL = 0.98  # busy for more of the time, a pool falls behind


@dataclass(slots=True)
class NodeSeconds:
    """Seconds of a node for each token: of prompts where they are read, of answers, and of either at the experts.
    `calm_first` and `calm_rest` are seconds to a first token and between tokens, without load."""

    read: float = 0.0
    decode: float = 0.0
    experts: float = 0.0
    calm_first: float = 0.0
    calm_rest: float = 0.0


class MeasuredModel:
    """It says other things once a rate has changed by more than a little, so that what was planned can be kept."""

    def __init__(self, rates: NodeSeconds | None = None) -> None:
        self.rates = rates or NodeSeconds()
        self._measured = replace(self.rates)

    @property
    def ready(self) -> bool:
        return self.rates.decode > 0 and self.rates.calm_rest > 0

    def learn_rates(self, window: SeenWindow) -> bool:
        load, rates = window.load, self._measured
        answered = load.rest_tokens + load.first
        if answered < _LEAST_TOKENS or not load.came:
            return False
        computed = load.first * max(load.prompt_tokens - load.found_tokens, 0.0) / load.came
        if window.sizes.prefill and computed >= _LEAST_TOKENS:
            rates.read = _mean(rates.read, load.prefill_busy / computed)
            rates.decode = _mean(rates.decode, load.decode_busy / answered)
        elif not window.sizes.prefill:
            both = load.decode_busy / (computed + answered)
            rates.read, rates.decode = _mean(rates.read, both), _mean(rates.decode, both)
        rates.experts = _mean(rates.experts, load.experts_busy / (computed + answered))
        self._learn_calm(window)
        if all(
            _near(getattr(self.rates, each.name), getattr(rates, each.name)) for each in fields(NodeSeconds)
        ):
            return False
        self.rates = replace(rates)
        return True

    def _learn_calm(self, window: SeenWindow) -> None:
        """A pool that is nearly full says little of times without load; it is heard where nothing else is known."""
        busy, rates = [min(one, _FULL) for one in window.busy], self._measured
        if max(busy) > _LEARNT and rates.calm_rest:
            return
        if window.tpot is not None:
            rates.calm_rest = _mean(rates.calm_rest, window.tpot * (1 - busy[1]) * (1 - busy[2]))
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
        decode = (answered * rates.decode + (0.0 if alone else read * rates.read)) / max(sizes.decode, 1)
        experts = (read + answered) * rates.experts / max(sizes.experts, 1)
        wait = _wait(rates.read, sizes, demand.computed, demand.variation, prefill if alone else decode)
        free = max(1 - min(decode, _FULL), 0.0) * max(1 - min(experts, _FULL), 0.0)
        return Expected(
            rates.calm_first + wait.mean,
            rates.calm_rest / free,
            wait.late(wanted, rates.calm_first),
            (prefill, decode, experts),
        )


def _wait(read: float, sizes: PoolSizes, computed: float, variation: float, share: float) -> QueueWait:
    return QueueWait(computed * read, sizes.prefill or max(sizes.decode, 1), share, variation)


def _near(known: float, measured: float) -> bool:
    return abs(measured - known) <= _LITTLE * known


def _mean(known: float, newest: float) -> float:
    return newest if not known else known + _NEWEST * (newest - known)
