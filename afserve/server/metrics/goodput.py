"""Which sequences kept to their times."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from afserve.control.wire.load_values import ClassCounts
from afserve.metrics import Counter, MetricFamily

PREFILL, DECODE = "prefill", "decode"
ON_TIME, LATE = "yes", "no"
DrawCounts = Callable[[str, Mapping[str, int]], None]
"""Takes a name, and numbers by what they count."""


@dataclass(frozen=True, slots=True)
class Times:
    """In seconds; None asks for nothing. `service_class` is the request's."""

    ttft: float | None = None
    tpot: float | None = None
    service_class: str = ""

    def or_else(self, own: "Times") -> "Times":
        """With the server's own where a request asks for nothing."""
        return Times(self.ttft or own.ttft, self.tpot or own.tpot, self.service_class)


ANY_TIME = Times()


class GoodputMeter:
    """Sequences that kept to their times, and the tokens of those. Prefill is judged by `ttft`, the seconds to a first
    token, and decode by `tpot`, the mean seconds of each further one; without such a time nothing is judged."""

    def __init__(self, draw: DrawCounts | None = None) -> None:
        """`draw` is told of a phase whenever a sequence was judged."""
        self._draw = draw
        self.sequences = Counter("phase", "on_time")
        self.tokens = Counter("phase")
        self.classes = Counter("service_class", "phase", "on_time")
        self.class_tokens = Counter("service_class", "phase")
        self._came = Counter("service_class")

    def came(self, times: Times) -> None:
        """A sequence was asked for."""
        if times.service_class:
            self._came.add(1, times.service_class)

    def first(self, times: Times, prompt_tokens: int, seconds: float) -> None:
        """A first token came after so long."""
        self._judge(PREFILL, times, times.ttft, seconds, prompt_tokens)

    def never(self, times: Times, seconds: float) -> None:
        """A sequence ended after so long, without a token. Before its time it is nobody's fault."""
        if times.ttft is not None and seconds > times.ttft:
            self._judge(PREFILL, times, times.ttft, seconds, 0)

    def rest(self, times: Times, tokens: int, seconds: float) -> None:
        """A sequence has ended: `tokens` in all, `seconds` from the first to the last. One token has no rest."""
        if tokens > 1:
            self._judge(DECODE, times, times.tpot, seconds / (tokens - 1), tokens)

    def _judge(self, phase: str, times: Times, limit: float | None, seconds: float, tokens: int) -> None:
        if limit is None:
            return
        on_time = seconds <= limit
        self.sequences.add(1, phase, ON_TIME if on_time else LATE)
        if on_time:
            self.tokens.add(tokens, phase)
        if name := times.service_class:
            self.classes.add(1, name, phase, ON_TIME if on_time else LATE)
            self.class_tokens.add(tokens if on_time else 0, name, phase)
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
        yield self.classes.family(("afserve_class_sequences",), f"{judged[:-1]}, by class of service.")
        yield self.class_tokens.family(
            ("afserve_class_goodput_tokens",), f"{kept[:-1]}, by class of service."
        )

    def figures(self) -> dict[str, dict[str, int]]:
        """By phase, and by class and phase; nothing where no sequence was judged."""
        found = self._of_classes()
        for phase in (PREFILL, DECODE):
            judged = self._judged(phase)
            if any(judged.values()):
                found[phase] = {**judged, "tokens": int(self.tokens.total_of(phase))}
        return found

    def class_counts(self) -> dict[str, ClassCounts]:
        """By class, for whoever sizes pools."""
        found: dict[str, ClassCounts] = {}
        for sample in self._came.samples():
            ((_, name),) = sample.labels
            kept, late = (
                [int(self.classes.total_of(name, phase, which)) for phase in (PREFILL, DECODE)]
                for which in (ON_TIME, LATE)
            )
            tokens = int(self.class_tokens.total_of(name, DECODE))
            found[name] = ClassCounts(
                int(sample.value), kept[0] + late[0], late[0], kept[1] + late[1], late[1], tokens
            )
        return found

    def _of_classes(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for sample in self.class_tokens.samples():
            name, phase = (value for _, value in sample.labels)
            kept, late = (int(self.classes.total_of(name, phase, which)) for which in (ON_TIME, LATE))
            found[f"{name}: {phase}"] = {"on_time": kept, "late": late, "tokens": int(sample.value)}
        return found
