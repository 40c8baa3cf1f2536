"""The micro-batches of the last steps as a picture: who computes when, whose rows are where, who waits for whom.

From what nodes have recorded of the same moment to a JSON object. It draws nothing and asks nobody.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from afserve.member import Role
from afserve.tracing.recording import Recording
from afserve.tracing.trace import AWAY, EXPERTS, WAITING, Args

_SLOP = 2e-6  # seconds by which two readings of one clock may disagree with an order
_Pair = tuple[str, str]  # an attention node and an expert node
_Bounds = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Trip:
    """Rows of a micro-batch: dispatched at `start`, all partial sums there at `end`, in messages with these names."""

    node: str
    lane: str
    layer: int
    start: float
    end: float
    messages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One computation of an expert node, of the rows of these messages."""

    node: str
    layer: int
    rows: int
    start: float
    end: float
    messages: tuple[str, ...]


def is_attention(recording: Recording) -> bool:
    return recording.node.startswith(f"{Role.ATTENTION}-")


def trips(recording: Recording) -> list[Trip]:
    return [
        Trip(recording.node, track.removesuffix(AWAY), _whole(args, "layer"), start, end, _messages(args))
        for track, _, start, end, args in recording.slices
        if track.endswith(AWAY)
    ]


def calls(recording: Recording) -> list[Call]:
    return [
        Call(recording.node, _whole(args, "layer"), _whole(args, "rows"), start, end, _messages(args))
        for track, _, start, end, args in recording.slices
        if track == EXPERTS
    ]


def in_one_clock(recordings: Sequence[Recording]) -> list[Recording]:
    """The same recordings, with the times that the first attention node's clock would have said."""
    sent = [trip for one in recordings for trip in trips(one)]
    moved = shifts(sent, [call for one in recordings for call in calls(one)])
    return [_moved(one, moved.get(one.node, 0.0)) for one in recordings]


def _moved(recording: Recording, shift: float) -> Recording:
    slices = tuple((track, name, s + shift, e + shift, args) for track, name, s, e, args in recording.slices)
    return replace(recording, began=recording.began + shift, ended=recording.ended + shift, slices=slices)


def shifts(sent: Sequence[Trip], computed: Sequence[Call]) -> Mapping[str, float]:
    """Seconds to add to a node's times, by its name: zero for the first attention node and whoever has its clock.

    A call from t to e computed a message that was sent at s and whose sum was added at f. So s <= t + d and e + d <= f
    bound the difference d of the two clocks, and many exchanges bound it closely. A difference that another node has
    is taken where it fits, else the middle.
    """
    found = {trip.node: 0.0 for trip in sent[:1]}
    left = _bounds(sent, computed)
    while pair := next((p for p in left if (p[0] in found) is not (p[1] in found)), None):
        attention, expert = pair
        low, high = left.pop(pair)
        if attention in found:
            base = found[attention]
            found[expert] = base + _between(low, high, [shift - base for shift in found.values()])
        else:
            base = found[expert]
            found[attention] = base - _between(low, high, [base - shift for shift in found.values()])
    return found


def _between(low: float, high: float, likely: Iterable[float]) -> float:
    fits = [each for each in likely if low - _SLOP <= each <= high + _SLOP]
    return min(fits, key=abs) if fits else (low + high) / 2


def _bounds(sent: Sequence[Trip], computed: Sequence[Call]) -> dict[_Pair, _Bounds]:
    """Of what is to be added to the expert node's clock to get the attention node's."""
    by_message = {message: trip for trip in sent for message in trip.messages}
    found: dict[_Pair, _Bounds] = defaultdict(lambda: (float("-inf"), float("inf")))
    for call in computed:
        for trip in (by_message[message] for message in call.messages if message in by_message):
            low, high = found[trip.node, call.node]
            found[trip.node, call.node] = max(low, trip.start - call.start), min(high, trip.end - call.end)
    return dict(found)


def _whole(args: Args, name: str) -> int:
    value = args.get(name)
    return value if isinstance(value, int) else 0


def _messages(args: Args) -> tuple[str, ...]:
    value = args.get("messages")
    return () if value is None or isinstance(value, int) else tuple(value)


MOST_STEPS = 6  # of the node that drew most; earlier ones are left out
_ATTEND = "attend"
_OWN = ("schedule", "sample")  # parts of "attend" that are drawn apart; the second ends a step


