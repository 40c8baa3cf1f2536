"""Text to token ids and back for one checkpoint folder, and which ids end a text. No torch, no transformers.

Wraps `tokenizer.json` through the `tokenizers` library. Incremental decoding is in `detokenizer`, chat
templates in `chat_template`; this file knows neither requests nor stop strings.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as Vocabulary
from tokenizers import decoders

from afserve.config_json import ConfigFields
from afserve.config_ranges import MOST_VOCABULARY, VOCABULARY
from afserve.errors import CheckpointError, RequestError, shown
from afserve.json_file import LIST_BYTES, read_object, read_text
from afserve.tokens import split_patterns

PIECE_CHARACTERS = 16_384
CUT_TOKENS = 64
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """One checkpoint's tokenizer. Threads may share it: only a cache changes after construction."""

    def __init__(self, vocabulary: Vocabulary, special: dict[str, str] | None = None) -> None:
        self._vocabulary = vocabulary
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self._before: tuple[tuple[int, ...], str] | None = None
        self.special = special or {}
        self.byte_level = isinstance(vocabulary.decoder, decoders.ByteLevel)
        added = vocabulary.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = int(vocabulary.get_vocab_size(with_added_tokens=True))

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Raises CheckpointError where tokenizer.json is missing, or is none that encodes and decodes a text."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{path.name}: not found in the checkpoint folder; a model is served with its fast tokenizer "
                "file, save it with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        vocabulary = _vocabulary(path)
        vocabulary.no_truncation()
        vocabulary.no_padding()
        return cls(vocabulary, special_tokens(folder))

    @cached_property
    def is_quick(self) -> bool:
        """Whether the time that a text takes surely grows no faster than the square of its length."""
        return all(map(split_patterns.is_quick, _expressions(self._vocabulary)))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises RequestError for a text that cannot be encoded."""
        try:
            with _told("encode"):
                ids: list[int] = self._vocabulary.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                "the text holds a lone surrogate, which is not valid Unicode", param="prompt"
            ) from error
        return ids

    def surely_longer(self, text: str, limit: int) -> bool:
        """Whether a text has clearly more than `limit` tokens, without holding its encoding in memory.

        Counts pieces and allows for the tokens that cutting adds; False leaves the question to `encode`, whose
        encoding takes about 400 bytes of memory per token.
        """
        count, bound = 0, limit + limit // 8
        for start in range(0, len(text), PIECE_CHARACTERS):
            count += len(self.encode(text[start : start + PIECE_CHARACTERS], add_special_tokens=False))
            bound += CUT_TOKENS
            if count > bound:
                return True
        return False

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        with _told("decode"):
            text: str = self._vocabulary.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    @property
    def ids(self) -> dict[str, int]:
        """Of all tokens, by their spelling; made anew each time."""
        found: dict[str, int] = self._vocabulary.get_vocab(with_added_tokens=True)
        return found

    def token(self, token_id: int) -> str:
        """The vocabulary's own spelling of one id; empty for an id without an entry (padding rows of a head)."""
        token: str | None = self._vocabulary.id_to_token(token_id)
        return token or ""

    def token_id(self, token: str) -> int | None:
        found: int | None = self._vocabulary.token_to_id(token)
        return found

    def is_special(self, token: str) -> bool:
        return self.token_id(token) in self.special_ids

    def first_bytes(self, token_id: int) -> bytes:
        """What one token is as the first of a text: there many vocabularies leave the space of a word out."""
        if self.byte_level or token_id in self.special_ids or _is_byte(self.token(token_id)):
            return self.token_bytes(token_id)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text behind others, special tokens spelled out."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def token_text(self, token_id: int) -> str | None:
        """The same as text; None where these bytes are no whole characters."""
        try:
            return self._texts[token_id]
        except KeyError:
            pass
        text: str | None = None
        with suppress(UnicodeDecodeError):
            text = self.token_bytes(token_id).decode()
        self._texts[token_id] = text
        return text

    def _spell(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if token_id in self.special_ids:
            return token.encode()
        if self.byte_level:
            return bytes_of_byte_level(token)
        if _is_byte(token):
            return bytes.fromhex(token[3:5])
        before, known = self._before or self._word()
        return self.decode([*before, token_id], skip_special_tokens=False)[len(known) :].encode()

    def _word(self) -> tuple[tuple[int, ...], str]:
        """A token that ends in a letter or digit, and its text: behind it others are spelled as within a text."""
        self._before = ((), "")
        for token_id in range(self.vocab_size):
            if token_id not in self.special_ids and not _is_byte(self.token(token_id)):
                text = self.decode([token_id], skip_special_tokens=False)
                if text[-1:].isalnum():
                    self._before = ((token_id,), text)
                    break
        return self._before


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable spelling of bytes (`bytes_to_unicode` of the original encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in printable}
    rest = (b for b in range(256) if b not in set(printable))
    alphabet.update({chr(256 + i): b for i, b in enumerate(rest)})
    return alphabet


BYTE_OF = _byte_level_alphabet()


def bytes_of_byte_level(token: str) -> bytes:
    """A token spelled in the byte-level alphabet; one with any other character stands for itself."""
    try:
        return bytes(BYTE_OF[c] for c in token)
    except KeyError:
        return token.encode()


@contextmanager
def _told(what: str) -> Iterator[None]:
    """A panic of the library, which is no Exception, is said of the text that it is about: its expressions give up
    after millions of steps."""
    try:
        yield
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise RequestError(
            f"the model's tokenizer cannot {what} this: its own rules take too many steps for it; send another text",
            param="prompt",
        ) from error


def _is_panic(error: BaseException) -> bool:
    return not isinstance(error, Exception) and type(error).__name__ == "PanicException"


def _expressions(vocabulary: Vocabulary) -> Iterator[str]:
    """All regular expressions that it tries at texts."""
    for part in (vocabulary.normalizer, vocabulary.pre_tokenizer, vocabulary.decoder):
        if part is not None:
            yield from _regexes(json.loads(part.__getstate__()))


def _regexes(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        expression = value.get("Regex")
        if isinstance(expression, str):
            yield expression
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _regexes(item)


def _vocabulary(path: Path) -> Vocabulary:
    """Tried on a few words: rules that name tokens which are not there only fail when they are used."""
    text = read_text(path, LIST_BYTES)
    try:
        vocabulary = Vocabulary.from_str(text)
        vocabulary.decode(vocabulary.encode("Two words.").ids)
    except (
        BaseException
    ) as error:  # the library raises nothing narrower, and its panics are not even Exceptions
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise CheckpointError(f"{path}: not a tokenizer file: {error}") from error
    return vocabulary


def read_json(folder: str | Path, name: str) -> dict[str, object]:
    """A JSON object beside the checkpoint, or an empty one when the file is absent. A link to nowhere is an error."""
    path = Path(folder) / name
    return read_object(path) if os.path.lexists(path) else {}


def special_tokens(folder: str | Path) -> dict[str, str]:
    """bos_token, eos_token, ... as strings, from tokenizer_config.json, then special_tokens_map.json."""
    merged = {**read_json(folder, "special_tokens_map.json"), **read_json(folder, "tokenizer_config.json")}
    found: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = merged.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
        elif value is not None:
            raise CheckpointError(
                f"{folder}: tokenizer_config.json or special_tokens_map.json: {name}: {shown(value)} is neither a text "
                "nor an object with one as its content"
            )
    return found


def eos_ids(folder: str | Path) -> tuple[int, ...]:
    """Ids that end a text: generation_config.json's, else config.json's, else the tokenizer's eos_token."""
    listed = listed_eos_ids(folder)
    if listed:
        return listed
    token = special_tokens(folder).get("eos_token")
    if token is None or not (Path(folder) / "tokenizer.json").is_file():
        return ()
    found = Tokenizer.from_folder(folder).token_id(token)
    return () if found is None else (found,)


def listed_eos_ids(folder: str | Path) -> tuple[int, ...]:
    """What configuration files say; the vocabulary is not read. Raises CheckpointError naming file and field."""
    config = read_json(folder, "config.json")
    text_config = config.get("text_config")
    sources = [
        ("generation_config.json", read_json(folder, "generation_config.json")),
        ("config.json", config),
    ]
    if isinstance(text_config, dict):
        sources.append(("config.json: text_config", text_config))
    size = config.get("vocab_size")
    size = size if isinstance(size, int) and VOCABULARY.holds(size) else MOST_VOCABULARY
    for name, source in sources:
        ids = ConfigFields(source, f"{folder}/{name}").token_ids("eos_token_id", size)
        if ids:
            return ids
    return ()
