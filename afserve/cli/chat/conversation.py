"""A conversation kept on the client's side: what was said, and one streamed answer at a time; and its `/params`."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

from afserve.cli.chat.markdown import PlainText, Shown
from afserve.doors.client import Client
from afserve.doors.client_wire import Delta
from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import AfserveError, RequestError, shown

_KINDS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
}
_OPEN = ("seed", "max_tokens")  # those that may be none


def told(params: SamplingParams, unlimited: bool) -> str:
    """All of them in a line."""
    values = {name: getattr(params, name) for name in _KINDS}
    if unlimited:
        values["max_tokens"] = None
    return " ".join(f"{name}={'none' if value is None else value}" for name, value in values.items())


def changed(params: SamplingParams, unlimited: bool, text: str) -> tuple[SamplingParams, bool]:
    """After `temperature=0.2 seed=none`. Raises RequestError that names what is wrong."""
    for part in text.split():
        name, _, value = part.partition("=")
        if name not in _KINDS:
            raise RequestError(f"/params: {shown(name)} is not one of {', '.join(_KINDS)}")
        if value == "none" and name in _OPEN:
            unlimited = unlimited or name == "max_tokens"
            params = replace(params, seed=None) if name == "seed" else params
            continue
        try:
            params = replace(params, **{name: _KINDS[name](value)})
        except ValueError as error:
            raise RequestError(f"/params: {part}: give a number, as in {name}=1") from error
        unlimited = unlimited and name != "max_tokens"
    return params, unlimited


@dataclass(slots=True)
class ReceivedAnswer:
    """One answer as it was received. Times in seconds; `tokens` counts chunks until the server's count comes."""

    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    first_after: float = 0.0
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def rate(self) -> float:
        """Tokens per second after the first one; 0 where there is nothing to measure."""
        span = self.seconds - self.first_after
        return (self.tokens - 1) / span if self.tokens > 1 and span > 0 else 0.0

    def add(self, delta: Delta, since: float) -> None:
        if not self.tokens:
            self.first_after = since
        self.text += delta.text
        self.tokens += bool(delta.text or delta.reasoning)
        self.tokens = delta.completion_tokens or self.tokens
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.seconds = since


class ChatHistory:
    """Messages so far. A failed answer leaves no trace, a stopped one stays as far as it got."""

    def __init__(
        self,
        client: Client,
        system: str | None,
        params: SamplingParams,
        *,
        unlimited: bool,
        show: Callable[[], Shown] = PlainText,
    ) -> None:
        """`unlimited`: an answer may use all the context that is left. `show` makes what an answer is shown with."""
        self._client = client
        self._show = show
        self._system = system
        self._params = params
        self._unlimited = unlimited
        self._messages: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, *self._messages]

    def reset(self) -> None:
        self._messages.clear()

    def set_system(self, text: str | None) -> None:
        self._system = text

    @property
    def params(self) -> str:
        return told(self._params, self._unlimited)

    def set_params(self, text: str) -> None:
        """`temperature=0.2 seed=none`. Raises RequestError and changes nothing."""
        self._params, self._unlimited = changed(self._params, self._unlimited, text)

    def take_back(self) -> str | None:
        """Removes the last message and its answer; returns the message."""
        if not self._messages:
            return None
        message = self._messages[-2]["content"]
        del self._messages[-2:]
        return message

    def ask_and_print(self, text: str) -> ReceivedAnswer:
        """Prints the answer while it comes. Ctrl-C closes the stream, which cancels it on the server."""
        self._messages.append({"role": "user", "content": text})
        said = ReceivedAnswer()
        start = time.monotonic()
        stream = self._client.chat_stream(self.messages, self._params, unlimited=self._unlimited)
        try:
            with closing(stream) as deltas, self._show() as shown:
                for delta in deltas:
                    said.add(delta, time.monotonic() - start)
                    if delta.reasoning:
                        shown.think(delta.reasoning)
                    if delta.text:
                        shown.add(delta.text)
        except KeyboardInterrupt:
            said.interrupted = True
        except AfserveError:
            self._messages.pop()
            raise
        self._messages.append({"role": "assistant", "content": said.text})
        return said
