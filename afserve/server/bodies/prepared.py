"""What a body came to, as a value and as bytes: the answer of a text process, without any pickle.

A frame is one byte that says what it is, four with the length of its JSON, the JSON, then the tokens of all prompts
as 32-bit integers in this machine's order, or a body that is sent as it is.
"""

import json
import struct
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import AfserveError, CheckpointError, ConfigError, NotFoundError, RequestError
from afserve.server.bodies.declared import Scheduling
from afserve.server.bodies.openai import ResumeOptions, StreamOptions
from afserve.server.reading.reasoning import Tags
from afserve.server.reading.table import Reading
from afserve.tiles import PictureTile, pack_tiles, unpack_tiles

_HEAD = struct.Struct("=BI")
_PREPARED, _BODY, _REFUSED = range(3)


class ContextLengthError(RequestError):
    """A prompt of so many `tokens`, or it and the tokens `wanted`, is longer than the model's context.

    The tokens of a text that is many times as long are an estimate.
    """

    def __init__(
        self, message: str, *, param: str | None = None, tokens: int = 0, wanted: int | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.tokens, self.wanted = tokens, wanted


REFUSALS = {
    c.__name__: c for c in (RequestError, ContextLengthError, NotFoundError, CheckpointError, ConfigError)
}


@dataclass(frozen=True, slots=True)
class EchoText:
    """The prompts to repeat before each choice's text; `generate` False drops what follows them.

    `added[p]` is how many tokens the tokenizer put before the words of prompt p; its text does not show them.
    """

    texts: tuple[str, ...]
    added: tuple[int, ...]
    generate: bool


@dataclass(frozen=True, slots=True)
class Prepared:
    """One request for text to `model`: every prompt `params.n` times.

    `stream` None asks for one whole answer, `reading` None for plain text. `facts` are what an answer repeats of the
    request, `kept` is JSON that is stored with it, `ignored` are the wishes that were passed over. `format_field` asked
    for `params.grammar`, `expected` are the tokens of an answer that is expected. `written`: as the tokenizer writes
    what a chat template rendered, where it did. `body`, of that `kind`, is what it came of, where a next turn is to be
    computed ahead. `tiles` are of pictures in the one prompt of a chat.
    """

    prompts: tuple["array[int]", ...]
    params: SamplingParams
    logprobs: int | None
    stream: StreamOptions | None
    skip_special_tokens: bool
    echo: EchoText | None
    scheduling: Scheduling
    reading: Reading | None
    facts: Mapping[str, object] = field(default_factory=dict)
    kept: bytes = b""
    resume: ResumeOptions | None = None
    model: str = ""
    ignored: tuple[str, ...] = ()
    format_field: str = ""
    expected: "array[int]" = field(default_factory=lambda: array("i"))
    written: "array[int] | None" = None
    body: bytes = b""
    kind: int = 0
    tiles: tuple[PictureTile, ...] = ()


@dataclass(frozen=True, slots=True)
class Computed:
    """An answer that is there already, as it is sent."""

    body: bytes
    ignored: tuple[str, ...] = ()


Answer = Prepared | Computed


def to_bytes(answer: Answer | AfserveError) -> bytes:
    if isinstance(answer, Computed):
        return _framed(_BODY, {"ignored": answer.ignored}) + answer.body
    if isinstance(answer, AfserveError):
        refused = {"error": type(answer).__name__, "message": answer.message, "param": answer.param}
        return _framed(_REFUSED, refused)
    words = asdict(replace(answer, body=b"", tiles=()))
    del words["body"]
    tiles = pack_tiles(answer.tiles)
    words["tiles"] = len(tiles)
    listed = (*answer.prompts, answer.expected)
    words["prompts"] = [len(ids) for ids in listed]
    del words["expected"]
    words["written"] = answer.written is not None
    words["kept"] = len(answer.kept)
    return _framed(_PREPARED, words) + b"".join(ids.tobytes() for ids in listed) + tiles + answer.kept


def from_bytes(data: bytes) -> Answer:
    """Raises the refusal that it holds."""
    kind, size = _HEAD.unpack_from(data)
    at = _HEAD.size + size
    words = json.loads(data[_HEAD.size : at])
    if kind == _BODY:
        return Computed(data[at:], tuple(words["ignored"]))
    if kind == _REFUSED:
        raise REFUSALS.get(words["error"], RequestError)(words["message"], param=words["param"])
    echo, stream, params = words["echo"], words["stream"], words["params"]
    reading = words["reading"]
    params["stop_token_ids"] = tuple(params["stop_token_ids"])
    params["logit_bias"] = tuple((token_id, bias) for token_id, bias in params["logit_bias"])
    kept_at = len(data) - words["kept"]
    *prompts, expected = _split(memoryview(data)[at:], words["prompts"])
    return Prepared(
        tuple(prompts),
        SamplingParams(**params),
        words["logprobs"],
        stream and StreamOptions(**stream),
        words["skip_special_tokens"],
        echo and EchoText(tuple(echo["texts"]), tuple(echo["added"]), echo["generate"]),
        Scheduling(**words["scheduling"]),
        reading and _reading(reading),
        words["facts"],
        data[kept_at:],
        words["resume"] and ResumeOptions(**words["resume"]),
        words["model"],
        tuple(words["ignored"]),
        words["format_field"],
        expected,
        prompts[0] if words["written"] else None,
        tiles=unpack_tiles(data[kept_at - words["tiles"] : kept_at]),
    )


def _reading(words: Mapping[str, Any]) -> Reading:
    marks = {name: words[name] and Tags(**words[name]) for name in ("tags", "wrapped")}
    return Reading(**{**words, **marks})


def _framed(kind: int, words: Mapping[str, object]) -> bytes:
    text = json.dumps(words).encode()
    return _HEAD.pack(kind, len(text)) + text


def _split(data: memoryview, lengths: list[int]) -> tuple["array[int]", ...]:
    prompts, at = [], 0
    for length in lengths:
        ids = array("i")
        end = at + length * ids.itemsize
        ids.frombytes(data[at:end])
        prompts.append(ids)
        at = end
    return tuple(prompts)
