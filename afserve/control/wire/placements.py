"""How placements travel: compressed, whole the first time on a stream and as what changes from then on.

A placement of 1,000 nodes is megabytes of JSON, and thousands of streams carry the same ones: the work is done once for
all of them. What is the same is known by identity, as placements are values that are passed on and never copied.
"""

import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from afserve.errors import ConfigError, ProtocolError
from afserve.placement.change import change, changed
from afserve.placement.placement import Placement
from afserve.placement.placement_text import MOST_CHARACTERS

_KEPT = 8
_LEVEL = 1  # a tenth of the time of the usual level, and as small where most rows are alike
Result = TypeVar("Result")


class Memo(Generic[Result]):
    """The last few results. `keep` are objects that a key names by `id`: they live as long as it."""

    def __init__(self) -> None:
        self._results: OrderedDict[Hashable, tuple[Result, tuple[object, ...]]] = OrderedDict()

    def get(self, key: Hashable, work: Callable[[], Result], keep: tuple[object, ...] = ()) -> Result:
        if key not in self._results:
            self._results[key] = work(), keep
            while len(self._results) > _KEPT:
                self._results.popitem(last=False)
        return self._results[key][0]


_packed: Memo[bytes] = Memo()
_changes: Memo[bytes | None] = Memo()
_unpacked: Memo[Placement] = Memo()


@dataclass(frozen=True, slots=True)
class SaidPlacement:
    """Compressed text. With `base` it is what changes from that epoch; None stands for a whole placement."""

    data: bytes
    base: int | None = None


class SaidLast:
    """One end of a stream: the placement that went over it last."""

    def __init__(self) -> None:
        self._last: Placement | None = None

    def say(self, placement: Placement) -> SaidPlacement:
        last, self._last = self._last, placement
        if last is None:
            return SaidPlacement(pack(placement))
        key = id(last), id(placement)
        data = _changes.get(key, lambda: _change(last, placement), (last, placement))
        return SaidPlacement(pack(placement)) if data is None else SaidPlacement(data, last.epoch)

    def hear(self, said: SaidPlacement) -> Placement:
        """Raises ProtocolError or ConfigError for what no correct peer says."""
        last = self._last
        if said.base is None:
            self._last = unpack(said.data)
        elif last is None or last.epoch != said.base:
            known = "none" if last is None else f"epoch {last.epoch}"
            raise ProtocolError(f"a change of placement epoch {said.base} came where {known} is known")
        else:
            key = id(last), said.data
            self._last = _unpacked.get(key, lambda: changed(last, _text(said.data)), (last,))
        return self._last


def pack(placement: Placement) -> bytes:
    """The whole of it."""
    return _packed.get(
        id(placement), lambda: zlib.compress(placement.to_json().encode(), _LEVEL), (placement,)
    )


def unpack(data: bytes) -> Placement:
    """Raises ConfigError for what is not a placement, or too large a one."""
    return _unpacked.get(data, lambda: Placement.from_json(_text(data)))


def _change(old: Placement, new: Placement) -> bytes | None:
    text = change(old, new)
    return None if text is None else zlib.compress(text.encode(), _LEVEL)


def _text(data: bytes) -> str:
    """At most as much as the reader of placements takes, whatever the compressed size promises."""
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(data, MOST_CHARACTERS + 1)
        if len(text) > MOST_CHARACTERS or stream.unconsumed_tail or not stream.eof:
            raise ConfigError(f"a placement of more than {MOST_CHARACTERS:,} characters, or not a whole one")
        return text.decode("utf-8")
    except (zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"a placement that cannot be read: {error}") from error
