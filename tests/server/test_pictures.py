"""Pictures of a chat as tiles and tokens: those of transformers' Llama 4 processors, and what is refused."""

import json
import shutil
from array import array

import pytest
import torch

from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import CheckpointError, RequestError
from afserve.server.bodies.fields import Fields
from afserve.server.bodies.prepared import from_bytes, to_bytes
from afserve.server.text.kinds import BodyKind
from afserve.server.text.pictures import MOST_PICTURES, PictureReader
from afserve.server.text.prepare import Preparer
from afserve.server.text.prompt_tokens import TextModel
from afserve.tokens.chat_template import ChatTemplate
from afserve.tokens.tokenizer import Tokenizer
from tests.families.pictures import ROWS, SIDE, build_talking, data_url
from tests.families.whole_pictures import READS

SIZES = [(1, 1), (24, 24), (37, 61), (300, 20), (25, 24), (500, 333), (96, 97), (7, 90)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(build_talking(tmp_path_factory.mktemp("talking")))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return str(build_talking(tmp_path_factory.mktemp("whole"), "qwen3_5"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_folder(folder)


@pytest.fixture
def reader(folder, tokenizer):
    return PictureReader.from_folder(folder, tokenizer)


def preparer_of(folder):
    tokenizer = Tokenizer.from_folder(folder)
    template, reader = ChatTemplate.from_folder(folder), PictureReader.from_folder(folder, tokenizer)
    return Preparer(
        TextModel(folder, "sees", 1024, 2054, 4), tokenizer, SamplingParams(), template, pictures=reader
    )


@pytest.fixture
def preparer(folder):
    return preparer_of(folder)


def part(url):
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*content, **more):
    said = [{"type": "text", "text": one} if isinstance(one, str) else one for one in content]
    return Fields({"messages": [{"role": "user", "content": said}], "max_tokens": 3, **more})


def test_the_prompt_is_that_of_transformers(preparer, tokenizer):
    processing = pytest.importorskip("transformers.models.llama4.processing_llama4")
    urls = [data_url(37, 61), data_url(10, 9, seed=1, kind="WEBP")]
    asked = chat("What", part(urls[0]), " and ", part(urls[1]), "?")
    prepared = from_bytes(to_bytes(preparer.prepare(BodyKind.CHAT, asked)))
    split = processing.Llama4Processor._prompt_split_image
    first, second = (split(None, ratio, ROWS) for ratio in ((3, 2), (1, 1)))
    text = f"<|begin|><|user|>What{first} and {second}?<|end|><|assistant|>"
    (ids,) = prepared.prompts
    assert ids == array("i", tokenizer.encode(text, add_special_tokens=False))
    assert len(prepared.tiles) == 8 and prepared.written is None
    patch = tokenizer.token_id("<|patch|>")
    for tile in prepared.tiles:
        assert set(ids[tile.start : tile.start + ROWS]) == {patch} and len(tile.pixels) == 3 * SIDE**2
    assert len({tile.name for tile in prepared.tiles}) == 8
    counted = json.loads(preparer.prepare(BodyKind.TOKENIZE, asked).body)
    assert counted["tokens"] == ids.tolist()


def test_tiles_are_those_of_transformers(reader):
    """Pillow and torch round the resampled bytes to neighbours now and then; then bfloat16 rounds those."""
    pytest.importorskip("torchvision")
    from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor

    processor = Llama4ImageProcessor(size={"height": SIDE, "width": SIDE})
    for seed, (width, height) in enumerate(SIZES):
        url = data_url(width, height, seed)
        (picture,) = reader.read_pictures([Fields(part(url))])
        wanted = processor(decoded(url), return_tensors="pt")
        tall, wide = wanted["aspect_ratios"][0].tolist()
        assert picture.words.count("<|tile_y_separator|>") == tall * (tall * wide > 1)
        assert len(picture.tiles) == tall * wide + (tall * wide > 1)
        pixels = bytearray(b"".join(tile.pixels for tile in picture.tiles))
        got = torch.frombuffer(pixels, dtype=torch.uint8).view(-1, 3, SIDE, SIDE)
        values = (got.to(torch.bfloat16) * (1 / 255)).sub(0.5).div(0.5)
        torch.testing.assert_close(values, wanted["pixel_values"].view_as(values), atol=0.02, rtol=0)


def test_whole_pictures_are_those_of_transformers(whole):
    """Several of all shapes in one chat: their pixels, and as many tokens between the template's marks."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor, tokenizer = Qwen2VLImageProcessorPil(**READS), Tokenizer.from_folder(whole)
    urls = [data_url(*size, seed) for seed, size in enumerate([*SIZES, (9, 1500), (40, 24)])]
    prepared = preparer_of(whole).prepare(BodyKind.CHAT, chat("What", *map(part, urls), "?"))
    prepared = from_bytes(to_bytes(prepared))
    words = "<|begin|><|user|>What"
    for tile, url in zip(prepared.tiles, urls, strict=True):
        wanted = processor(decoded(url), return_tensors="pt")
        _, tall, wide = wanted["image_grid_thw"][0].tolist()
        planes = torch.frombuffer(bytearray(tile.pixels), dtype=torch.uint8).view(3, 4 * tall, 4 * wide)
        again = processor(planes.numpy(), do_resize=False, return_tensors="pt")
        assert torch.equal(again["pixel_values"], wanted["pixel_values"]) and tile.wide == 4 * wide
        words += f"<|vision_start|>{'<|image_pad|>' * (tall * wide // 4)}<|vision_end|>"
    (ids,) = prepared.prompts
    assert ids == array("i", tokenizer.encode(f"{words}?<|end|><|assistant|>", add_special_tokens=False))
    starts = [place + 1 for place, token in enumerate(ids) if token == tokenizer.token_id("<|vision_start|>")]
    assert [tile.start for tile in prepared.tiles] == starts


def test_whole_pictures_that_are_refused(whole, tmp_path):
    with pytest.raises(RequestError, match="image_url: has 201 x 1 pixels, one side is more than 200 times"):
        preparer_of(whole).prepare(BodyKind.CHAT, chat(part(data_url(201, 1))))
    with pytest.raises(RequestError, match="have 1 pictures and 2 places for one"):
        preparer_of(whole).prepare(BodyKind.CHAT, chat("<|image_pad|>", part(data_url(9, 9))))
    shutil.copy(f"{whole}/config.json", tmp_path)
    for field in ({"merge_size": 3}, {"size": {"shortest_edge": 0}}, {"resample": 2}):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**READS, **field}))
        with pytest.raises(CheckpointError, match=f"preprocessor_config.json: .*{next(iter(field))}"):
            PictureReader.from_folder(str(tmp_path), Tokenizer.from_folder(whole))


def decoded(url):
    import base64
    import io

    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([part("https://example.org/a.png")], "content\\[0\\].image_url: is no data URL"),
        ([part("data:image/gif;base64,R0lGODlhAQABAAAAACw=")], "is no data URL of a PNG, JPEG or WebP"),
        ([part("data:image/png;base64,####")], "is not valid base64"),
        ([part("data:image/png;base64,aGVsbG8=")], "is no picture in PNG, JPEG or WebP"),
        ([part(data_url(90, 80)[:-400])], "image_url: (cannot be decoded|is not valid base64)"),
        ([{"type": "image_url"}], "image_url: is null, it must be an object with a url"),
        ([part(data_url(9, 9))] * (MOST_PICTURES + 1), "messages: 17 pictures, at most 16"),
        (["<|image|>", part(data_url(9, 9))], "have 1 pictures and 2 places for one"),
        (["<|patch|>", part(data_url(9, 9))], "have <.patch.> among their words"),
    ],
)
def test_what_is_refused(content, words, preparer):
    with pytest.raises(RequestError, match=words):
        preparer.prepare(BodyKind.CHAT, chat(*content))


def test_large_pictures_are_refused_before_they_are_decoded(preparer, monkeypatch):
    monkeypatch.setattr("afserve.server.text.pictures.MOST_PIXELS", 2000)
    with pytest.raises(RequestError, match="has 50 x 41 pixels, at most 2000"):
        preparer.prepare(BodyKind.CHAT, chat(part(data_url(50, 41)[:-40] + "=")))
    monkeypatch.setattr("afserve.server.text.picture.MOST_TILE_BYTES", 3000)
    with pytest.raises(
        RequestError, match=r"content.1..image_url: with those before it more than 3000 bytes"
    ):
        preparer.prepare(BodyKind.CHAT, chat(part(data_url(9, 9)), part(data_url(8, 8))))


def test_what_is_not_kept_is_not_asked_for(preparer):
    with pytest.raises(RequestError, match="resume: is not served with pictures"):
        preparer.prepare(BodyKind.CHAT, chat(part(data_url(9, 9)), resume=60))


def test_models_that_read_text_only_say_why(folder, tokenizer, tmp_path):
    asked = [Fields(part(data_url(9, 9)), "messages[0].content[0]")]
    blind = PictureReader.from_folder(str(tmp_path), tokenizer)
    with pytest.raises(RequestError, match=r"0..type: 'image_url' is not served, this model reads text only"):
        blind.read_pictures(asked)
    nano = Tokenizer.from_folder("afserve/configs/nano")
    with pytest.raises(RequestError, match=r"this model's tokenizer has not <.patch.> as 2051"):
        PictureReader.from_folder(folder, nano).read_pictures(asked)


def test_other_apis_have_them_too(preparer):
    """What Responses and Messages call a picture; names in refusals are theirs."""
    url = data_url(9, 9)
    head, _, data = url.partition(";base64,")
    plain = preparer.prepare(BodyKind.CHAT, chat("a", part(url), "b"))
    text = {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}
    said = [text[0], {"type": "input_image", "image_url": url}, text[1]]
    asked = {"input": [{"role": "user", "content": said}], "max_output_tokens": 3}
    assert preparer.prepare(BodyKind.RESPONSE, Fields(asked)).tiles == plain.tiles
    source = {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}
    text = {"type": "text", "text": "a"}, {"type": "text", "text": "b"}
    blocks = [text[0], {"type": "image", "source": source}, text[1]]
    message = {"messages": [{"role": "user", "content": blocks}], "max_tokens": 3, "system": "s"}
    seen = preparer.prepare(BodyKind.MESSAGE, Fields(message))
    assert [tile.pixels for tile in seen.tiles] == [tile.pixels for tile in plain.tiles]
    blocks[1] = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    with pytest.raises(RequestError, match=r"messages.0..content.1..image_url: is no data URL"):
        preparer.prepare(BodyKind.MESSAGE, Fields(message))
    with pytest.raises(RequestError, match=r"messages.0..content.1..type: pictures are read in a user's"):
        answered = {**message["messages"][0], "role": "assistant"}
        preparer.prepare(BodyKind.MESSAGE, Fields({**message, "messages": [answered]}))


@pytest.mark.parametrize("field", [{"image_mean": [0.4, 0.5, 0.5]}, {"max_patches": 0}, {"resample": 3}])
def test_preprocessing_that_is_not_done_is_refused(field, folder, tokenizer, tmp_path):
    shutil.copy(f"{folder}/config.json", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(field))
    with pytest.raises(CheckpointError, match=f"preprocessor_config.json: {next(iter(field))}"):
        PictureReader.from_folder(str(tmp_path), tokenizer)
