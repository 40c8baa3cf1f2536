"""What every answer in OpenAI's words shares: its header, its counts, and JSON as text."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from json.encoder import JSONEncoder, encode_basestring

from afserve import __version__
from afserve.engine.scheduling.request import NOT_PREDICTED, Predicted, sum_predicted
from afserve.server.replies.choice import TextPiece

DONE = b"data: [DONE]\n\n"
text_of = encode_basestring  # as `encode` does it, without what it does for other values
_ENCODER = JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass(slots=True)
class Usage:
    """Token counts of one request so far. A request that moved counts what each of its nodes had in its cache."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    predicted: Predicted = NOT_PREDICTED

    def count_piece(self, piece: TextPiece) -> None:
        self.completion_tokens += piece.tokens
        self.cached_tokens += piece.cached_tokens
        if piece.predicted is not NOT_PREDICTED:
            self.predicted = sum_predicted((self.predicted, piece.predicted))

    @property
    def reused_tokens(self) -> int:
        """Of the prompt; a request that moved may have found more than it has."""
        return min(self.cached_tokens, self.prompt_tokens)

    def of_prediction(self) -> dict[str, object]:
        """In OpenAI's words."""
        accepted, rejected = self.predicted
        return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}

    def as_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.reused_tokens},
        }


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What every chunk of one answer repeats."""

    id: str
    created: int
    model: str
    tier: str = "default"

    def fields(self, kind: str) -> dict[str, object]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "service_tier": self.tier,
            "system_fingerprint": _fingerprint(self.model),
        }


@lru_cache(maxsize=256)
def _fingerprint(model: str) -> str:
    """The same while neither the model's name nor the server's version changes."""
    return f"fp_{hashlib.sha256(f'{model} {__version__}'.encode()).hexdigest()[:10]}"


def encode(value: object) -> str:
    return _ENCODER.encode(value)


def inner(text: str) -> str:
    """The text in JSON, without its quotes: such pieces may be joined."""
    return encode_basestring(text)[1:-1]


def event(value: object) -> bytes:
    return f"data: {encode(value)}\n\n".encode()


def typed_event(kind: str, **more: object) -> bytes:
    """One whose name is also the `type` of its value."""
    return f"event: {kind}\ndata: {encode({'type': kind, **more})}\n\n".encode()


def quoted(reason: str | None) -> str:
    return "null" if reason is None else f'"{reason}"'
