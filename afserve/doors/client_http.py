"""What both clients share: what each method asks for, paths, defaults, and how an answer or a lost connection becomes a
value or an error.

Knows httpx; what bodies and events mean is in `client_wire`.
"""

import random
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx

from afserve.control.wire.change_values import (
    Change,
    DrainOne,
    End,
    Fault,
    NewPhase,
    NewRole,
    Restart,
    ScaleTo,
    verb_of,
)
from afserve.doors.client_wire import chat_payload, completion_payload, error_of, unreachable
from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import AfserveError, NotFoundError, OverloadedError, PeerLost

_FIRST_PAUSE, _LONGEST_PAUSE, _MOST_ASKED = 0.05, 1.0, 60.0
_PREFIXES = {"/v1/completions": "cmpl-", "/v1/chat/completions": "chatcmpl-"}
BREAKS = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
_OURS = ("resume", "request_id")  # fields that a server may not know or not like


@dataclass(frozen=True, slots=True)
class Sending:
    method: str
    path: str
    json: Mapping[str, object] | None = None
    headers: Mapping[str, str] | None = None

    def options(self) -> dict[str, Any]:
        """As httpx takes them."""
        return {"method": self.method, "url": self.path, "json": self.json, "headers": self.headers}


class Attempts:
    """One request that goes on where its connection breaks: what to send next, and after which pause. No sockets.

    It is posted once, with an id that the client has drawn. After a break it is asked for by that id: the stream behind
    the last event that was read whole, or the answer. The server keeps it for `seconds`; 0: what breaks, breaks, and a
    closed connection ends it.

    `retries`: how often it is sent again to a server that had no room for it (429, or 503 with Retry-After).
    """

    def __init__(
        self, url: str, path: str, payload: Mapping[str, object], seconds: float, retries: int = 0
    ) -> None:
        self._url, self._path, self._payload, self._seconds = url, path, payload, seconds
        self._retries = self._retries_left = retries
        self._stream = bool(payload.get("stream"))
        self._last = self._pending = ""
        self._answered = False  # anything of the answer was read
        self._broken_at: float | None = None
        self._cause: AfserveError | None = None
        self._tries = 0
        self._new()

    def _new(self) -> None:
        self._own_id, self._posted = secrets.token_hex(16), False

    @property
    def _id(self) -> str:
        return _PREFIXES[self._path] + self._own_id

    def next(self) -> Sending:
        if not self._posted:
            ours = {"resume": self._seconds, "request_id": self._own_id} if self._seconds else {}
            return Sending("POST", self._path, {**self._payload, **ours})
        last = {"last-event-id": self._last} if self._last else {}
        what = "events" if self._stream else "answer"
        return Sending("GET", f"/v1/requests/{self._id}/{what}", headers=last)

    def forget(self) -> Sending | None:
        """What ends it on the server; None where the closed connection does, or nothing was sent."""
        return Sending("DELETE", f"/v1/requests/{self._id}") if self._seconds and self._posted else None

    def heard(self, line: str) -> None:
        """A line of the stream, whole. An event counts once its data is there."""
        if line.startswith("id:"):
            self._pending = line[3:].strip()
        elif line.startswith("data:"):
            self._last = self._pending
            self._answered, self._broken_at, self._tries = True, None, 0

    def accepted(self) -> None:
        """The server has begun to answer."""
        self._posted = True

    def refused(self, response: httpx.Response) -> float:
        """The pause before the next attempt. Raises the server's error where there is none."""
        error = error_of(response.status_code, response.text, response.headers.get("retry-after"))
        if not self._posted:
            if self._seconds and (error.param in _OURS or _is_full(error)):
                self._seconds = 0.0
                return 0.0
            if self._cause is not None and response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                return self._pause(error)
            if isinstance(error, OverloadedError) and self._retries_left:
                self._retries_left -= 1
                return backoff(self._retries - self._retries_left, error.retry_after)
            raise error
        if isinstance(error, NotFoundError) and error.param == "request" and not self._answered:
            self._new()  # it has never arrived
            return self._pause(error)
        if isinstance(error, NotFoundError) and self._cause is not None:
            raise self._cause  # a server that keeps nothing, or not any more
        if isinstance(error, OverloadedError) or response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            return self._pause(error)
        raise error

    def broke(self, error: httpx.TransportError | PeerLost) -> float:
        """The same for a connection that broke. Where nobody has ever answered, nobody is waited for."""
        cause = error if isinstance(error, PeerLost) else unreachable(self._url, error)
        first = not self._posted and self._cause is None
        if not self._seconds or (first and isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)):
            raise cause from error
        if not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            self._posted = True  # perhaps; whoever asks by its id will know
        self._cause = cause
        return self._pause(cause)

    def _pause(self, error: AfserveError) -> float:
        now = time.monotonic()
        if self._broken_at is None:
            self._broken_at = now
        if now - self._broken_at >= self._seconds:
            raise error
        self._tries += 1
        return backoff(self._tries)


def backoff(tries: int, at_least: float = 0.0) -> float:
    """The pause after so many tries, in seconds; `at_least` is what the server asked for."""
    longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(tries, 10))
    return max(longest * random.uniform(0.5, 1.0), min(at_least, _MOST_ASKED))


def _is_full(error: AfserveError) -> bool:
    """The server has no room to keep it, and may have some to answer it."""
    return isinstance(error, OverloadedError) and error.message.startswith("resume:")


