"""The bundled model behind the HTTP server, in one thread and process: a real engine, and cheap."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

from afserve.config import EngineConfig, ModelSource
from afserve.control.backend import CacheKept, ServedModel
from afserve.control.node.kept_cache import answer_of
from afserve.control.requests import Taker
from afserve.control.wire.cache_values import AskCache
from afserve.control.wire.keeping import Keep
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import GenerationRequest, TokenEvent
from afserve.errors import OverloadedError

FOLDER = Path("configs/nano")
VOCABULARY = 2048


class NanoBackend:
    """A colocated node that is stepped by whoever waits for its tokens."""

    def __init__(self, dtype: str = "auto", folder: Path = FOLDER, **config: object) -> None:
        sizes = {"max_model_len": 1024, "kv_blocks": 256, "block_size": 16, "max_batch_tokens": 128, **config}
        self.model = ServedModel("nano", str(folder.resolve()), 1024, VOCABULARY, 1_700_000_000)
        self.node = colocated(ModelSource(str(folder), "nano", dtype=dtype), EngineConfig(**sizes))
        self._queues: dict[int, asyncio.Queue[TokenEvent]] = {}
        self._next = 0

    def ready(self) -> bool:
        return True

    async def kept_cache(self, owner: str | None, *, unpin: bool, prompt=(), salt="") -> CacheKept:
        asked = AskCache(0, owner or "", owner is None, unpin, tuple(prompt), salt)
        told = answer_of(self.node, asked)
        return CacheKept((("attention-0", told),), complete=True)

    def admit(self, prompts, wanted) -> None:
        """Never too busy."""

    def draw_counts(self, name, values) -> None:
        """Nothing is drawn."""

    def check(self) -> None:
        pass

    def open(
        self, request: GenerationRequest, keep: Keep | None = None, taker: Taker | None = None
    ) -> "NanoSequence":
        """It keeps no request without a connection. Whoever reads it runs the engine, so nobody is asked to take
        anything."""
        if keep is not None:
            raise OverloadedError("resume: nothing is kept here")
        return NanoSequence(self, request)

    async def events_of(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        self._next += 1
        handle, queue = self._next, asyncio.Queue()
        self._queues[handle] = queue
        self.node.submit(replace(request, handle=handle))
        try:
            while True:
                while queue.empty():
                    for event in self.node.step():
                        if event.handle in self._queues:
                            self._queues[event.handle].put_nowait(event)
                    await asyncio.sleep(0)
                event = queue.get_nowait()
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            del self._queues[handle]
            self.node.cancel(handle)


class NanoSequence:
    def __init__(self, backend: NanoBackend, request: GenerationRequest) -> None:
        self._backend, self._request = backend, request

    def events(self) -> AsyncGenerator[TokenEvent, None]:
        return self._backend.events_of(self._request)
