"""A picture of a chat as its family reads it: what stands for it in the prompt, and its pixels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from afserve.errors import RequestError
from afserve.tiles import MOST_TILE_BYTES, PictureTile

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Picture:
    """`words` take its place in the prompt; its `tiles` are in order, and begin where nobody knows yet."""

    words: str
    tiles: Sequence[PictureTile]


class PixelRoom:
    """Bytes of pixels that a request may still have. `name`: the field of the picture that takes them."""

    def __init__(self) -> None:
        self._left, self.name = MOST_TILE_BYTES, ""

    def claim_bytes(self, size: int) -> None:
        """Before anything of that size is made. Raises RequestError."""
        if size > self._left:
            raise RequestError.about(
                self.name,
                f"with those before it more than {MOST_TILE_BYTES} bytes of tiles; send fewer, or smaller ones",
            )
        self._left -= size


class Cutter(Protocol):
    """`place` is where a chat template has a picture, `mark` the token that its rows stand for."""

    place: str
    mark: str

    def cut_picture(self, image: "Image", room: PixelRoom) -> Picture:
        """An upright picture in RGB. Raises RequestError about the field `room.name`."""


def tile_of(image: "Image") -> PictureTile:
    """Its planes, one after the other."""
    return PictureTile(0, image.width, b"".join(plane.tobytes() for plane in image.split()))
