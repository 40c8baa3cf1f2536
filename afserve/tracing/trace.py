"""Records who did what when, for Perfetto (ui.perfetto.dev) and chrome://tracing: slices on tracks, arrows between,
and curves of counts.

Each process records into memory, bounded, and writes one part at its end; `merge` makes one file of them. Times are
seconds of a clock that all processes of a machine share (CLOCK_MONOTONIC). Format: Trace Event Format, JSON.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from afserve.errors import ConfigError

Arrow = Literal["s", "t", "f"]  # start, through, finish
Instant = tuple[str, float]  # name, at
Args = Mapping[str, int | Sequence[str]]  # what a viewer shows beside a slice, such as its layer
Slice = tuple[str, str, float, float, Args]  # track, name, start, end
Point = tuple[str, Arrow, str, float]  # identity, kind, track, at
Event = dict[str, object]
# Tracks of a node: each micro-batch has one by its number, and with AWAY behind its name that of its rows. What is on
# COUNTS has no length: numbers by name, which a viewer draws as curves.
EXPERTS, WAITING, AWAY, COUNTS = "experts", "waiting", ", with the experts", "counts"
KV_BLOCKS, PICTURES = "KV blocks", "pictures"
# Seconds by which points of one message may lie apart, as clocks of two hosts do; no node returns from its end so soon.
ONE_EXCHANGE = 1.0
_MOST_EVENTS = 1_000_000
NO_ARGS: Args = {}


class Trace:
    """One process. `track` is a row of it, such as a micro-batch."""

    def __init__(self, process: str, most_events: int = _MOST_EVENTS) -> None:
        self.process = process
        self.dropped = 0
        self._most = most_events
        self._slices: list[Slice] = []
        self._arrows: list[Point] = []
        self._instants: list[Instant] = []

    def slice(self, track: str, name: str, start: float, end: float, args: Args = NO_ARGS) -> None:
        if self._room():
            self._slices.append((track, name, start, end, args))

    def arrow(self, identity: str, kind: Arrow, track: str, at: float) -> None:
        """One point of an arrow; points of the same identity are joined in the order s, t, f."""
        if self._room():
            self._arrows.append((identity, kind, track, at))

    def counts(self, name: str, values: Mapping[str, int], at: float) -> None:
        """Curves of one picture from `at` on, such as what runs and what waits."""
        self.slice(COUNTS, name, at, at, dict(values))

    def instant(self, name: str, at: float) -> None:
        """Something that concerns all processes: a line through the whole picture."""
        if self._room():
            self._instants.append((name, at))

    @property
    def slices(self) -> Sequence[Slice]:
        """All so far, in the order in which they ended."""
        return self._slices

    @property
    def arrows(self) -> Sequence[Point]:
        return self._arrows

    @property
    def instants(self) -> Sequence[Instant]:
        return self._instants

    def _room(self) -> bool:
        if len(self._slices) + len(self._arrows) + len(self._instants) < self._most:
            return True
        self.dropped += 1
        return False

    def write(self, path: Path) -> None:
        """One part: a line of JSON with everything that was recorded."""
        part = {
            "process": self.process,
            "slices": self._slices,
            "arrows": self._arrows,
            "instants": self._instants,
            "dropped": self.dropped,
        }
        path.write_text(json.dumps(part), encoding="utf-8")


def check_writable(path: str) -> None:
    """Refuses a file that could not be written, before hours of work instead of after."""
    try:
        Path(path).touch()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def merge(parts: Sequence[Path], out: Path) -> int:
    """All parts as one trace file; returns how many events had to be dropped. An arrow whose beginning nobody recorded
    is not drawn: its sender was lost, or lost another peer while it sent."""
    events: list[Event] = []
    read = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(parts)]
    begun = _beginnings(point for part in read for point in part["arrows"])
    for pid, part in enumerate(read, start=1):
        arrows = [own for point in part["arrows"] if (own := _of_one_life(point, begun)) is not None]
        events += _events(pid, part["process"], part["slices"], arrows)
        events += [_instant(pid, name, at) for name, at in part["instants"]]
    out.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    return sum(part["dropped"] for part in read)


def _beginnings(arrows: Iterable[Point]) -> dict[str, list[float]]:
    """By identity, when its arrows begin, in order: numbers of messages begin anew with a node's next life."""
    begun: dict[str, list[float]] = {}
    for identity, kind, _, at in arrows:
        if kind == "s":
            begun.setdefault(identity, []).append(at)
    return {identity: sorted(times) for identity, times in begun.items()}


def _of_one_life(point: Point, begun: Mapping[str, list[float]]) -> Point | None:
    """Under a name that no other life uses; None where its beginning was not recorded."""
    identity, kind, track, at = point
    number = bisect_right(begun.get(identity, ()), at + ONE_EXCHANGE)
    if number == 0:
        return None
    return (identity if number == 1 else f"{identity} again {number}", kind, track, at)


def _events(pid: int, process: str, slices: Sequence[Slice], arrows: Sequence[Point]) -> list[Event]:
    tracks = sorted({track for track, *_ in slices if track != COUNTS} | {track for _, _, track, _ in arrows})
    tid = {track: number for number, track in enumerate(tracks)}
    events = [_named("process_name", pid, 0, process)]
    events += [_named("thread_name", pid, number, track) for track, number in tid.items()]
    for track, name, start, end, args in slices:
        if track == COUNTS:
            events.append({"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": start * 1e6, "args": args})
            continue
        times: Event = {"ts": start * 1e6, "dur": (end - start) * 1e6}
        events.append({"ph": "X", "pid": pid, "tid": tid[track], "name": name, **times, "args": args})
    for identity, kind, track, at in arrows:
        name, category = ("KV hand-over", "kv") if track == KV_BLOCKS else ("rows", "m2n")
        point: Event = {
            "ph": kind,
            "pid": pid,
            "tid": tid[track],
            "name": name,
            "cat": category,
            "id": identity,
        }
        # "e": the arrow ends at the slice that encloses it, not at the next one.
        events.append({**point, "ts": at * 1e6, **({"bp": "e"} if kind == "f" else {})})
    return events


def _instant(pid: int, name: str, at: float) -> Event:
    return {"ph": "i", "s": "g", "pid": pid, "tid": 0, "name": name, "cat": "incidents", "ts": at * 1e6}


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}
