"""Talk to a running server from Python: `Client`, and `AsyncClient` with the same methods to await.

    with Client() as client:
        for delta in client.chat_stream([{"role": "user", "content": "hello"}]):
            print(delta.text, end="")

Closing a stream early cancels the generation on the server. A connection that breaks does not: `resume` is for how long
the server keeps the request then, and the client goes on behind the last token that it has. Never imports torch.
"""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType

import httpx

from afserve.doors.client_http import (
    CHAT,
    COMPLETIONS,
    DEFAULT_URL,
    EMBEDDINGS,
    RESUME_SECONDS,
    RETRIES,
    ErrorReply,
    Extra,
    Input,
    Messages,
    Nodes,
    Prompt,
    checked,
    clear_errors,
    headers_of,
    object_of,
    timeout_of,
    verify,
)
from afserve.doors.client_resume import BREAKS, Attempts
from afserve.doors.client_wire import (
    Delta,
    Deltas,
    Embeddings,
    Reply,
    ToolCall,
    chat_payload,
    completion_payload,
    embedding_payload,
    embeddings_of,
    reply_of,
    restart_payload,
    scale_payload,
    texts_of,
)
from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import PeerLost

__all__ = ["DEFAULT_URL", "Client", "Delta", "Embeddings", "Reply", "ToolCall"]


