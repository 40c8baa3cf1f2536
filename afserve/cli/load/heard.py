"""One request as the client saw it: when it was due, sent and answered, piece by piece. Seconds of `perf_counter`."""

import json
from dataclasses import dataclass, field
from typing import Any

COMPLETED, REFUSED, FAILED = "completed", "refused", "failed"
_BUSY = (429, 503)
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")


@dataclass(slots=True)
class Heard:
    """`due` is when it was to be sent, `sent` when it was; `pieces` are the times at which text came.

    `outcome` is completed, refused (the server had no room: 429 or 503) or failed, and `why` says what went wrong.
    Tokens are those of the server's usage; without one, pieces are counted.
    """

    due: float
    output: int
    sent: float = 0.0
    ended: float = 0.0
    pieces: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    usage_tokens: int | None = None
    finish_reason: str | None = None
    outcome: str = FAILED
    why: str = ""
    status: int = 0

    @property
    def tokens(self) -> int:
        return len(self.pieces) if self.usage_tokens is None else self.usage_tokens

    @property
    def ttft(self) -> float:
        return self.pieces[0] - self.sent

    @property
    def e2e(self) -> float:
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per token after the first one; None where there is but one."""
        return (self.pieces[-1] - self.pieces[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Between a piece of text and the one before it."""
        return [after - before for before, after in zip(self.pieces, self.pieces[1:], strict=False)]

    def event(self, data: bytes, now: float) -> bool:
        """Takes one event of the stream; True at its end. Raises ValueError for what is no such event."""
        if data == b"[DONE]":
            return True
        body = json.loads(data)
        if not isinstance(body, dict):
            raise ValueError("an event that is no object")
        if error := body.get("error"):
            self.why = _message(error)
            return True
        if usage := body.get("usage"):
            self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            self.usage_tokens = int(usage.get("completion_tokens") or 0)
        for choice in body.get("choices") or ():
            reason = choice.get("finish_reason")
            if _text(choice) or (reason and not self.pieces):  # an answer may end before it has any text
                self.pieces.append(now)
            self.finish_reason = reason or self.finish_reason
        return False

    def end(self, now: float, *, whole: bool) -> None:
        """`whole`: the stream came to its own end."""
        self.ended = now
        if self.why:
            return
        if not whole:
            self.why = "the stream broke off before its end"
        elif not self.pieces:
            self.why = "the stream had no choice in it"
        else:
            self.outcome = COMPLETED

    def refuse(self, status: int, body: bytes, now: float) -> None:
        """The server answered with an error instead of a stream."""
        self.status, self.ended = status, now
        self.outcome = REFUSED if status in _BUSY else FAILED
        try:
            self.why = f"{status}: {_message(json.loads(body).get('error'))}"
        except (ValueError, AttributeError, RecursionError):
            self.why = f"{status}: {body[:100].decode(errors='replace')}"

    def mark_failed(self, why: str, now: float) -> None:
        self.outcome, self.why, self.ended = FAILED, why, now


def _text(choice: dict[str, Any]) -> bool:
    """Whether an event brought anything that the model said."""
    if "text" in choice:
        return bool(choice["text"])
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in _TEXTS)


def _message(error: object) -> str:
    found = error.get("message") if isinstance(error, dict) else error
    return str(found)[:100]
