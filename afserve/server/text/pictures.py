"""Pictures of a chat: from data URLs to tiles of pixels, and to the tokens that stand for them in the prompt.

What becomes of a picture is its family's business (`tiling.py`, `resizing.py`). All sizes are looked at before anything
is decoded. It runs in a text process, within its limits.
"""

import base64
import binascii
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from afserve.config_json import ConfigFields
from afserve.errors import RequestError
from afserve.server.bodies.fields import Fields
from afserve.server.text.picture import Cutter, Picture, PixelRoom
from afserve.server.text.resizing import PictureResizer
from afserve.server.text.tiling import TileCutter
from afserve.tiles import EncoderSpec, PictureTile, TiledEncoderSpec, WholeEncoderSpec
from afserve.tokens.tokenizer import Tokenizer, read_json

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PICTURES = 16  # of a request
MOST_PIXELS = 24 << 20  # of a picture
FORMATS = ("PNG", "JPEG", "WEBP")
_DATA = re.compile(r"data:image/(?:png|jpe?g|webp);base64,")


class PictureReader:
    """Of one model. `refusal` says why it reads text only; empty where it sees."""

    def __init__(self, spec: EncoderSpec | None, config: ConfigFields, tokenizer: Tokenizer) -> None:
        """`config`: the fields of preprocessor_config.json. Raises CheckpointError for those that are not done here."""
        self._spec, self._cutter = spec, _cutter_of(spec, config)
        self.refusal = _refusal(self._spec, self._cutter, tokenizer)

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
        room, found = PixelRoom(), list[Picture]()
        for part in parts:
            if self._cutter is None or self.refusal:
                raise part.refusal("type", f"{part.get('type')!r} is not served, {self.refusal}")
            room.name = part.path_of("image_url")
            found.append(self._cutter.cut_picture(_decoded(part), room))
        return tuple(found)

    def expand(self, prompt: str, pictures: Sequence[Picture]) -> str:
        """The prompt with the tokens of its pictures, one for each that the template has put there. Raises RequestError
        where these are not as many."""
        if not pictures:
            return prompt
        assert self._cutter is not None, "refused"
        place = self._cutter.place
        words = prompt.split(place)
        if len(words) != len(pictures) + 1:
            raise RequestError.about(
                "messages",
                f"have {len(pictures)} pictures and {len(words) - 1} places for one; leave {place} out",
            )
        pairs = zip(pictures, words[1:], strict=True)
        return words[0] + "".join(one.words + text for one, text in pairs)

    def locate(self, ids: Sequence[int], pictures: Sequence[Picture]) -> tuple[PictureTile, ...]:
        """The tiles where their tokens are. Raises RequestError where the words have such tokens too."""
        if not pictures:
            return ()
        assert self._spec is not None and self._cutter is not None, "refused"
        at = [place for place, token in enumerate(ids) if token == self._spec.token]
        tiles = [tile for picture in pictures for tile in picture.tiles]
        counts = [self._spec.row_count(tile) for tile in tiles]
        *firsts, end = accumulate(counts, initial=0)
        starts = [at[first] for first in firsts] if end == len(at) else []
        if not starts or at != [
            start + row for start, n in zip(starts, counts, strict=True) for row in range(n)
        ]:
            raise RequestError.about("messages", f"have {self._cutter.mark} among their words; leave it out")
        return tuple(replace(tile, start=start) for tile, start in zip(tiles, starts, strict=True))


def _cutter_of(spec: EncoderSpec | None, config: ConfigFields) -> Cutter | None:
    if spec is None:
        return None
    for name in ("image_mean", "image_std"):
        config.known_only(name, [0.5, 0.5, 0.5])
    if isinstance(spec, TiledEncoderSpec):
        return TileCutter(spec, config)
    assert isinstance(spec, WholeEncoderSpec), spec
    return PictureResizer(spec, config)


def _refusal(spec: EncoderSpec | None, cutter: Cutter | None, tokenizer: Tokenizer) -> str:
    if spec is None or cutter is None:
        return "this model reads text only"
    if tokenizer.token_id(cutter.mark) != spec.token:
        return f"this model's tokenizer has not {cutter.mark} as {spec.token}"
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        return "this server has no Pillow: pip install 'afserve[images]'"
    return ""


def _decoded(part: Fields) -> "Image":
    """Upright."""
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
            return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError as error:
        raise RequestError.about(name, "is no picture in PNG, JPEG or WebP") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RequestError.about(name, f"cannot be decoded: {error}") from error


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
