"""What a node has drawn since it last sent some, as bytes that travel to the controller of a run over several hosts.

It knows neither who gathers it nor how clocks are compared: that is done with `at`, `clock` and the messages' names.
"""

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from afserve.errors import ProtocolError
from afserve.tracing.recording import inflated, read_slice, read_time, read_word
from afserve.tracing.trace import Arrow, Instant, Point, Slice

MOST_EVENTS = 5000
MOST_BYTES = 4 << 20  # compressed
_MOST_CHARACTERS = 16 << 20
_LEVEL = 1
_ARROWS: dict[object, Arrow] = {"s": "s", "t": "t", "f": "f"}


@dataclass(frozen=True, slots=True)
class TracePart:
    """`at` is when it was packed, in seconds of the node's clock, whose name is `clock`: nodes with one name share it.

    `dropped` counts the events that the node had no room for until then.
    """

    at: float
    clock: str
    slices: Sequence[Slice] = ()
    arrows: Sequence[Point] = ()
    instants: Sequence[Instant] = ()
    dropped: int = 0

    def pack(self) -> bytes:
        fields = [self.at, self.clock, self.slices, self.arrows, self.instants, self.dropped]
        return zlib.compress(json.dumps(fields, separators=(",", ":")).encode(), _LEVEL)

    @classmethod
    def unpack(cls, data: bytes) -> "TracePart":
        """Raises ProtocolError for bytes that no node packs."""
        try:
            at, clock, slices, arrows, instants, dropped = json.loads(inflated(data, _MOST_CHARACTERS))
            if not isinstance(dropped, int) or isinstance(dropped, bool) or dropped < 0:
                raise TypeError(f"{dropped!r} is no number of events")
            return cls(
                read_time(at),
                read_word(clock),
                tuple(read_slice(*each) for each in slices),
                tuple(_point(*each) for each in arrows),
                tuple((read_word(name), read_time(when)) for name, when in instants),
                dropped,
            )
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ProtocolError(f"{len(data)} bytes are no part of a trace: {error}") from error


def own_clock() -> str:
    """The name of this process's monotonic clock, the same for all processes that share it; empty where unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return ""


def _point(identity: object, kind: object, track: object, at: object) -> Point:
    return read_word(identity), _ARROWS[kind], read_word(track), read_time(at)
