"""Tiles of pictures that stand in a prompt: the shape of what encodes them, what a request carries of them, its bytes.

Plain numbers and bytes, no torch.
"""

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

MOST_TILE_BYTES = 48 << 20  # of one request: 16 Mi pixels, what Qwen3-VL makes of any picture at most
TURN_PATCHES = (
    1024  # that go through maps of an encoder's layer at once: less than a tenth of a second on two cores
)
SMALLER = 4  # a tile that is encoded beside another has so many times fewer pixels
KEPT_ROW_BYTES = 64 << 20  # of rows of the last pictures, on each attention node
_HEAD = struct.Struct("<III")


@dataclass(frozen=True)
class PictureTile:
    """`pixels` are a picture's red, green and blue plane, row by row, `wide` to a row, a byte for each number. Its rows
    stand in the place of the prompt's tokens from `start` on, as many as the model's encoder makes of it."""

    start: int
    wide: int
    pixels: bytes = field(repr=False)

    @property
    def tall(self) -> int:
        return len(self.pixels) // (3 * self.wide)

    @cached_property
    def name(self) -> bytes:
        """128 bits of BLAKE2b over the pixels and their width."""
        said = hashlib.blake2b(self.wide.to_bytes(4, "big"), digest_size=16)
        said.update(self.pixels)
        return said.digest()


@dataclass(frozen=True, slots=True)
class EncoderSpec(ABC):
    """A vision tower over pictures in patches of `patch` x `patch` pixels of three colours, which `layers` layers
    attend all to all, and what projects its rows to the text model's width. `join` x `join` patches become one row,
    which takes the place of a token `token` of the prompt.
    """

    token: int
    patch: int
    hidden: int
    layers: int
    heads: int
    inner: int
    join: int
    theta: float

    @property
    def step(self) -> int:
        """Pixels along a side of what becomes one row."""
        return self.patch * self.join

    def grid(self, tile: PictureTile) -> tuple[int, int]:
        """Rows and columns of what it becomes, which are read one row after the other."""
        return tile.tall // self.step, tile.wide // self.step

    def row_count(self, tile: PictureTile) -> int:
        """Whose places it takes."""
        tall, wide = self.grid(tile)
        return tall * wide

    @property
    @abstractmethod
    def most_patches(self) -> int:
        """Of what is encoded at once."""

    def scratch_bytes(self, element: int) -> int:
        """Beside weights, about: rows that are kept, what is held of all patches and of those of a smaller picture, and
        what a layer makes of those of a turn, in numbers of `element` bytes."""
        patches = self.most_patches + self.most_patches // SMALLER
        held, turn = patches * 11 * self.hidden, TURN_PATCHES * (2 * self.inner + 4 * self.hidden)
        return KEPT_ROW_BYTES + (held + turn) * element

    @abstractmethod
    def fault(self, tile: PictureTile) -> str:
        """Why it is none of this model's; empty where it is one."""

    @abstractmethod
    def parameters_beside(self, width: int) -> int:
        """Of a text model with rows of so many numbers."""

    def _layer_parameters(self) -> int:
        h = self.hidden
        return self.layers * (4 * h * (h + 1) + h * (2 * self.inner + 5) + self.inner)


@dataclass(frozen=True, slots=True)
class TiledEncoderSpec(EncoderSpec):
    """Llama 4's: square tiles with `side` pixels, rows of `out` numbers before they are projected."""

    side: int
    out: int

    @property
    def tile_bytes(self) -> int:
        return 3 * self.side**2

    @property
    def most_patches(self) -> int:
        return (self.side // self.patch) ** 2 + 1

    def fault(self, tile: PictureTile) -> str:
        if tile.wide == self.side and len(tile.pixels) == self.tile_bytes:
            return ""
        given = f"{len(tile.pixels)} bytes, {tile.wide} pixels wide"
        return f"has {given}, this model's have {self.tile_bytes} bytes and {self.side}"

    def parameters_beside(self, width: int) -> int:
        h = self.hidden
        ends = h * (3 * self.patch**2 + self.most_patches + 5)
        return self._layer_parameters() + ends + self.out * (h * self.join**2 + self.out + width)


@dataclass(frozen=True, slots=True)
class WholeEncoderSpec(EncoderSpec):
    """Qwen3-VL's and Qwen3.5's: pictures of any size that is whole squares. A patch is read as `frames` alike ones.
    What is learned for `places` x `places` places is stretched over a picture. `sections` of the text model's
    frequencies turn by place in time, row and column, in turns. What the tower's layers `deep` give is added to the
    rows behind as many of the text model's first layers."""

    places: int
    frames: int
    sections: tuple[int, ...]
    deep: tuple[int, ...] = ()

    @property
    def most_patches(self) -> int:
        return MOST_TILE_BYTES // (3 * self.patch**2)

    def fault(self, tile: PictureTile) -> str:
        even = tile.wide > 0 and len(tile.pixels) == 3 * tile.wide * tile.tall and tile.tall > 0
        if even and tile.wide % self.step == tile.tall % self.step == 0:
            return ""
        return f"has {len(tile.pixels)} bytes, {tile.wide} pixels wide: not whole squares of {self.step} x {self.step}"

    def parameters_beside(self, width: int) -> int:
        h, joined = self.hidden, self.hidden * self.join**2
        ends = h * (3 * self.frames * self.patch**2 + self.places**2 + 3)
        merger = (joined + width) * (joined + 1)
        return self._layer_parameters() + ends + merger + len(self.deep) * (2 * joined + merger)


def pack_tiles(tiles: Iterable[PictureTile]) -> bytes:
    """Nothing where there are none."""
    return b"".join(
        part for tile in tiles for part in (_HEAD.pack(tile.start, tile.wide, len(tile.pixels)), tile.pixels)
    )


def unpack_tiles(data: bytes) -> tuple[PictureTile, ...]:
    """Raises ValueError for what `pack_tiles` does not give."""
    return tuple(_unpacked(data))


def _unpacked(data: bytes) -> Iterator[PictureTile]:
    at = 0
    while at < len(data):
        if at + _HEAD.size > len(data):
            raise ValueError("tiles: the bytes end within a head")
        start, wide, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        if size > len(data) - at:
            raise ValueError(f"tiles: {size} bytes of pixels are told and {len(data) - at} are there")
        yield PictureTile(start, wide, data[at : at + size])
        at += size
