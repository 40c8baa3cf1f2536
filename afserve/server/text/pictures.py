"""Pictures of a chat: from data URLs to tiles of pixels, and to the tokens that stand for them in the prompt (Llama 4).

As transformers' Llama4ImageProcessor and Llama4Processor do it, with Pillow's resampling: a picture is fitted into a
canvas of whole tiles, and one that has several is shown once more, in one tile. All sizes are looked at before anything
is decoded. It runs in a text process, within its limits.
"""

import base64
import binascii
import io
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from afserve.config_json import ConfigFields
from afserve.errors import RequestError
from afserve.server.bodies.fields import Fields
from afserve.tiles import MOST_TILE_BYTES, EncoderSpec, PictureTile
from afserve.tokens.tokenizer import Tokenizer, read_json

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PICTURES = 16  # of a request
MOST_PIXELS = 24 << 20  # of a picture
FORMATS = ("PNG", "JPEG", "WEBP")
_DATA = re.compile(r"data:image/(?:png|jpe?g|webp);base64,")
_PATCH, _PICTURE = "<|patch|>", "<|image|>"
_MOST_TILES = 64


@dataclass(frozen=True, slots=True)
class Picture:
    """In `tall` x `wide` tiles, row by row; where there are several, one of the whole picture is the last."""

    tall: int
    wide: int
    tiles: Sequence[bytes]


