"""What one node drew in a moment, as bytes that travel: the slices of its trace, and when it began and ended to record.

It knows neither who asked for it nor how it is shown. Times are seconds of the node's own clock.
"""

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from afserve.errors import ProtocolError
from afserve.tracing.trace import Slice

MOST_SLICES = 2000
MOST_BYTES = 1 << 18  # compressed
_MOST_CHARACTERS = 1 << 22
_LEVEL = 1


@dataclass(frozen=True, slots=True)
class Recording:
    """Its slices end between `began` and `ended`; those under way when it began are whole."""

    node: str
    began: float
    ended: float
    slices: Sequence[Slice]

    def pack(self) -> bytes:
        """At most MOST_BYTES; the latest slices go where they need more."""
        slices = list(self.slices[:MOST_SLICES])
        while True:
            ended = (
                self.ended if len(slices) == len(self.slices) else max((s[3] for s in slices), default=0.0)
            )
            text = json.dumps([self.node, self.began, ended, slices], separators=(",", ":"))
            data = zlib.compress(text.encode(), _LEVEL)
            if len(data) <= MOST_BYTES and len(text) <= _MOST_CHARACTERS:
                return data
            slices = slices[: len(slices) // 2]

    @classmethod
    def unpack(cls, data: bytes) -> "Recording":
        """Raises ProtocolError for bytes that no node packs."""
        try:
            node, began, ended, slices = json.loads(inflated(data, _MOST_CHARACTERS))
            return cls(
                read_word(node),
                read_time(began),
                read_time(ended),
                tuple(read_slice(*each) for each in slices),
            )
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ProtocolError(f"{len(data)} bytes are no recording of a node: {error}") from error


def inflated(data: bytes, most: int) -> str:
    """At most `most` characters, whatever the compressed size promises. Raises ValueError."""
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(text) > most or not stream.eof:
        raise ValueError(f"more than {most:,} characters, or not a whole one")
    return text.decode()


def read_slice(track: object, name: object, start: object, end: object, args: object) -> Slice:
    """Raises TypeError for what no node draws; so do the two below."""
    if not isinstance(args, dict):
        raise TypeError(f"{args!r} is no table")
    for key, value in args.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            raise TypeError(f"{key} is {value!r}, neither a whole number nor a list of words")
    return read_word(track), read_word(name), read_time(start), read_time(end), args


def read_word(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no word")
    return value


def read_time(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise TypeError(f"{value!r} is no time")
    return float(value)
