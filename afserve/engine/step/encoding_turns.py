"""Which tile of a picture is encoded next.

Two are encoded in turns at most: the one that was asked for first, so that nobody waits for ever, and beside it the
smallest of those with at most a quarter of its pixels. Each has half of the time. A small picture waits for no large
one so, and what is held of two stays within `EncoderSpec.scratch_bytes`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from afserve.engine.scheduling.sequence import Sequence
from afserve.models.vision.tower import Encoding
from afserve.tiles import SMALLER, PictureTile


@dataclass(slots=True)
class _Begun:
    encoding: Encoding
    seconds: float  # of its turns, and before them those of the other at that time


class EncodingTurns:
    def __init__(self, encode: Callable[[PictureTile], Encoding]) -> None:
        self._encode = encode
        self._wanted: dict[bytes, tuple[PictureTile, Sequence]] = {}  # who came first is first
        self._begun: dict[bytes, _Begun] = {}

    def __len__(self) -> int:
        """Tiles that are asked for."""
        return len(self._wanted)

    def ask(self, tile: PictureTile, sequence: Sequence) -> None:
        """For rows that `sequence` needs; one that is cancelled asks no more."""
        self._wanted.setdefault(tile.name, (tile, sequence))

    def advance(self, now: Callable[[], float]) -> tuple[bytes, Tensor] | None:
        """One part of a tile; its name and rows where that was the last one."""
        for name in [name for name, (_, sequence) in self._wanted.items() if sequence.cancelled]:
            self._leave(name)
        if not self._wanted:
            return None
        name, begun = min(self._open().items(), key=lambda item: item[1].seconds)
        since = now()
        try:
            next(begun.encoding)
        except StopIteration as ended:
            self._leave(name)
            return name, ended.value
        begun.seconds += now() - since
        return None

    def _open(self) -> dict[bytes, _Begun]:
        first, (largest, _) = next(iter(self._wanted.items()))
        most = len(largest.pixels) // SMALLER
        small = [
            (len(tile.pixels), name) for name, (tile, _) in self._wanted.items() if len(tile.pixels) <= most
        ]
        for name in [first, *(name for _, name in sorted(small, key=lambda one: one[0])[:1])]:
            if name not in self._begun and len(self._begun) < 2:
                seconds = min((one.seconds for one in self._begun.values()), default=0.0)
                self._begun[name] = _Begun(self._encode(self._wanted[name][0]), seconds)
        return self._begun

    def _leave(self, name: bytes) -> None:
        del self._wanted[name]
        self._begun.pop(name, None)
