"""Tiles of pictures that stand in a prompt: the shape of what encodes them, what a request carries of them, its bytes.

Plain numbers and bytes, no torch.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

MOST_TILE_BYTES = 24 << 20  # of one request
_HEAD = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """A vision tower over square tiles of pictures, and what projects its rows to the text model's width (Llama 4).

    A tile has `side` x `side` pixels of three colours in patches of `patch` x `patch`, which `layers` layers attend all
    to all; `join` x `join` of them become one row of `out` numbers, and that one of the text model. Each row takes the
    place of a token `token` of the prompt.
    """

    token: int
    side: int
    patch: int
    hidden: int
    layers: int
    heads: int
    inner: int
    join: int
    out: int
    theta: float

    @property
    def grid(self) -> int:
        """Patches along a side of a tile."""
        return self.side // self.patch

    @property
    def rows(self) -> int:
        """Tokens of a tile."""
        return (self.grid // self.join) ** 2

    @property
    def tile_bytes(self) -> int:
        return 3 * self.side**2

    def parameters(self, width: int) -> int:
        """Of a text model with rows of so many numbers."""
        h = self.hidden
        layer = 4 * h * (h + 1) + h * (2 * self.inner + 5) + self.inner
        ends = h * (3 * self.patch**2 + self.grid**2 + 6)
        return self.layers * layer + ends + self.out * (h * self.join**2 + self.out + width)


@dataclass(frozen=True)
class PictureTile:
    """`pixels` are a tile's red, green and blue plane, row by row, a byte for each number. Its rows stand in the place
    of the prompt's tokens from `start` on, as many as the model's encoder makes of a tile."""

    start: int
    pixels: bytes = field(repr=False)

    @cached_property
    def name(self) -> bytes:
        """128 bits of BLAKE2b over the pixels."""
        return hashlib.blake2b(self.pixels, digest_size=16).digest()


def pack_tiles(tiles: Iterable[PictureTile]) -> bytes:
    """Nothing where there are none."""
    return b"".join(
        part for tile in tiles for part in (_HEAD.pack(tile.start, len(tile.pixels)), tile.pixels)
    )


def unpack_tiles(data: bytes) -> tuple[PictureTile, ...]:
    """Raises ValueError for what `pack_tiles` does not give."""
    return tuple(_unpacked(data))


def _unpacked(data: bytes) -> Iterator[PictureTile]:
    at = 0
    while at < len(data):
        if at + _HEAD.size > len(data):
            raise ValueError("tiles: the bytes end within a head")
        start, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        if size > len(data) - at:
            raise ValueError(f"tiles: {size} bytes of pixels are told and {len(data) - at} are there")
        yield PictureTile(start, data[at : at + size])
        at += size
