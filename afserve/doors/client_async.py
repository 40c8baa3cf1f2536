"""`AsyncClient`: the methods of `Client`, to await. Streams are asynchronous iterators; close one with `aclosing`.

Never imports torch.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
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


class AsyncClient:
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
        self.url = url.rstrip("/")
        self._resume, self._retries = resume, retries
        self._named = {} if model is None else {"model": model}
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers_of(api_key),
            timeout=timeout_of(timeout),
            params=self._named,
            transport=transport,
            verify=verify(self.url),
        )

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def complete(self, prompt: Prompt, params: SamplingParams | None = None) -> Reply:
        return reply_of(await self._ask(COMPLETIONS, completion_payload(prompt, params)))

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        unlimited: bool = False,
        extra: Extra = None,
    ) -> Reply:
        payload = chat_payload(messages, params, unlimited=unlimited, extra=extra)
        return reply_of(await self._ask(CHAT, payload))

    def complete_stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[Delta, None]:
        return self._stream(COMPLETIONS, completion_payload(prompt, params, stream=True))

    def chat_stream(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        unlimited: bool = False,
        extra: Extra = None,
    ) -> AsyncGenerator[Delta, None]:
        payload = chat_payload(messages, params, unlimited=unlimited, stream=True, extra=extra)
        return self._stream(CHAT, payload)

    async def embed(self, input: Input) -> Embeddings:
        payload = {**self._named, **embedding_payload(input)}
        attempts = Attempts(self.url, EMBEDDINGS, payload, 0.0, self._retries)
        return embeddings_of(await self._until_answered(attempts))

    async def models(self) -> tuple[str, ...]:
        return texts_of(await self._get("/v1/models"), "id")

    async def status(self) -> Mapping[str, object]:
        return await self._get("/status")

    async def scale(
        self,
        *,
        attention: Nodes = None,
        prefill: Nodes = None,
        decode: Nodes = None,
        experts: Nodes = None,
        gateways: Nodes = None,
    ) -> Mapping[str, object]:
        pools = scale_payload(
            attention=attention, prefill=prefill, decode=decode, experts=experts, gateways=gateways
        )
        return await self._post("/admin/scale", pools)

    async def drain(self, node: str) -> Mapping[str, object]:
        return await self._post("/admin/drain", {"node": node})

    async def restart(self, *nodes: str) -> Mapping[str, object]:
        return await self._post("/admin/restart", restart_payload(nodes))

    async def change_role(self, node: str, role: str) -> Mapping[str, object]:
        return await self._post("/admin/role", {"node": node, "role": role})

    async def change_phase(self, node: str, phase: str) -> Mapping[str, object]:
        return await self._post("/admin/phase", {"node": node, "phase": phase})

    async def down(self) -> Mapping[str, object]:
        return await self._post("/admin/down", {})

    async def fault(self, node: str, fault: str, seconds: float = 0.0) -> Mapping[str, object]:
        return await self._post("/admin/fault", {"node": node, "fault": fault, "seconds": seconds})

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

    async def _ask(self, path: str, payload: Mapping[str, object]) -> Mapping[str, object]:
        attempts = Attempts(self.url, path, {**self._named, **payload}, self._resume, self._retries)
        return await self._until_answered(attempts)

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
        attempts, parser = (
            Attempts(self.url, path, {**self._named, **payload}, self._resume, self._retries),
            Deltas(),
        )
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
                for delta in parser.feed(line):
                    yield delta
            parser.finish()
