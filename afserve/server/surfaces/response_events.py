"""A response as it comes: items that begin, grow and end, each change an event; the same items make the whole body."""

import time
import uuid
from collections.abc import Mapping

from afserve.errors import AfserveError
from afserve.server.reading.parts import Argued, Called, Content, Part, Thought
from afserve.server.reading.table import Reading
from afserve.server.replies.choice import TextPiece
from afserve.server.replies.refusal import code_of, told
from afserve.server.replies.surface import ReadSurface
from afserve.server.replies.wording import Usage, encode, typed_event
from afserve.server.surfaces.response_tools import called_tools, free_text

Item = dict[str, object]
_CALL, _CUSTOM = _CALLS = ("function_call", "custom_tool_call")
_ENDS: Mapping[str, tuple[str, Item | None]] = {
    "stop": ("completed", None),
    "length": ("incomplete", {"reason": "max_output_tokens"}),
}


class ResponseSurface(ReadSurface):
    """One response. `items` grows as parts come; `usage` and `status` are known at its end."""

    def __init__(
        self, response_id: str, model: str, facts: Mapping[str, object], reading: Reading | None
    ) -> None:
        super().__init__(reading)
        self.id = response_id
        self.items: list[Item] = []
        self._tools = called_tools(facts.get("tools"))
        self._base = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **facts,
        }
        self._status = "in_progress"
        self._details: Item | None = None
        self._number = 0
        self._text: list[str] = []  # of the item that is open

    def stream_opening(self, usage: Usage) -> bytes:
        response = self._response(None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _last(self, piece: TextPiece, reason: str) -> bytes:
        self._status, self._details = _ENDS.get(reason, ("completed", None))
        return self._close(self._status)

    def stream_end(self, usage: Usage) -> bytes:
        return self._event(f"response.{self._status}", response=self._response(usage))

    def say_failure(self, error: AfserveError | None) -> bytes:
        self._status = "failed"
        message = told(error)
        asked = error is not None and error.status < 500  # of the codes that this API has, for what was asked
        code = (code_of(error) if error is not None else None) or (
            "invalid_prompt" if asked else "server_error"
        )
        response = {**self._response(None), "error": {"code": code, "message": message}}
        return self._event(
            "error", code=code, message=message, param=error.param if error else None
        ) + self._event("response.failed", response=response)

    def whole_body(self, usage: Usage) -> tuple[bytes, ...]:
        return (encode(self._response(usage)).encode(),)

    def _response(self, usage: Usage | None) -> Item:
        return {
            **self._base,
            "status": self._status,
            "error": None,
            "incomplete_details": self._details,
            "output": list(self.items) if usage is not None else [],
            "usage": None if usage is None else _usage(usage, self._told.reasoning_tokens),
        }

    def _part(self, part: Part) -> bytes:
        match part:
            case Content(text):
                lead = self._open("message")
                return lead + self._grow(text, "response.output_text.delta", content_index=0, logprobs=[])
            case Thought(text):
                lead = self._open("reasoning")
                return lead + self._grow(text, "response.reasoning_text.delta", content_index=0)
            case Called(index, name):
                return self._open_call(name, self._told.call_id(index))
            case Argued(_, text):
                if self.items[-1]["type"] == _CUSTOM:  # its text is told once it is whole
                    self._text.append(text)
                    return b""
                return self._grow(text, "response.function_call_arguments.delta")

    def _open_call(self, flat: str, call_id: str) -> bytes:
        """By the name that the client knows."""
        tool = self._tools.get(flat)
        called: Item = {"name": flat if tool is None else tool.name, "call_id": call_id}
        if tool is not None and tool.namespace is not None:
            called["namespace"] = tool.namespace
        if tool is not None and tool.custom:
            return self._open(_CUSTOM, **called, input="")
        return self._open(_CALL, **called, arguments="")

    def _open(self, kind: str, **more: object) -> bytes:
        """A new item, unless the open one is of this kind; every call is its own."""
        if self.items and self._is_open and self.items[-1]["type"] == kind not in _CALLS:
            return b""
        said = self._close()
        prefix = {"message": "msg", "reasoning": "rs", _CALL: "fc", _CUSTOM: "ctc"}[kind]
        item: Item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **more}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        if kind == "reasoning":
            item |= {"summary": [], "content": []}
        self.items.append(item)
        self._text.clear()
        said += self._event("response.output_item.added", output_index=len(self.items) - 1, item=dict(item))
        if kind not in _CALLS:
            said += self._at("response.content_part.added", content_index=0, part=_content(kind, ""))
        return said

    @property
    def _is_open(self) -> bool:
        return bool(self.items) and self.items[-1]["status"] == "in_progress"

    def _grow(self, text: str, kind: str, **more: object) -> bytes:
        self._text.append(text)
        return self._at(kind, delta=text, **more)

    def _close(self, status: str = "completed") -> bytes:
        """Ends the open item; what was cut off in it is `incomplete`."""
        if not self._is_open:
            return b""
        item, text = self.items[-1], "".join(self._text)
        item["status"] = status
        kind = str(item["type"])
        if kind == _CUSTOM:
            item["input"] = text = free_text(text)
            said = self._at("response.custom_tool_call_input.delta", delta=text)
            said += self._at("response.custom_tool_call_input.done", input=text)
        elif kind == _CALL:
            item["arguments"] = text
            said = self._at("response.function_call_arguments.done", arguments=text, name=item["name"])
        else:
            part = _content(kind, text)
            item["content"] = [part]
            scores: Item = {"logprobs": []} if kind == "message" else {}
            said = self._at(f"response.{part['type']}.done", content_index=0, text=text, **scores)
            said += self._at("response.content_part.done", content_index=0, part=part)
        return said + self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _at(self, kind: str, **more: object) -> bytes:
        return self._event(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **more)

    def _event(self, kind: str, **more: object) -> bytes:
        self._number += 1
        return typed_event(kind, sequence_number=self._number - 1, **more)


def _content(kind: str, text: str) -> Item:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage, thought: int) -> Item:
    """What was computed of the prompt is in the cache from then on."""
    written = usage.prompt_tokens - usage.reused_tokens
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.reused_tokens, "cache_write_tokens": written},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