DEFAULT_URL = "http://127.0.0.1:8000"
RESUME_SECONDS = 30.0
RETRIES = 2
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
Prompt = str | Sequence[int]
Input = Prompt | Sequence[str] | Sequence[Sequence[int]]
Messages = Sequence[Mapping[str, object]]
Extra = Mapping[str, object] | None
Nodes = int | str | None  # 3: so many; "+1" or "-1": more or fewer; None: as many as there are


class ErrorReply(Exception):
    def __init__(self, response: httpx.Response) -> None:
        super().__init__(response.status_code)
        self.response = response


def checked(response: httpx.Response) -> httpx.Response:
    if response.is_error:
        raise error_of(response.status_code, response.text, response.headers.get("retry-after"))
    return response


def object_of(response: httpx.Response) -> Mapping[str, object]:
    body = response.json()
    assert isinstance(body, dict)
    return body


@contextmanager
def clear_errors(url: str) -> Iterator[None]:
    try:
        yield
    except (httpx.TransportError, httpx.InvalidURL, ValueError) as error:
        raise unreachable(url, error) from error


Object = TypeVar("Object")  # a JSON object, or what is awaited for one
Answer = TypeVar("Answer")  # a Reply, or what is awaited for one
Stream = TypeVar("Stream")  # an iterator of Deltas


class Calls(ABC, Generic[Object, Answer, Stream]):
    """The methods of both clients that only say what is asked for. Errors are those of afserve.errors."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        resume: float = RESUME_SECONDS,
        retries: int = RETRIES,
        model: str | None = None,
        transport: httpx.BaseTransport | httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._resume, self._retries = resume, retries
        self._named = {} if model is None else {"model": model}
        self._connect({
            "base_url": self.url,
            "headers": {} if api_key is None else {"authorization": f"Bearer {api_key}"},
            "timeout": httpx.Timeout(timeout, connect=min(timeout, 5.0)),
            "params": self._named,
            # Certificates are checked, and the 50 to 100 ms of loading them paid, wherever there are any.
            "verify": not self.url.lower().startswith("http://"),
            "transport": transport,
        })  # fmt: skip

    @abstractmethod
    def _connect(self, options: dict[str, Any]) -> None:
        """Makes httpx's client, of these options."""

    def _attempts(self, path: str, payload: Mapping[str, object], *, resumes: bool = True) -> Attempts:
        seconds = self._resume if resumes else 0.0
        return Attempts(self.url, path, {**self._named, **payload}, seconds, self._retries)

    @abstractmethod
    def _get(self, path: str) -> Object: ...

    @abstractmethod
    def _post(self, path: str, payload: Mapping[str, object]) -> Object: ...

    @abstractmethod
    def _ask(self, path: str, payload: Mapping[str, object]) -> Answer: ...

    @abstractmethod
    def _stream(self, path: str, payload: Mapping[str, object]) -> Stream: ...

    def complete(self, prompt: Prompt, params: SamplingParams | None = None) -> Answer:
        """The text that follows a prompt."""
        return self._ask(COMPLETIONS, completion_payload(prompt, params))

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        unlimited: bool = False,
        extra: Extra = None,
    ) -> Answer:
        """The assistant's next message. `unlimited`, or no `params`: it may use all the context that is left.

        `extra` are further fields of the request, such as {"tools": [...]} or {"response_format": {...}}.
        """
        return self._ask(CHAT, chat_payload(messages, params, unlimited=unlimited, extra=extra))

    def complete_stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """The same, piece by piece. Leaving the iterator early cancels the generation."""
        return self._stream(COMPLETIONS, completion_payload(prompt, params, stream=True))

    def chat_stream(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        unlimited: bool = False,
        extra: Extra = None,
    ) -> Stream:
        payload = chat_payload(messages, params, unlimited=unlimited, stream=True, extra=extra)
        return self._stream(CHAT, payload)

    def status(self) -> Object:
        """The model and the members as the controller sees them."""
        return self._get("/status")

    def change(self, change: Change) -> Object:
        """Any change of the running deployment, such as `DrainOne("expert-1")`; needs the admin key.

        Returns who comes and who goes as soon as that is on its way; `status` shows who is there.
        """
        verb = verb_of(change)
        return self._post(verb.path, verb.body(change))

    def scale(
        self,
        *,
        attention: Nodes = None,
        prefill: Nodes = None,
        decode: Nodes = None,
        experts: Nodes = None,
        gateways: Nodes = None,
    ) -> Object:
        """Other numbers of nodes while serving, such as `scale(attention=3, experts="-1")`; as `change`."""
        pools = {
            "attention": attention,
            "prefill": prefill,
            "decode": decode,
            "experts": experts,
            "gateways": gateways,
        }
        return self.change(ScaleTo({pool: str(n) for pool, n in pools.items() if n is not None}))

    def drain(self, node: str) -> Object:
        """This node, such as `expert-1`, takes nothing new and goes once nothing needs it."""
        return self.change(DrainOne(node))

    def restart(self, *nodes: str) -> Object:
        """New processes for these nodes, or for all, one after another."""
        return self.change(Restart(nodes))

    def change_role(self, node: str, role: str) -> Object:
        """This node goes as with `drain`, and one of this role, attention or expert, starts where it was."""
        return self.change(NewRole(node, role))

    def change_phase(self, node: str, phase: str) -> Object:
        """This attention node is in another phase, prefill, decode or both, from now on."""
        return self.change(NewPhase(node, phase))

    def down(self) -> Object:
        """End the whole run, once running requests had their time."""
        return self.change(End())

    def fault(self, node: str, fault: str, seconds: float = 0.0) -> Object:
        """Break this node on purpose: `kill` it, `stop` it or make it `slow` for so many seconds."""
        return self.change(Fault(node, fault, seconds))
