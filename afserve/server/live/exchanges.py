"""What attention nodes sent and expert nodes computed, out of recordings; and all of it in one clock.

Hosts have clocks of their own. Each node's times are moved until no row is computed before it was sent or after its sum
was added.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from afserve.member import Role
from afserve.recording import Recording
from afserve.trace import AWAY, EXPERTS, Args

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
