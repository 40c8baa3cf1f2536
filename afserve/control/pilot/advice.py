"""What a pilot advises: other sizes, why, what it expects of them, and afterwards what happened. Values and words."""

from dataclasses import dataclass

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
        return f"{self.old} to {self.new}, since {self.why}; expected: {self.after}; without: {self.stay}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured after an advice: `followed`, or at the old sizes. None where nothing could be measured."""

    advice: Advice
    followed: bool
    ttft: float | None
    tpot: float | None
    ttft_held: bool | None
    tpot_held: bool | None

    def __str__(self) -> str:
        did = "followed" if self.followed else "not followed"
        parts = []
        if self.ttft is not None:
            parts.append(f"first token {self.ttft:.3g} s, {_in_words(self.ttft_held)}")
        if self.tpot is not None:
            parts.append(f"{self.tpot * 1e3:.3g} ms a token, {_in_words(self.tpot_held)}")
        return f"{self.advice.old} to {self.advice.new} was {did}: " + ("; ".join(parts) or "nothing came")


def _in_words(held: bool | None) -> str:
    return "as expected" if held else "not as expected"
