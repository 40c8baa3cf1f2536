"""SentencePiece's `tokenizer.model` as the metadata that a GGUF file has of the same tokenizer.

The file is a protobuf (sentencepiece_model.proto): pieces with scores and types, the trainer's settings, and what is
done to texts first. It is read without that library, and nothing of it is trusted: every length is within the file.
"""

import struct
from array import array
from collections.abc import Iterator, Mapping
from typing import NoReturn

from afserve.errors import CheckpointError
from afserve.gguf.header import MOST_ITEMS, Value
from afserve.gguf.metadata import Metadata

MOST_BYTES = 64 << 20  # 256 thousand pieces have 4 MB
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # fields of ModelProto
_TEXT, _SCORE, _TYPE = 1, 2, 3  # of SentencePiece
_MODEL_TYPE, _BPE = 3, 2  # of TrainerSpec
_IDS = {
    "unknown": (40, 0),
    "bos": (41, 1),
    "eos": (42, 2),
    "padding": (43, -1),
}  # fields of TrainerSpec, defaults
_CHARS_MAP, _DUMMY_PREFIX, _REMOVE_SPACES = 2, 3, 4  # of NormalizerSpec
_VARINT, _FIXED_8, _BYTES, _FIXED_4 = 0, 1, 2, 5
_MOST_VARINT = 10  # bytes
Fields = Iterator[tuple[int, int | bytes]]


def read_pieces(raw: bytes, where: str, asked: Mapping[str, object]) -> Metadata:
    """`asked` are tokenizer_config.json's fields: whether texts begin with the bos token and end with the eos token.
    Raises CheckpointError that begins with `where`."""
    tokens: list[str] = []
    scores, types = array("f"), array("i")
    settings: dict[int, dict[int, int | bytes]] = {_TRAINER: {}, _NORMALIZER: {}}
    for number, value in _fields(raw, where):
        if number == _PIECES and isinstance(value, bytes):
            if len(tokens) == MOST_ITEMS:
                _broken(where, f"it has more than {MOST_ITEMS:,} pieces")
            piece = dict(_fields(value, where))
            tokens.append(_text(piece.get(_TEXT, b""), where))
            scores.append(_score(piece.get(_SCORE, 0)))
            types.append(_number(piece.get(_TYPE, 1), where))
        elif number in settings and isinstance(value, bytes):
            settings[number] |= dict(_fields(value, where))
    trainer, normalizer = settings[_TRAINER], settings[_NORMALIZER]
    if not tokens:
        _broken(where, "it has no pieces")
    _check_known(trainer, normalizer, where)
    made: dict[str, Value] = {
        "general.architecture": "sentencepiece",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(_DUMMY_PREFIX, 1)),
    }
    for name, (field, default) in _IDS.items():
        if (at := _number(trainer.get(field, default), where)) >= 0:
            made[f"tokenizer.ggml.{name}_token_id"] = at
    for name in ("bos", "eos"):
        added = asked.get(f"add_{name}_token")
        made[f"tokenizer.ggml.add_{name}_token"] = added if isinstance(added, bool) else name == "bos"
    return Metadata(made, where)


def _check_known(
    trainer: Mapping[int, int | bytes], normalizer: Mapping[int, int | bytes], where: str
) -> None:
    """What `tokenizers` does with the same result."""
    if trainer.get(_MODEL_TYPE, 1) != _BPE:
        _refuse(where, "its model is no BPE")
    if normalizer.get(_CHARS_MAP, b""):
        _refuse(where, "it changes characters first (a map of its own)")
    if normalizer.get(_REMOVE_SPACES, 1):
        _refuse(where, "it removes spaces that follow each other")


def _refuse(where: str, why: str) -> NoReturn:
    raise CheckpointError(
        f"{where}: {why}, which is not read from this file; save tokenizer.json beside it with "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    )


def _broken(where: str, why: str) -> NoReturn:
    raise CheckpointError(f"{where}: not a whole SentencePiece model: {why}; download it again")


def _fields(raw: bytes, where: str) -> Fields:
    """Of a message: each field's number and value, a whole number or bytes."""
    at = 0
    while at < len(raw):
        key, at = _varint(raw, at, where)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(raw, at, where)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(raw, at, where)
        elif kind in (_FIXED_4, _FIXED_8):
            size = 4 if kind == _FIXED_4 else 8
        else:
            _broken(where, f"a field of a type {kind} that is not known")
        if size > len(raw) - at:
            _broken(where, f"a field would have {size:,} bytes, {len(raw) - at:,} are left")
        yield number, raw[at : at + size]
        at += size


def _varint(raw: bytes, at: int, where: str) -> tuple[int, int]:
    """The number there, and where the next byte is."""
    made = 0
    for place in range(_MOST_VARINT):
        if at + place >= len(raw):
            _broken(where, "it ends within a number")
        byte = raw[at + place]
        made |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return made, at + place + 1
    _broken(where, f"a number has more than {_MOST_VARINT} bytes")


def _text(value: int | bytes, where: str) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else _broken(where, "a piece is no text")
    except UnicodeDecodeError:
        _broken(where, "a piece is not UTF-8")


def _score(value: int | bytes) -> float:
    return float(struct.unpack("<f", value)[0]) if isinstance(value, bytes) and len(value) == 4 else 0.0


def _number(value: int | bytes, where: str) -> int:
    """Of 32 bits with a sign."""
    if isinstance(value, bytes):
        _broken(where, "a number is stored as bytes")
    low = value & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low
