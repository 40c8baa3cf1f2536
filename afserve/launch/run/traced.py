"""One trace of a run over several hosts: what nodes have sent, in the controller's clock, as the parts that are merged.

A part says when it was sent, by the clock of its node, and it is known when it came: so no clock is more ahead than
the quickest part says. Between attention and expert nodes the rows themselves say it more closely.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from afserve.control.traces import SUFFIX, read_life
from afserve.member import Life
from afserve.server.live.timeline import Call, Trip, calls, shifts, trips
from afserve.tracing.recording import Recording
from afserve.tracing.trace import ONE_EXCHANGE, Trace
from afserve.tracing.trace_part import TracePart, own_clock


@dataclass(frozen=True, slots=True)
class Drawn:
    """Everything that one life of a node has sent. `ahead`: at most so much is to be added to its clock."""

    life: Life
    host: str
    parts: Sequence[TracePart]
    ahead: float

    @property
    def clock(self) -> str:
        """Lives without a known clock have one each."""
        return self.parts[0].clock or f"{self.life.node} {self.life.generation}"

    @property
    def name(self) -> str:
        again = f", life {self.life.generation + 1}" if self.life.generation else ""
        return f"{self.life.node} on {self.host}{again}"


def write_parts(folder: Path, own: str | None = None) -> None:
    """From what was sent, the files that `afserve.tracing.trace.merge` takes. `own` names the controller's clock."""
    found = [each for path in sorted(folder.glob(f"*{SUFFIX}")) if (each := _read(path)) is not None]
    moved = in_the_controllers_clock(found, own_clock() if own is None else own)
    for each, shift in zip(found, moved, strict=True):
        _write(each, shift, folder / f"{each.life.node}.{each.life.generation}.trace")


def in_the_controllers_clock(found: Sequence[Drawn], own: str) -> list[float]:
    """Seconds to add to the times of each."""
    ahead: dict[str, float] = {own: 0.0} if own else {}
    for each in found:
        if each.clock != own or not own:
            ahead[each.clock] = min(ahead.get(each.clock, each.ahead), each.ahead)
    rough = [ahead[each.clock] for each in found]
    closer = _closer(found, rough)
    here = [shift for each, shift in zip(found, closer) if each.clock == own and shift is not None]
    if not here:  # the gateway's clock is nobody's: the first attention node's rough place stays
        return [at + (shift or 0.0) for at, shift in zip(rough, closer)]
    return [at + (0.0 if shift is None else shift - here[0]) for at, shift in zip(rough, closer)]


def _closer(found: Sequence[Drawn], rough: Sequence[float]) -> list[float | None]:
    """What rows say is to be added to the rough times of each; None where no row went to another node."""
    sent: list[Trip] = []
    computed: list[Call] = []
    for number, (each, shift) in enumerate(zip(found, rough, strict=True)):
        for part in each.parts:
            slices = tuple(
                (track, name, s + shift, e + shift, args) for track, name, s, e, args in part.slices
            )
            drawn = Recording(str(each.life.node), 0.0, 0.0, slices)
            sent += [replace(trip, node=str(number)) for trip in trips(drawn)]
            computed += [replace(call, node=str(number)) for call in calls(drawn)]
    moved: Mapping[str, float] = shifts(*_exchanges(sent, computed))
    return [moved.get(str(number)) for number in range(len(found))]


def _exchanges(sent: Iterable[Trip], computed: Iterable[Call]) -> tuple[list[Trip], list[Call]]:
    """With messages that are named once each: of one name, those that lie together in time are one."""
    named: dict[str, list[tuple[Trip, str]]] = defaultdict(list)
    trips_, calls_ = [], []
    for number, trip in enumerate(sent):
        names = tuple(f"{message} {number}" for message in trip.messages)
        for message, name in zip(trip.messages, names, strict=True):
            named[message].append((trip, name))
        trips_.append(replace(trip, messages=names))
    for call in computed:
        own = [
            name
            for message in call.messages
            for trip, name in named[message]
            if trip.start - ONE_EXCHANGE <= call.start <= trip.end + ONE_EXCHANGE
        ]
        calls_.append(replace(call, messages=tuple(own)))
    return trips_, calls_


def _read(path: Path) -> Drawn | None:
    """None where nothing of it can be read."""
    life, host, parts = read_life(path)
    came = list(parts)
    if not came:
        return None
    return Drawn(life, host, tuple(part for _, part in came), min(at - part.at for at, part in came))


def _write(drawn: Drawn, shift: float, path: Path) -> None:
    events = sum(len(part.slices) + len(part.arrows) + len(part.instants) for part in drawn.parts)
    trace = Trace(drawn.name, most_events=events)
    for part in drawn.parts:
        for track, name, start, end, args in part.slices:
            trace.slice(track, name, start + shift, end + shift, args)
        for identity, kind, track, at in part.arrows:
            trace.arrow(identity, kind, track, at + shift)
        for name, at in part.instants:
            trace.instant(name, at + shift)
    trace.dropped = max(part.dropped for part in drawn.parts)
    trace.write(path)
