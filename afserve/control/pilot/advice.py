"""What a pilot advises: other sizes, why, what it expects of them, and afterwards what happened. Values and words."""

from dataclasses import dataclass
from typing import NamedTuple

from afserve.control.pilot.sizes import PoolSizes


@dataclass(frozen=True, slots=True)
class Effect:
    """Seconds, each with the interval that is to hold in 80 % of the cases."""

    ttft: float
    tpot: float
    ttft_within: tuple[float, float]
    tpot_within: tuple[float, float]

    def __str__(self) -> str:
        first, rest = self.ttft_within, self.tpot_within
        return (
            f"first token {self.ttft:.3g} s ({first[0]:.3g} to {first[1]:.3g}), "
            f"{self.tpot * 1e3:.3g} ms a token ({rest[0] * 1e3:.3g} to {rest[1] * 1e3:.3g})"
        )


@dataclass(frozen=True, slots=True)
class Advice:
    """Given `at`, to go from `old` to `new` sizes. `after` is expected there, `stay` without a change."""

    number: int
    at: float
    old: PoolSizes
    new: PoolSizes
    why: str
    after: Effect
    stay: Effect

    def __str__(self) -> str:
        return (
            f"advice {self.number}: {self.old} to {self.new}, since {self.why}; expected: {self.after}; "
            f"without: {self.stay}"
        )


class Compared(NamedTuple):
    """Seconds: from where to where a time was expected, and what it was."""

    low: float
    high: float
    measured: float

    @property
    def held(self) -> bool:
        return self.low <= self.measured <= self.high


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured until `at`, after an advice: `followed`, or at the old sizes. None where nothing could be."""

    advice: Advice
    at: float
    followed: bool
    ttft: float | None
    tpot: float | None

    @property
    def said(self) -> Effect:
        return self.advice.after if self.followed else self.advice.stay

    @property
    def compared(self) -> dict[str, Compared]:
        """Each time that was measured."""
        pairs = ("ttft", self.said.ttft_within, self.ttft), ("tpot", self.said.tpot_within, self.tpot)
        return {name: Compared(*within, measured) for name, within, measured in pairs if measured is not None}

    def __str__(self) -> str:
        did = "followed" if self.followed else "not followed"
        parts = [_in_words(name, found) for name, found in self.compared.items()]
        head = f"advice {self.advice.number}, {self.advice.old} to {self.advice.new}, was {did}: "
        return head + ("; ".join(parts) or "nothing came")


def _in_words(name: str, found: Compared) -> str:
    words, times = ("first token {} s", 1.0) if name == "ttft" else ("{} ms a token", 1e3)
    low, high, measured = (seconds * times for seconds in found)
    held = "held" if found.held else "missed"
    return f"{words.format(f'{measured:.3g}')} (expected {low:.3g} to {high:.3g}, {held})"
