"""Goodput by phase, as one gateway saw it: sequences that kept to their times, and the tokens of those.

Prefill is judged by `ttft`, the seconds to a first token, and decode by `tpot`, the mean seconds of each further one:
those that the request asks for, else the server's. A sequence without such a time is not judged. It counts and knows no
clock.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from afserve.metrics import Counter, MetricFamily

PREFILL, DECODE = "prefill", "decode"
ON_TIME, LATE = "yes", "no"
DrawCounts = Callable[[str, Mapping[str, int]], None]
"""Takes a name, and numbers by what they count."""


@dataclass(frozen=True, slots=True)
class Times:
    """In seconds; None asks for nothing."""

    ttft: float | None = None
    tpot: float | None = None

    def or_else(self, own: "Times") -> "Times":
        """With the server's own where a request asks for nothing."""
        return Times(self.ttft or own.ttft, self.tpot or own.tpot)


ANY_TIME = Times()


class GoodputMeter:
    def __init__(self, draw: DrawCounts | None = None) -> None:
        """`draw` is told of a phase whenever a sequence was judged."""
        self._draw = draw
        self.sequences = Counter("phase", "on_time")
        self.tokens = Counter("phase")

    def first(self, times: Times, prompt_tokens: int, seconds: float) -> None:
        """A first token came after so long."""
        self._judge(PREFILL, times.ttft, seconds, prompt_tokens)

    def never(self, times: Times, seconds: float) -> None:
        """A sequence ended after so long, without a token. Before its time it is nobody's fault."""
        if times.ttft is not None and seconds > times.ttft:
            self._judge(PREFILL, times.ttft, seconds, 0)

    def rest(self, times: Times, tokens: int, seconds: float) -> None:
        """A sequence has ended: `tokens` in all, `seconds` from the first to the last. One token has no rest."""
        if tokens > 1:
            self._judge(DECODE, times.tpot, seconds / (tokens - 1), tokens)

    def _judge(self, phase: str, limit: float | None, seconds: float, tokens: int) -> None:
        if limit is None:
            return
        on_time = seconds <= limit
        self.sequences.add(1, phase, ON_TIME if on_time else LATE)
        if on_time:
            self.tokens.add(tokens, phase)
        if self._draw is not None:
            self._draw(f"{phase}, sequences by time", self._judged(phase))

    def _judged(self, phase: str) -> dict[str, int]:
        kept, late = (int(self.sequences.total_of(phase, which)) for which in (ON_TIME, LATE))
        return {"on_time": kept, "late": late}

    def families(self) -> Iterator[MetricFamily]:
        judged = "Sequences with a ttft (prefill) or tpot (decode), by whether they kept to it."
        yield self.sequences.family(("afserve_phase_sequences",), judged)
        kept = "Tokens of those that did: of the prompt, or generated."
        yield self.tokens.family(("afserve_phase_goodput_tokens",), kept)

    def figures(self) -> dict[str, dict[str, int]]:
        """By phase; nothing where no sequence was judged."""
        found = {}
        for phase in (PREFILL, DECODE):
            judged = self._judged(phase)
            if any(judged.values()):
                found[phase] = {**judged, "tokens": int(self.tokens.total_of(phase))}
        return found
