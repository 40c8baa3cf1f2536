"""A message in Anthropic's words: content blocks that begin, grow and end; the same blocks make the whole body."""

import uuid
from collections.abc import Mapping

from afserve.errors import AfserveError
from afserve.server.reading.call_object import arguments_object
from afserve.server.reading.parts import Argued, Called, Content, Part, Thought
from afserve.server.reading.table import Reading
from afserve.server.replies.choice import TextPiece
from afserve.server.replies.refusal import anthropic_body
from afserve.server.replies.surface import ReadSurface
from afserve.server.replies.wording import Usage, encode, typed_event

Block = dict[str, object]
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageSurface(ReadSurface):
    """`kept`: what of the request's prompt is to stay, in tokens, since it marked that by `cache_control`."""

    def __init__(self, message_id: str, model: str, reading: Reading | None, *, kept: int = 0) -> None:
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        super().__init__(reading)
        self._kept = kept
        self._blocks: list[Block] = []
        self._text: list[str] = []
        self._open = False
        self._reason: str | None = None
        self._stop: str | None = None

    def stream_opening(self, usage: Usage) -> bytes:
        nothing: Block = {"content": [], "stop_reason": None, "stop_sequence": None}
        return typed_event(
            "message_start",
            message={**self._head, **nothing, "usage": {**self._usage(usage), "output_tokens": 0}},
        )

    def _last(self, piece: TextPiece, reason: str) -> bytes:
        said = self._close()
        calls = reason == "stop" and any(block["type"] == "tool_use" for block in self._blocks)
        self._stop, self._reason = piece.stop, _REASONS.get("tool_calls" if calls else reason, "end_turn")
        if piece.stop is not None:
            self._reason = "stop_sequence"
        return said

    def stream_end(self, usage: Usage) -> bytes:
        delta = {"stop_reason": self._reason, "stop_sequence": self._stop}
        return typed_event("message_delta", delta=delta, usage=self._usage(usage)) + typed_event(
            "message_stop"
        )

    def say_failure(self, error: AfserveError | None) -> bytes:
        return f"event: error\ndata: {encode(anthropic_body(error))}\n\n".encode()

    def whole_body(self, usage: Usage) -> tuple[bytes, ...]:
        whole = {
            **self._head,
            "content": self._blocks,
            "stop_reason": self._reason,
            "stop_sequence": self._stop,
            "usage": self._usage(usage),
        }
        return (encode(whole).encode(),)

    def _part(self, part: Part) -> bytes:
        match part:
            case Content(text):
                lead = self._begin({"type": "text", "text": ""})
                return lead + self._grow(text, {"type": "text_delta", "text": text})
            case Thought(text):
                lead = self._begin({"type": "thinking", "thinking": "", "signature": ""})
                return lead + self._grow(text, {"type": "thinking_delta", "thinking": text})
            case Called(_, name):
                call_id = f"toolu_{uuid.uuid4().hex[:24]}"
                return self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case Argued(_, text):
                return self._grow(text, {"type": "input_json_delta", "partial_json": text})

    def _begin(self, block: Block) -> bytes:
        """A new block, unless the open one is of this type; every call is its own."""
        if self._open and self._blocks[-1]["type"] == block["type"] != "tool_use":
            return b""
        said = self._close()
        self._blocks.append(block)
        self._text.clear()
        self._open = True
        return said + typed_event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _grow(self, text: str, delta: Mapping[str, object]) -> bytes:
        self._text.append(text)
        return typed_event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = False
        block, text = self._blocks[-1], "".join(self._text)
        if block["type"] == "tool_use":
            block["input"] = arguments_object(text)
        else:
            block[str(block["type"])] = text
        return typed_event("content_block_stop", index=len(self._blocks) - 1)

    def _usage(self, usage: Usage) -> Mapping[str, int]:
        """The three kinds of input add up to the prompt. What was computed of a part that is to stay was written."""
        written = max(0, self._kept - usage.reused_tokens)
        return {
            "input_tokens": usage.prompt_tokens - usage.reused_tokens - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": usage.reused_tokens,
            "output_tokens": usage.completion_tokens,
        }
