"""Qwen3.5's pictures: whole, in a size that is near their own and a multiple of what becomes one row.

As transformers' Qwen2VLImageProcessorPil and Qwen3VLProcessor do it.
"""

import math
from typing import TYPE_CHECKING

from afserve.config_json import ConfigFields
from afserve.config_ranges import Range
from afserve.errors import RequestError
from afserve.server.text.picture import Picture, PixelRoom, tile_of
from afserve.tiles import WholeEncoderSpec

if TYPE_CHECKING:
    from PIL.Image import Image

_LONGEST = 200  # times as long as the other side
_PIXELS = Range(1, 1 << 32)


class PictureResizer:
    place = mark = "<|image_pad|>"

    def __init__(self, spec: WholeEncoderSpec, config: ConfigFields) -> None:
        config.known_only("resample", 3)  # bicubic
        config.known_only("do_resize", True)
        config.known_only("patch_size", spec.patch)
        config.known_only("merge_size", spec.join)
        config.known_only("temporal_patch_size", spec.frames)
        size = config.inner(config.section("size"), "size")
        self._least = _pixels(config, "min_pixels", _pixels(size, "shortest_edge", 56 * 56))
        self._most = _pixels(config, "max_pixels", _pixels(size, "longest_edge", 28 * 28 * 1280))
        self._spec = spec

    def cut_picture(self, image: "Image", room: PixelRoom) -> Picture:
        from PIL import Image

        wide, tall = image.size
        if max(wide, tall) > _LONGEST * min(wide, tall):
            raise RequestError.about(
                room.name, f"has {wide} x {tall} pixels, one side is more than {_LONGEST} times the other"
            )
        tall, wide = near_size(tall, wide, self._spec.step, self._least, self._most)
        room.claim_bytes(3 * tall * wide)
        tile = tile_of(image.resize((wide, tall), Image.Resampling.BICUBIC))
        return Picture(self.mark * self._spec.row_count(tile), [tile])


def near_size(tall: int, wide: int, step: int, least: int, most: int) -> tuple[int, int]:
    """Multiples of `step` with `least` to `most` pixels, and nearly the ratio of the sides (`smart_resize`)."""
    sides = [round(side / step) * step for side in (tall, wide)]
    if sides[0] * sides[1] > most:
        ratio = math.sqrt(tall * wide / most)
        sides = [max(step, math.floor(side / ratio / step) * step) for side in (tall, wide)]
    elif sides[0] * sides[1] < least:
        ratio = math.sqrt(least / (tall * wide))
        sides = [math.ceil(side * ratio / step) * step for side in (tall, wide)]
    return sides[0], sides[1]


def _pixels(config: ConfigFields, name: str, default: int) -> int:
    value = config.config.get(name)
    if value is None:
        return default
    if not _PIXELS.holds(value):
        raise config.refuse(name, f"is not {_PIXELS}")
    assert isinstance(value, int), value
    return value
