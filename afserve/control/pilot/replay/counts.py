"""What arrives in a replay, and sums over it as gateways and nodes count them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from afserve.control.pilot.classes import ClassAim
from afserve.control.pilot.observed import PoolLoad
from afserve.control.pilot.sizes import TargetTimes
from afserve.control.wire.load_values import ClassCounts


@dataclass(frozen=True, slots=True)
class Packet:
    """Seconds of arrival; tokens of prompt and answer of each of `weight` requests. `kind` is the number of its class
    of service, 0 where there are none."""

    at: float
    prompt: int
    answer: int
    weight: float = 1.0
    kind: int = 0


@dataclass(slots=True)
class KindCounts:
    """Sums over the requests of one class."""

    came: float = 0.0
    first: float = 0.0
    first_late: float = 0.0
    rest: float = 0.0
    rest_late: float = 0.0
    met: float = 0.0


@dataclass(slots=True)
class PacketCounts:
    """Sums since the beginning, over requests: what gateways and nodes count too. `classes` by their numbers, one of no
    name where there are none; a class without a time has the one of all that is `wanted`."""

    wanted: TargetTimes
    classes: Sequence[ClassAim]
    kinds: list[KindCounts] = field(init=False)
    _times: list[tuple[float, float]] = field(init=False)
    came: float = 0.0
    prompt_tokens: float = 0.0
    prompt_squares: float = 0.0
    first: float = 0.0  # first tokens
    first_seconds: float = 0.0
    first_late: float = 0.0
    ended: float = 0.0
    answer_tokens: float = 0.0
    rest_seconds: float = 0.0  # from a first token to the last
    rest_late: float = 0.0
    met: float = 0.0  # in time in both
    tokens: float = 0.0  # generated
    prefill_busy: float = 0.0

    def __post_init__(self) -> None:
        self.kinds = [KindCounts() for _ in self.classes]
        self._times = [one.times(self.wanted) for one in self.classes]

    def note_came(self, one: Packet) -> None:
        self.kinds[one.kind].came += one.weight
        self.came += one.weight
        self.prompt_tokens += one.prompt * one.weight
        self.prompt_squares += one.prompt * one.prompt * one.weight

    def note_first(self, one: Packet, first: float) -> None:
        """Its first token came at that second."""
        seconds, kind = first - one.at, self.kinds[one.kind]
        self.first += one.weight
        self.first_seconds += seconds * one.weight
        self.tokens += one.weight
        kind.first += one.weight
        if seconds > self._times[one.kind][0]:
            self.first_late += one.weight
            kind.first_late += one.weight

    def note_ended(self, one: Packet, first: float, ended: float) -> None:
        kind, (ttft, tpot) = self.kinds[one.kind], self._times[one.kind]
        self.ended += one.weight
        self.answer_tokens += one.answer * one.weight
        self.rest_seconds += (ended - first) * one.weight
        late = ended - first > tpot * max(one.answer - 1, 1)
        self.rest_late += one.weight * late
        kind.rest += one.weight
        kind.rest_late += one.weight * late
        if not late and first - one.at <= ttft:
            self.met += one.weight
            kind.met += one.weight

    def of_classes(self) -> dict[str, ClassCounts]:
        """By name, as gateways say them, but for parts of requests, which only a replay has."""
        found = {}
        for aim, kind in zip(self.classes, self.kinds, strict=True):
            sums: Any = (kind.came, kind.first, kind.first_late, kind.rest, kind.rest_late)
            if aim.name:
                found[aim.name] = ClassCounts(*sums)
        return found

    def load(self) -> PoolLoad:
        sums = {one.name: getattr(self, one.name) for one in fields(PoolLoad) if hasattr(self, one.name)}
        return PoolLoad(**sums, rest_tokens=self.answer_tokens - self.ended)
