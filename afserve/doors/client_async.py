"""`AsyncClient`: the methods of `Client`, to await. Streams are asynchronous iterators; close one with `aclosing`.

Never imports torch.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

import httpx

from afserve.doors.client_http import (
    BREAKS,
    DEFAULT_URL,
    EMBEDDINGS,
    RESUME_SECONDS,
    RETRIES,
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
    embedding_payload,
    embeddings_of,
    reply_of,
    texts_of,
)
from afserve.errors import PeerLost


class AsyncClient(
    Calls[Coroutine[Any, Any, Mapping[str, object]], Coroutine[Any, Any, Reply], AsyncGenerator[Delta, None]]
):
    """`Client` for asyncio: the same methods, awaited; streams are async iterators."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        resume: float = RESUME_SECONDS,
        retries: int = RETRIES,
        model: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(url, resume, retries, model)
        self._http = httpx.AsyncClient(**self._options(api_key, timeout), transport=transport)

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