class LaneSpan(NamedTuple):
    """Of a lane: `kind` is "attend", "own" (a part of one that no rows depend on) or "experts"."""

    start: int
    end: int
    kind: str
    layer: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds of the clock of all recordings; what is drawn is in microseconds from `begin`."""

    begin: float
    end: float

    def micros(self, at: float) -> int:
        return round((min(max(at, self.begin), self.end) - self.begin) * 1e6)


def picture(packed: Iterable[bytes]) -> dict[str, object]:
    """Raises ProtocolError for bytes that no node packs.

    `micros` is its length, 0 where nothing ran; `steps` are ends of steps of the busiest micro-batch; `nodes` have
    lanes of spans; `trips` say whose rows were away: node, lane, layer, start, end, and who computed them when.
    """
    recordings = in_one_clock([one for one in map(Recording.unpack, packed) if one.slices])
    steps = _steps(recordings)
    window = _window(recordings, steps)
    if window is None:
        return {"micros": 0, "steps": [], "nodes": [], "trips": []}
    computed = {message: call for one in recordings for call in calls(one) for message in call.messages}
    sent = [trip for one in recordings for trip in trips(one)]
    return {
        "micros": window.micros(window.end),
        "steps": [window.micros(at) for at in steps if window.begin < at <= window.end],
        "nodes": [_node(one, window, sent, computed) for one in recordings],
        "trips": [_trip(trip, window, computed) for trip in sent if trip.end > window.begin],
    }


def _steps(recordings: Sequence[Recording]) -> list[float]:
    """When the busiest micro-batch of the busiest attention node ended a step."""
    busiest = max(filter(is_attention, recordings), key=lambda one: len(one.slices), default=None)
    ends: dict[str, list[float]] = defaultdict(list)
    for track, name, _, end, _ in busiest.slices if busiest is not None else ():
        if name == _OWN[-1]:
            ends[track].append(end)
    return max(ends.values(), key=len, default=[])


def _window(recordings: Sequence[Recording], steps: Sequence[float]) -> Window | None:
    """What all of them recorded, from the last steps on. None where there is nothing of attention nodes."""
    if not any(map(is_attention, recordings)):
        return None
    begin, end = max(one.began for one in recordings), min(one.ended for one in recordings)
    if len(steps) > MOST_STEPS:
        begin = max(begin, steps[-MOST_STEPS - 1])
    return Window(begin, end) if begin < end else None


def _node(
    recording: Recording, window: Window, sent: Sequence[Trip], computed: Mapping[str, Call]
) -> dict[str, object]:
    """`busy` and `waiting` are shares of the window; `last` is who answered last how often, of those it waited for."""
    lanes: dict[str, list[LaneSpan]] = defaultdict(list)
    waits: list[tuple[int, int]] = []
    for call in calls(recording):
        span = LaneSpan(window.micros(call.start), window.micros(call.end), EXPERTS, call.layer, call.rows)
        lanes[EXPERTS].append(span)
    for track, name, began, ended, _ in recording.slices:
        start, end = window.micros(began), window.micros(ended)
        if track == WAITING and start < end:
            waits.append((start, end))
        elif name == _ATTEND or name in _OWN:
            lanes[track].append(LaneSpan(start, end, _ATTEND if name == _ATTEND else "own"))
    seen = {name: sorted((s for s in lanes[name] if s.start < s.end), key=_order) for name in sorted(lanes)}
    whole = window.micros(window.end) or 1
    computing = [span for spans in seen.values() for span in spans if span.kind != "own"]
    return {
        "name": recording.node,
        "role": str(Role.ATTENTION if is_attention(recording) else Role.EXPERT),
        "busy": sum(span.end - span.start for span in computing) / whole,
        "waiting": sum(end - start for start, end in waits) / whole,
        "waits": waits,
        "last": _last(recording.node, sent, computed),
        "lanes": [{"name": name, "spans": spans} for name, spans in seen.items()],
    }


def _order(span: LaneSpan) -> tuple[int, bool]:
    """What is part of another span comes behind it."""
    return span.start, span.kind == "own"


def _last(node: str, sent: Sequence[Trip], computed: Mapping[str, Call]) -> tuple[str, float] | None:
    """The expert node that ended last in most exchanges with several, and in which share of them."""
    counted: Counter[str] = Counter()
    for trip in sent:
        found = [computed[message] for message in trip.messages if message in computed]
        if trip.node == node and len(found) > 1:
            counted[max(found, key=lambda call: call.end).node] += 1
    if not counted:
        return None
    name, times = counted.most_common(1)[0]
    return name, times / counted.total()


def _trip(trip: Trip, window: Window, computed: Mapping[str, Call]) -> dict[str, object]:
    found = [computed[message] for message in trip.messages if message in computed]
    return {
        "node": trip.node,
        "lane": trip.lane,
        "layer": trip.layer,
        "start": window.micros(trip.start),
        "end": window.micros(trip.end),
        "nodes": len(trip.messages),
        "by": [(call.node, window.micros(call.start), window.micros(call.end)) for call in found],
    }
