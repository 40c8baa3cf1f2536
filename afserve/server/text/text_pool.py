"""Small bodies are prepared where they are, all others and every chat in a few limited processes, which this owns.

A process that takes too long or too much is ended and replaced; the request that did it is refused with the limit.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import afserve
from afserve.child import module
from afserve.errors import (
    AfserveError,
    CapacityError,
    CheckpointError,
    DeadlineError,
    OverloadedError,
    RequestError,
)
from afserve.server.bodies.prepared import Answer, Prepared, from_bytes
from afserve.server.http.settings import ServerSettings
from afserve.server.text.kinds import TRANSLATED, TURNS, BodyKind
from afserve.server.text.preparers import Preparers
from afserve.server.text.prompt_tokens import Elsewhere, TextModel
from afserve.server.text.text_process import LENGTH, MEMORY_EXIT, QUESTION

log = logging.getLogger("afserve.server")
# Measured: a body of so many bytes takes at most 9 ms of the event loop (random text), a process at least 0.3 ms.
INLINE_BYTES = 8192
TEMPLATED = {BodyKind.CHAT, BodyKind.NEXT_TURN, *TRANSLATED}
AHEAD_BYTES = 1 << 20  # a longer body is not kept for its next turn
# Wall time for one second of CPU time: a machine may be busy, or stopped for a while.
PATIENCE, SLACK_SECONDS = 6, 20.0
_PIPE_BYTES = 1 << 20
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "PYTHONPATH")


class TextPool:
    """Prepares bodies. Processes start when they are first needed; `check()` starts one ahead; `close()` ends them."""

    def __init__(self, preparers: Preparers, models: Sequence[TextModel], settings: ServerSettings) -> None:
        self._preparers = preparers
        self._models = models
        self._settings = settings
        self._places = asyncio.Semaphore(settings.text_processes)
        self._idle: list[_TextProcess] = []
        self._busy: set[_TextProcess] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._waiting = 0

    async def prepare(self, kind: BodyKind, body: bytes) -> Answer:
        """Raises what `Preparers.prepare` raises, and RequestError where it needs more time or memory than it may. With
        --warm-ahead a chat's body stays with it."""
        if len(body) <= INLINE_BYTES and kind not in TEMPLATED:
            try:
                return self._preparers.prepare(kind, body)
            except Elsewhere:
                pass  # the process has template and grammars
        answer = await self._elsewhere(kind, body)
        stays = self._settings.warm_ahead and kind in TURNS and len(body) <= AHEAD_BYTES
        return replace(answer, body=body, kind=kind) if stays and isinstance(answer, Prepared) else answer

    @property
    def idle(self) -> bool:
        """Whether a body would be prepared at once."""
        return not self._places.locked()

    async def start_ahead(self) -> None:
        """Starts a process. Raises CheckpointError where a model's chat template cannot be used."""
        async with self._places:
            try:
                self._idle.append(await self._started())
            except RequestError as error:
                limit = error.message.partition(" took ")[2].partition(";")[0]
                folders = " or ".join(model.folder for model in self._models)
                raise CheckpointError(
                    f"{folders}: chat template: a message of one letter takes {limit}; mend or remove the template"
                ) from error

    async def end_processes(self) -> None:
        for process in [*self._idle, *self._busy]:
            self._end(process)
        await asyncio.gather(*self._ending)

    async def _elsewhere(self, kind: BodyKind, body: bytes) -> Answer:
        if self._places.locked() and self._waiting >= self._settings.text_waiting:
            raise OverloadedError(f"{self._waiting} requests wait to be tokenized; send this one again later")
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        try:
            return await self._ask(kind, body)
        finally:
            self._places.release()

    async def _ask(self, kind: BodyKind, body: bytes) -> Answer:
        """A process that somebody ends from outside is not the request's fault: another one is asked, once."""
        try:
            return await self._ask_one(kind, body)
        except _EndedFromOutside:
            return await self._ask_one(kind, body, anew=True)

    async def _ask_one(self, kind: BodyKind, body: bytes, *, anew: bool = False) -> Answer:
        process = None if anew else self._live()
        if process is None:
            process = await self._started()
        self._busy.add(process)
        data = b""
        try:
            data = await process.ask_process(kind, body)
        finally:
            self._busy.discard(process)
            if data:
                self._idle.append(process)
            else:
                self._end(process)
        return from_bytes(data)

    def _live(self) -> "_TextProcess | None":
        """One that waits for something to do, and has not ended over it."""
        while self._idle:
            process = self._idle.pop()
            if process.lives:
                return process
            self._end(process)
        return None

    async def _started(self) -> "_TextProcess":
        process = _TextProcess(self._settings)
        try:
            await process.spawn(self._models)
        except BaseException:
            self._end(process)
            raise
        return process

    def _end(self, process: "_TextProcess") -> None:
        task = asyncio.create_task(process.end_process())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


class _EndedFromOutside(CapacityError):
    """By a signal that none of its own limits sends."""


class _TextProcess:
    """One process and its two pipes. One question at a time."""

    def __init__(self, settings: ServerSettings) -> None:
        self._seconds = settings.text_seconds
        self._mib = settings.text_mib
        self._process: Process | None = None

    async def spawn(self, models: Sequence[TextModel]) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *module("afserve.server.text.text_process"), str(os.getpid()),
            stdin=PIPE, stdout=PIPE, limit=_PIPE_BYTES, start_new_session=True, env=_environment(),
        )  # fmt: skip
        setup = {"models": [asdict(model) for model in models], "seconds": self._seconds, "mib": self._mib}
        from_bytes(await self.ask_process(0, json.dumps(setup).encode()))

    @property
    def lives(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def ask_process(self, kind: int, body: bytes) -> bytes:
        """The answer's bytes. Raises RequestError where the process ended over them, with the reason."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(self._seconds * PATIENCE + SLACK_SECONDS):
                process.stdin.writelines((QUESTION.pack(kind, len(body)), body))
                await process.stdin.drain()
                (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                return await process.stdout.readexactly(size)
        except TimeoutError as error:
            raise DeadlineError("preparing this request took too long; send it again later") from error
        except (asyncio.IncompleteReadError, ConnectionError):
            raise self._ended(await process.wait()) from None

    def _ended(self, code: int) -> AfserveError:
        if code == -signal.SIGPROF:
            return RequestError(
                f"preparing this request (template, tokens) took more than {self._seconds:g} s of CPU time, the "
                "limit of --text-seconds; send a shorter one"
            )
        if code in (MEMORY_EXIT, -signal.SIGABRT, -signal.SIGSEGV):
            return RequestError(
                f"preparing this request (template, tokens) took more than {self._mib} MiB of memory, the limit of "
                "--text-mib; send a shorter one"
            )
        log.error("a text process ended with exit code %d", code)
        kind = CapacityError if code >= 0 else _EndedFromOutside
        return kind("the process that prepares requests has ended; send this one again")

    async def end_process(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def _environment() -> dict[str, str]:
    """Little of the shell's; this same package, and no threads beside the one that is limited."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    root = str(Path(afserve.__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, kept.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