class PictureReader:
    """Of one model. `refusal` says why it reads text only; empty where it sees."""

    def __init__(self, spec: EncoderSpec | None, config: ConfigFields, tokenizer: Tokenizer) -> None:
        """`config`: the fields of preprocessor_config.json. Raises CheckpointError for those that are not done here."""
        self.refusal = _refusal(spec, tokenizer)
        self._spec = spec
        if spec is None:
            return
        config.known_only("resample", 2)  # bilinear
        for name in ("image_mean", "image_std"):
            config.known_only(name, [0.5, 0.5, 0.5])
        config.known_only("size", {"height": spec.side, "width": spec.side})
        config.known_only("resize_to_max_canvas", False)
        tiles = config.config.get("max_patches", 16)
        if not isinstance(tiles, int) or not 1 <= tiles <= _MOST_TILES:
            raise config.refuse("max_patches", f"is not a number of tiles up to {_MOST_TILES}")
        self._canvases = list(canvases(tiles))

    @classmethod
    def from_folder(cls, folder: str, tokenizer: Tokenizer) -> "PictureReader":
        spec = None
        if "vision_config" in read_json(folder, "config.json"):
            from afserve.families.table import load_spec  # which no other text process needs

            spec = load_spec(folder).encoder
        name = "preprocessor_config.json"
        return cls(spec, ConfigFields(read_json(folder, name), f"{folder}/{name}"), tokenizer)

    def read_pictures(self, parts: Sequence[Fields]) -> tuple[Picture, ...]:
        """Of parts of content with an `image_url`, in order. Raises RequestError for the first that is refused."""
        if len(parts) > MOST_PICTURES:
            raise RequestError.about("messages", f"{len(parts)} pictures, at most {MOST_PICTURES} are read")
        room, found = MOST_TILE_BYTES, list[Picture]()
        for part in parts:
            if self.refusal:
                raise part.refusal("type", f"{part.get('type')!r} is not served, {self.refusal}")
            found.append(self._read(part, room))
            room -= sum(map(len, found[-1].tiles))
        return tuple(found)

    def _read(self, part: Fields, room: int) -> Picture:
        from PIL import Image, ImageOps, UnidentifiedImageError

        name = part.path_of("image_url")
        try:
            with Image.open(io.BytesIO(_bytes(part)), formats=FORMATS) as image:
                wide, tall = image.size
                if wide * tall > MOST_PIXELS:
                    raise RequestError.about(
                        name,
                        f"has {wide} x {tall} pixels, at most {MOST_PIXELS} are read; send a smaller one",
                    )
                upright = ImageOps.exif_transpose(image).convert("RGB")
        except UnidentifiedImageError as error:
            raise RequestError.about(name, "is no picture in PNG, JPEG or WebP") from error
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise RequestError.about(name, f"cannot be decoded: {error}") from error
        return self._tiled(upright, room, name)

    def _tiled(self, image: "Image", room: int, name: str) -> Picture:
        from PIL import Image

        assert self._spec is not None, "refused"
        side = self._spec.side
        tall, wide = best_canvas(image.height, image.width, self._canvases, side)
        several = tall * wide > 1
        if (tall * wide + several) * self._spec.tile_bytes > room:
            raise RequestError.about(
                name,
                f"with those before it more than {MOST_TILE_BYTES} bytes of tiles; send fewer, or smaller ones",
            )
        height, width = fitted(image.height, image.width, tall * side, wide * side, side)
        canvas = Image.new("RGB", (wide * side, tall * side))
        canvas.paste(image.resize((width, height), Image.Resampling.BILINEAR))
        boxes = (
            (x * side, y * side, (x + 1) * side, (y + 1) * side) for y in range(tall) for x in range(wide)
        )
        squares = [canvas.crop(box) for box in boxes]
        if several:
            squares.append(image.resize((side, side), Image.Resampling.BILINEAR))
        return Picture(tall, wide, [b"".join(plane.tobytes() for plane in one.split()) for one in squares])

    def expand(self, prompt: str, pictures: Sequence[Picture]) -> str:
        """The prompt with the tokens of its pictures, one for each that the template has put there. Raises RequestError
        where these are not as many."""
        if not pictures:
            return prompt
        words = prompt.split(_PICTURE)
        if len(words) != len(pictures) + 1:
            raise RequestError.about(
                "messages",
                f"have {len(pictures)} pictures and {len(words) - 1} places for one; leave {_PICTURE} out",
            )
        assert self._spec is not None, "refused"
        tile = _PATCH * self._spec.rows
        return words[0] + "".join(
            _tokens(one, tile) + text for one, text in zip(pictures, words[1:], strict=True)
        )

    def locate(self, ids: Sequence[int], pictures: Sequence[Picture]) -> tuple[PictureTile, ...]:
        """The tiles where their tokens are. Raises RequestError where the words have such tokens too."""
        if not pictures:
            return ()
        assert self._spec is not None, "refused"
        at = [place for place, token in enumerate(ids) if token == self._spec.token]
        starts, rows = at[:: self._spec.rows], self._spec.rows
        pixels = [tile for picture in pictures for tile in picture.tiles]
        if at != [start + row for start in starts for row in range(rows)] or len(starts) != len(pixels):
            raise RequestError.about("messages", f"have {_PATCH} among their words; leave it out")
        return tuple(PictureTile(start, one) for start, one in zip(starts, pixels, strict=True))


def _refusal(spec: EncoderSpec | None, tokenizer: Tokenizer) -> str:
    if spec is None:
        return "this model reads text only"
    if tokenizer.token_id(_PATCH) != spec.token:
        return f"this model's tokenizer has not {_PATCH} as {spec.token}"
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        return "this server has no Pillow: pip install 'afserve[images]'"
    return ""


def _bytes(part: Fields) -> bytes:
    """Of a data URL."""
    name, holder = part.path_of("image_url"), part.section("image_url")
    url = None if holder is None else holder.text("url")
    if url is None:
        part.refuse_field("image_url", "an object with a url")
    found = _DATA.match(url)
    if found is None:
        raise RequestError.about(
            name,
            "is no data URL of a PNG, JPEG or WebP in base64; nothing is fetched from elsewhere, send its bytes",
        )
    try:
        return base64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError.about(name, f"is not valid base64: {error}") from error


def _tokens(picture: Picture, tile: str) -> str:
    """`Llama4Processor._prompt_split_image`."""
    row = "<|tile_x_separator|>".join([tile] * picture.wide) + "<|tile_y_separator|>"
    parts = row * picture.tall if picture.tall * picture.wide > 1 else ""
    return f"<|image_start|>{parts}{_PICTURE}{tile}<|image_end|>"


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
