"""The ping-pong pipeline in closed form: stage times in, iteration time, needed micro-batches and bubbles out.

One step of one micro-batch passes, layer by layer, through attention (A), dispatch, experts (F) and combine.
m micro-batches take turns, so a layer lasts as long as the busiest station needs for all m of them, or as long as one
micro-batch needs for the whole round trip, whichever is longer (MegaScale-Infer, section 4.1, arXiv 2504.02263).
The engine, the planner and the simulator read this file. It knows no hardware, no model and no randomness.
"""

from dataclasses import dataclass
from typing import TypeVar

Number = TypeVar("Number")  # a float, or a NumPy array of them: only arithmetic and abs() are used


def larger(first: Number, second: Number) -> Number:
    """max() for floats and, element by element, for arrays."""
    return (first + second + abs(first - second)) / 2  # type: ignore[operator, no-any-return]


def layer_period(attention: Number, experts: Number, dispatch: Number, combine: Number, m: int) -> Number:
    """Seconds between one layer of a micro-batch and its next layer, m micro-batches in flight.

    Dispatch and combine are the two directions of a full-duplex link: each is a station of its own.
    """
    station = larger(larger(attention, experts), larger(dispatch, combine))
    return larger(m * station, attention + experts + dispatch + combine)  # type: ignore[operator, no-any-return]


def step_seconds(
    attention: Number, experts: Number, period: Number, outside: Number, layers: int, micro_batches: int
) -> Number:
    """Seconds from one step of a micro-batch to its next: `layers` periods and the work outside of them.

    `outside` is work of the attention node, once per micro-batch and step (sampling, LM head). While the node does it
    for one micro-batch it computes attention for no other. The experts then have at most m - 1 pieces left to work on,
    so only that much of `outside` is hidden. Example: m = 3, experts of 100 us a piece, `outside` of 500 us: 2 pieces
    hide 200 us, and each of the 2 other micro-batches waits for the other 300 us. A step is never shorter than the
    attention node's whole work.
    """
    others = micro_batches - 1
    exposed: Number = larger(outside - experts * others, outside * 0)  # type: ignore[operator, assignment]
    waiting: Number = period * layers + outside + exposed * others  # type: ignore[operator, assignment]
    work: Number = (attention * layers + outside) * micro_batches  # type: ignore[operator, assignment]
    return larger(waiting, work)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds for one micro-batch and one MoE layer at each station; `outside` is per step, on the attention node
    (dense layers, LM head, sampling, scheduling)."""

    attention: float
    experts: float
    dispatch: float
    combine: float
    outside: float = 0.0

    @property
    def round_trip(self) -> float:
        return self.attention + self.experts + self.dispatch + self.combine

    @property
    def station(self) -> float:
        """The busiest station's time: no number of micro-batches makes a layer shorter than m times this."""
        return max(self.attention, self.experts, self.dispatch, self.combine)

    def minimum_micro_batches(self) -> int:
        """The smallest m with m * station >= round trip: more of them hide nothing further."""
        if self.station <= 0:
            return 1
        return max(1, -int(-self.round_trip / self.station * (1 - 1e-9) // 1))

    def period(self, micro_batches: int) -> float:
        return layer_period(self.attention, self.experts, self.dispatch, self.combine, micro_batches)

    def iteration(self, layers: int, micro_batches: int) -> float:
        """Seconds from a token to the same request's next token, `layers` MoE layers, in the steady state."""
        period = self.period(micro_batches)
        return step_seconds(self.attention, self.experts, period, self.outside, layers, micro_batches)

    def bubbles(self, layers: int, micro_batches: int) -> dict[str, float]:
        """The idle share of each station's time in the steady state, 0 to 1."""
        step = self.iteration(layers, micro_batches)
        work = {
            "attention": layers * self.attention + self.outside,
            "experts": layers * self.experts,
            "dispatch": layers * self.dispatch,
            "combine": layers * self.combine,
        }
        if step <= 0:
            return dict.fromkeys(work, 0.0)
        return {name: max(0.0, 1.0 - micro_batches * seconds / step) for name, seconds in work.items()}