class Client:
    """One server. `timeout` is for a single wait on the network, in seconds; `transport` is for tests.

    `resume`: how long, in seconds, a request may be without a connection before it is given up; the client connects
    again meanwhile, with pauses of up to one second. 0 turns it off: then a broken connection is an error. A server
    that cannot keep requests is asked without. `retries`: how often a request is sent again to a server that has no
    room for it, after the pause that it asks for, at most a minute. `model`: which of a server's models all of
    it is for; without it requests are for its first, and changes for the only one.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        resume: float = RESUME_SECONDS,
        retries: int = RETRIES,
        model: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._resume, self._retries = resume, retries
        self._named = {} if model is None else {"model": model}
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers_of(api_key),
            timeout=timeout_of(timeout),
            params=self._named,
            transport=transport,
            verify=verify(self.url),
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def complete(self, prompt: Prompt, params: SamplingParams | None = None) -> Reply:
        """The text that follows a prompt. Errors are those of afserve.errors."""
        return reply_of(self._ask(COMPLETIONS, completion_payload(prompt, params)))

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        unlimited: bool = False,
        extra: Extra = None,
    ) -> Reply:
        """The assistant's next message. `unlimited`, or no `params`: it may use all the context that is left.

        `extra` are further fields of the request, such as {"tools": [...]} or {"response_format": {...}}.
        """
        return reply_of(self._ask(CHAT, chat_payload(messages, params, unlimited=unlimited, extra=extra)))

    def complete_stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[Delta, None, None]:
        """The same, piece by piece. Leaving the iterator early cancels the generation."""
        return self._stream(COMPLETIONS, completion_payload(prompt, params, stream=True))

    def chat_stream(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        unlimited: bool = False,
        extra: Extra = None,
    ) -> Generator[Delta, None, None]:
        payload = chat_payload(messages, params, unlimited=unlimited, stream=True, extra=extra)
        return self._stream(CHAT, payload)

    def embed(self, input: Input) -> Embeddings:
        """A vector of length 1 for a text, for token ids, or for each of several of either. It is not resumed."""
        payload = {**self._named, **embedding_payload(input)}
        attempts = Attempts(self.url, EMBEDDINGS, payload, 0.0, self._retries)
        return embeddings_of(self._until_answered(attempts))

    def models(self) -> tuple[str, ...]:
        return texts_of(self._get("/v1/models"), "id")

    def status(self) -> Mapping[str, object]:
        """The model and the members as the controller sees them."""
        return self._get("/status")

    def scale(
        self,
        *,
        attention: Nodes = None,
        prefill: Nodes = None,
        decode: Nodes = None,
        experts: Nodes = None,
        gateways: Nodes = None,
    ) -> Mapping[str, object]:
        """Other numbers of nodes while serving, such as `scale(attention=3, experts="-1")`.

        Needs the admin key, as `drain` and `restart` do. Returns who comes and who goes as soon as that is on its way;
        `status` shows who is there.
        """
        pools = scale_payload(
            attention=attention, prefill=prefill, decode=decode, experts=experts, gateways=gateways
        )
        return self._post("/admin/scale", pools)

    def drain(self, node: str) -> Mapping[str, object]:
        """This node, such as `expert-1`, takes nothing new and goes once nothing needs it."""
        return self._post("/admin/drain", {"node": node})

    def restart(self, *nodes: str) -> Mapping[str, object]:
        """New processes for these nodes, or for all, one after another."""
        return self._post("/admin/restart", restart_payload(nodes))

    def change_role(self, node: str, role: str) -> Mapping[str, object]:
        """This node goes as with `drain`, and one of this role, attention or expert, starts where it was."""
        return self._post("/admin/role", {"node": node, "role": role})

    def change_phase(self, node: str, phase: str) -> Mapping[str, object]:
        """This attention node is in another phase, prefill, decode or both, from now on."""
        return self._post("/admin/phase", {"node": node, "phase": phase})

    def down(self) -> Mapping[str, object]:
        """End the whole run, once running requests had their time."""
        return self._post("/admin/down", {})

    def fault(self, node: str, fault: str, seconds: float = 0.0) -> Mapping[str, object]:
        """Break this node on purpose: `kill` it, `stop` it or make it `slow` for so many seconds."""
        return self._post("/admin/fault", {"node": node, "fault": fault, "seconds": seconds})

    def tokenize(self, text: str) -> tuple[int, ...]:
        tokens = self._post("/tokenize", {**self._named, "prompt": text})["tokens"]
        assert isinstance(tokens, list)
        return tuple(tokens)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return str(self._post("/detokenize", {**self._named, "tokens": list(token_ids)})["prompt"])

    def ready(self) -> bool:
        """Whether a server answers there and takes traffic."""
        try:
            return self._http.get("/ready").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def metrics(self) -> str:
        with clear_errors(self.url):
            return checked(self._http.get("/metrics")).text

    def _get(self, path: str) -> Mapping[str, object]:
        with clear_errors(self.url):
            return object_of(checked(self._http.get(path)))

    def _post(self, path: str, payload: Mapping[str, object]) -> Mapping[str, object]:
        with clear_errors(self.url):
            return object_of(checked(self._http.post(path, json=payload)))

    def _ask(self, path: str, payload: Mapping[str, object]) -> Mapping[str, object]:
        attempts = Attempts(self.url, path, {**self._named, **payload}, self._resume, self._retries)
        return self._until_answered(attempts)

    def _until_answered(self, attempts: Attempts) -> Mapping[str, object]:
        with clear_errors(self.url):
            while True:
                try:
                    response = self._http.request(**attempts.next().options())
                    if not response.is_error:
                        return object_of(response)
                    pause = attempts.refused(response)
                except BREAKS as error:
                    pause = attempts.broke(error)
                time.sleep(pause)

    def _stream(self, path: str, payload: Mapping[str, object]) -> Generator[Delta, None, None]:
        attempts, parser = (
            Attempts(self.url, path, {**self._named, **payload}, self._resume, self._retries),
            Deltas(),
        )
        try:
            with clear_errors(self.url):
                while not parser.done:
                    try:
                        yield from self._read(attempts, parser)
                        continue
                    except ErrorReply as refused:
                        pause = attempts.refused(refused.response)
                    except (*BREAKS, PeerLost) as error:
                        pause = attempts.broke(error)
                    time.sleep(pause)
        finally:
            if not parser.done and (ending := attempts.forget()) is not None:
                with suppress(httpx.HTTPError, RuntimeError):  # it ends by itself, later
                    self._http.request(**ending.options())

    def _read(self, attempts: Attempts, parser: Deltas) -> Iterator[Delta]:
        """One connection."""
        with self._http.stream(**attempts.next().options()) as response:
            if response.is_error:
                response.read()
                raise ErrorReply(response)
            attempts.accepted()
            for line in response.iter_lines():
                attempts.heard(line)
                yield from parser.feed(line)
            parser.finish()
