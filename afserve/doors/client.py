"""Talk to a running server from Python: `Client`, and `AsyncClient` with the same methods to await.

    with Client() as client:
        for delta in client.chat_stream([{"role": "user", "content": "hello"}]):
            print(delta.text, end="")

Closing a stream early cancels the generation on the server. A connection that breaks does not: `resume` is for how long
the server keeps the request then, and the client goes on behind the last token that it has. Never imports torch.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

import httpx

from afserve.doors.client_http import (
    BREAKS,
    DEFAULT_URL,
    EMBEDDINGS,
    Attempts,
    Calls,
    ErrorReply,
    Input,
    checked,
    clear_errors,
    object_of,
)
from afserve.doors.client_wire import (
    Delta,
    Deltas,
    Embeddings,
    Reply,
    ToolCall,
    embedding_payload,
    embeddings_of,
    reply_of,
    texts_of,
)
from afserve.errors import PeerLost

__all__ = ["DEFAULT_URL", "Client", "Delta", "Embeddings", "Reply", "ToolCall"]


class Client(Calls[Mapping[str, object], Reply, Generator[Delta, None, None]]):
    """One server. `timeout` is for a single wait on the network, in seconds; `transport` is for tests.

    `resume`: how long, in seconds, a request may be without a connection before it is given up; the client connects
    again meanwhile, with pauses of up to one second. 0 turns it off: then a broken connection is an error. A server
    that cannot keep requests is asked without. `retries`: how often a request is sent again to a server that has no
    room for it, after the pause that it asks for, at most a minute. `model`: which of a server's models all of
    it is for; without it requests are for its first, and changes for the only one.
    """

    def _connect(self, options: dict[str, Any]) -> None:
        self._http = httpx.Client(**options)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def embed(self, input: Input) -> Embeddings:
        """A vector of length 1 for a text, for token ids, or for each of several of either. It is not resumed."""
        attempts = self._attempts(EMBEDDINGS, embedding_payload(input), resumes=False)
        return embeddings_of(self._until_answered(attempts))

    def models(self) -> tuple[str, ...]:
        return texts_of(self._get("/v1/models"), "id")

    def tokenize(self, text: str) -> tuple[int, ...]:
        tokens = self._post("/tokenize", {**self._named, "prompt": text})["tokens"]
        assert isinstance(tokens, list)
        return tuple(tokens)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return str(self._post("/detokenize", {**self._named, "tokens": list(token_ids)})["prompt"])

    def warm(self, body: Mapping[str, object]) -> Mapping[str, object]:
        """Compute a `prompt`, or `messages` and `tools`, that will come, and keep it for `retain` seconds."""
        return self._post("/v1/cache/warm", {**self._named, **body})

    def kept_cache(self) -> Mapping[str, object]:
        """What caches keep because this key asked for it, and what that takes."""
        return self._get("/v1/cache")

    def unpin_cache(self) -> Mapping[str, object]:
        """Keep it no longer."""
        with clear_errors(self.url):
            return object_of(checked(self._http.delete("/v1/cache")))

    def unpin_prompt(self, body: Mapping[str, object], key: str = "") -> Mapping[str, object]:
        """The same of one prompt, given as to `warm`. One for admin says of which `key`, by its name."""
        query = f"?{httpx.QueryParams(key=key)}" if key else ""
        return self._post(f"/v1/cache/unpin{query}", {**self._named, **body})

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

    def _ask(self, path: str, payload: Mapping[str, object]) -> Reply:
        return reply_of(self._until_answered(self._attempts(path, payload)))

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
        attempts, parser = self._attempts(path, payload), Deltas()
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
        with self._http.stream(**attempts.next().options()) as response:
            if response.is_error:
                response.read()
                raise ErrorReply(response)
            attempts.accepted()
            for line in response.iter_lines():
                attempts.heard(line)
                yield from parser.read_line(line)
            parser.check_ended()


class AsyncClient(
    Calls[Coroutine[Any, Any, Mapping[str, object]], Coroutine[Any, Any, Reply], AsyncGenerator[Delta, None]]
):
    """`Client` for asyncio: the same methods, awaited; streams are async iterators."""

    def _connect(self, options: dict[str, Any]) -> None:
        self._http = httpx.AsyncClient(**options)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def embed(self, input: Input) -> Embeddings:
        attempts = self._attempts(EMBEDDINGS, embedding_payload(input), resumes=False)
        return embeddings_of(await self._until_answered(attempts))

    async def models(self) -> tuple[str, ...]:
        return texts_of(await self._get("/v1/models"), "id")

    async def tokenize(self, text: str) -> tuple[int, ...]:
        tokens = (await self._post("/tokenize", {**self._named, "prompt": text}))["tokens"]
        assert isinstance(tokens, list)
        return tuple(tokens)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return str((await self._post("/detokenize", {**self._named, "tokens": list(token_ids)}))["prompt"])

    async def warm(self, body: Mapping[str, object]) -> Mapping[str, object]:
        return await self._post("/v1/cache/warm", {**self._named, **body})

    async def ready(self) -> bool:
        try:
            return (await self._http.get("/ready")).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    async def metrics(self) -> str:
        with clear_errors(self.url):
            return checked(await self._http.get("/metrics")).text

    async def _get(self, path: str) -> Mapping[str, object]:
        with clear_errors(self.url):
            return object_of(checked(await self._http.get(path)))

    async def _post(self, path: str, payload: Mapping[str, object]) -> Mapping[str, object]:
        with clear_errors(self.url):
            return object_of(checked(await self._http.post(path, json=payload)))

    async def _ask(self, path: str, payload: Mapping[str, object]) -> Reply:
        return reply_of(await self._until_answered(self._attempts(path, payload)))

    async def _until_answered(self, attempts: Attempts) -> Mapping[str, object]:
        with clear_errors(self.url):
            while True:
                try:
                    response = await self._http.request(**attempts.next().options())
                    if not response.is_error:
                        return object_of(response)
                    pause = attempts.refused(response)
                except BREAKS as error:
                    pause = attempts.broke(error)
                await asyncio.sleep(pause)

    async def _stream(self, path: str, payload: Mapping[str, object]) -> AsyncGenerator[Delta, None]:
        attempts, parser = self._attempts(path, payload), Deltas()
        try:
            with clear_errors(self.url):
                while not parser.done:
                    try:
                        async with aclosing(self._read(attempts, parser)) as deltas:
                            async for delta in deltas:
                                yield delta
                        continue
                    except ErrorReply as refused:
                        pause = attempts.refused(refused.response)
                    except (*BREAKS, PeerLost) as error:
                        pause = attempts.broke(error)
                    await asyncio.sleep(pause)
        finally:
            if not parser.done and (ending := attempts.forget()) is not None:
                with suppress(httpx.HTTPError, RuntimeError):  # it ends by itself, later
                    await self._http.request(**ending.options())

    async def _read(self, attempts: Attempts, parser: Deltas) -> AsyncGenerator[Delta, None]:
        async with self._http.stream(**attempts.next().options()) as response:
            if response.is_error:
                await response.aread()
                raise ErrorReply(response)
            attempts.accepted()
            async for line in response.aiter_lines():
                attempts.heard(line)
                for delta in parser.read_line(line):
                    yield delta
            parser.check_ended()
