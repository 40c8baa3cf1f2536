"""Llama 4's pictures: fitted into a canvas of whole tiles; one that has several is shown once more, in one tile.

As transformers' Llama4ImageProcessor and Llama4Processor do it, with Pillow's resampling.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from afserve.config_json import ConfigFields
from afserve.server.text.picture import Picture, PixelRoom, tile_of
from afserve.tiles import TiledEncoderSpec

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_TILES = 64


class TileCutter:
    place, mark = "<|image|>", "<|patch|>"

    def __init__(self, spec: TiledEncoderSpec, config: ConfigFields) -> None:
        config.known_only("resample", 2)  # bilinear
        config.known_only("size", {"height": spec.side, "width": spec.side})
        config.known_only("resize_to_max_canvas", False)
        tiles = config.config.get("max_patches", 16)
        if not isinstance(tiles, int) or not 1 <= tiles <= _MOST_TILES:
            raise config.refuse("max_patches", f"is not a number of tiles up to {_MOST_TILES}")
        self._spec, self._canvases = spec, list(canvases(tiles))

    def cut_picture(self, image: "Image", room: PixelRoom) -> Picture:
        from PIL import Image

        spec, side = self._spec, self._spec.side
        tall, wide = best_canvas(image.height, image.width, self._canvases, side)
        several = tall * wide > 1
        room.claim_bytes((tall * wide + several) * spec.tile_bytes)
        height, width = fitted(image.height, image.width, tall * side, wide * side, side)
        canvas = Image.new("RGB", (wide * side, tall * side))
        canvas.paste(image.resize((width, height), Image.Resampling.BILINEAR))
        boxes = (
            (x * side, y * side, (x + 1) * side, (y + 1) * side) for y in range(tall) for x in range(wide)
        )
        squares = [canvas.crop(box) for box in boxes]
        if several:
            squares.append(image.resize((side, side), Image.Resampling.BILINEAR))
        tiles = [tile_of(square) for square in squares]
        return Picture(self._words(tall, wide, self.mark * spec.row_count(tiles[0])), tiles)

    def _words(self, tall: int, wide: int, tile: str) -> str:
        """`Llama4Processor._prompt_split_image`."""
        row = "<|tile_x_separator|>".join([tile] * wide) + "<|tile_y_separator|>"
        parts = row * tall if tall * wide > 1 else ""
        return f"<|image_start|>{parts}{self.place}{tile}<|image_end|>"


def canvases(most: int) -> Iterator[tuple[int, int]]:
    """Rows and columns of up to `most` tiles, those of one ratio together (`find_supported_resolutions`)."""
    ratios: dict[float, list[tuple[int, int]]] = {}
    for tiles in range(most, 0, -1):
        for tall in (n for n in range(1, tiles + 1) if tiles % n == 0):
            ratios.setdefault(tall / (tiles // tall), []).append((tall, tiles // tall))
    for alike in ratios.values():
        yield from alike


def best_canvas(height: int, width: int, shapes: Sequence[tuple[int, int]], side: int) -> tuple[int, int]:
    """Of those that a picture fits into without being made smaller the one that enlarges it least, else the one that it
    is made smaller for least; of equal ones the first of the smallest. In float32 (`get_best_fit`)."""
    scales = [min(_float32(tall * side / height), _float32(wide * side / width)) for tall, wide in shapes]
    scale = min((one for one in scales if one >= 1), default=max(scales))
    alike = [shape for shape, one in zip(shapes, scales, strict=True) if one == scale]
    return min(alike, key=lambda shape: shape[0] * shape[1])


def fitted(height: int, width: int, tall: int, wide: int, side: int) -> tuple[int, int]:
    """What a picture is resized to within a canvas of `tall` x `wide` pixels; it is not enlarged beyond a tile's side.
    What follows from a size of the canvas is a float32 there, else a float64 (`get_max_res_without_distortion`)."""
    most_tall, most_wide = max(height, side), max(width, side)
    round_h, round_w = (_float32 if one else float for one in (tall < most_tall, wide < most_wide))
    limit_h, limit_w = min(tall, most_tall), min(wide, most_wide)
    scale_w, scale_h = round_w(limit_w / width), round_h(limit_h / height)
    both = float if round_h is round_w is float else _float32
    if both(scale_w) < both(scale_h):
        return max(1, min(int(round_w(height * scale_w)), limit_h)), limit_w
    return limit_h, max(1, min(int(round_h(width * scale_h)), limit_w))


def _float32(value: float) -> float:
    """Rounded once more: of a quotient or product of two float32 that is theirs."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
