"""Log-probabilities in the two shapes of the OpenAI API. Values in, JSON values out.

A token that is not whole UTF-8 is shown as `bytes:\\xe2\\x80`, as OpenAI's completions did, so that two such
tokens never share a key.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from afserve.engine.request import TokenLogprob
from afserve.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Scored:
    """A token and its score; the first token of a prompt has none. `shown`: the text spells it out."""

    token_id: int
    score: TokenLogprob | None
    shown: bool = True


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(
    tokenizer: Tokenizer, scored: Sequence[Scored], offset: int
) -> tuple[dict[str, object], int]:
    """The legacy parallel arrays, and the text offset after them. `offset` is where the first token starts."""
    tokens = [token_text(tokenizer, item.token_id) for item in scored]
    offsets = []
    for item in scored:
        offsets.append(offset)
        offset += _characters(tokenizer.token_bytes(item.token_id)) if item.shown else 0
    body: dict[str, object] = {
        "text_offset": offsets,
        "token_logprobs": [None if item.score is None else item.score.logprob for item in scored],
        "tokens": tokens,
        "top_logprobs": [None if item.score is None else _top(tokenizer, item.score) for item in scored],
    }
    return body, offset


def _characters(raw: bytes) -> int:
    """Characters that begin in these bytes: one split over two tokens counts where it begins."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)


def _top(tokenizer: Tokenizer, score: TokenLogprob) -> dict[str, float]:
    """The best alternatives by text, and always the token itself."""
    top = {token_text(tokenizer, token_id): logprob for token_id, logprob in reversed(score.top)}
    top[token_text(tokenizer, score.token_id)] = score.logprob
    return dict(sorted(top.items(), key=lambda pair: -pair[1]))


def chat_logprobs(tokenizer: Tokenizer, scores: Sequence[TokenLogprob]) -> dict[str, object]:
    content = [
        {
            **_entry(tokenizer, score.token_id, score.logprob),
            "top_logprobs": [_entry(tokenizer, token_id, logprob) for token_id, logprob in score.top],
        }
        for score in scores
    ]
    return {"content": content, "refusal": None}


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, object]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": token_text(tokenizer, token_id), "logprob": logprob, "bytes": list(raw)}
