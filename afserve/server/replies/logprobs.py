"""Log-probabilities in the two shapes of the OpenAI API, as pieces of JSON text. Values in, text out.

A token that is not whole UTF-8 is shown as `bytes:\\xe2\\x80`, as OpenAI's completions did, so that two such
tokens never share a key. A score that is no finite number is drawn as LOWEST: JSON has no NaN and no infinity.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring

from afserve.engine.scheduling.request import TokenLogprob
from afserve.tokens.tokenizer import Tokenizer

LOWEST = -9999.0


@dataclass(frozen=True, slots=True)
class Scored:
    """A token and its score; the first token of a prompt has none. `shown`: the text spells it out. `begins`: the text
    begins with it."""

    token_id: int
    score: TokenLogprob | None
    shown: bool = True
    begins: bool = False


@dataclass(slots=True)
class Columns:
    """The legacy parallel arrays of one choice, grown token by token; `offset` is where the next token starts."""

    offset: int
    offsets: list[str]
    scores: list[str]
    tokens: list[str]
    tops: list[str]
    size: int = 0

    @classmethod
    def starting_at(cls, offset: int) -> "Columns":
        return cls(offset, [], [], [], [])

    def add_scores(self, tokenizer: Tokenizer, scored: Iterable[Scored]) -> None:
        for item in scored:
            spell = tokenizer.first_bytes if item.begins else tokenizer.token_bytes
            raw = spell(item.token_id)
            self.offsets.append(str(self.offset))
            self.tokens.append(encode_basestring(text_of_bytes(raw)))
            self.scores.append("null" if item.score is None else repr(finite(item.score.logprob)))
            self.tops.append("null" if item.score is None else _top(spell, item.score))
            self.size += len(self.tokens[-1]) + len(self.tops[-1]) + 32
            self.offset += _characters(raw) if item.shown else 0

    def json_parts(self) -> list[str]:
        return [
            '{"text_offset":[', ",".join(self.offsets), '],"token_logprobs":[', ",".join(self.scores),
            '],"tokens":[', ",".join(self.tokens), '],"top_logprobs":[', ",".join(self.tops), "]}",
        ]  # fmt: skip


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > LOWEST else LOWEST


def text_of_bytes(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _characters(raw: bytes) -> int:
    """Characters that begin in these bytes: one split over two tokens counts where it begins."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)


def _top(spell: Callable[[int], bytes], score: TokenLogprob) -> str:
    """The best alternatives by text, and always the token itself."""
    top = {text_of_bytes(spell(token_id)): finite(logprob) for token_id, logprob in reversed(score.top)}
    top[text_of_bytes(spell(score.token_id))] = finite(score.logprob)
    ranked = dict(sorted(top.items(), key=lambda pair: -pair[1]))
    return json.dumps(ranked, ensure_ascii=False, separators=(",", ":"))


def chat_entries(tokenizer: Tokenizer, scores: Sequence[TokenLogprob]) -> str:
    """The entries of `content`, without its brackets."""
    content = [
        {
            **_entry(tokenizer, score.token_id, score.logprob),
            "top_logprobs": [_entry(tokenizer, token_id, logprob) for token_id, logprob in score.top],
        }
        for score in scores
    ]
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))[1:-1]


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, object]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": text_of_bytes(raw), "logprob": finite(logprob), "bytes": list(raw)}
