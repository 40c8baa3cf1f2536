"""The batches that this gateway works on: which they are, how their lines are asked, and how each ends.

A line passes through its endpoint as a client's request would, and through the limits of the key that asked.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from afserve.clock import WallClock
from afserve.errors import AfserveError, AuthError, CapacityError
from afserve.server.access.accounts import STATE, Account
from afserve.server.access.ledger import RateLimitedError
from afserve.server.batches.batch import LONGEST_PAUSE, BatchEnded, numbered, patiently_told, run
from afserve.server.batches.files import FileStore
from afserve.server.batches.table import CANCELLING, HELD_SECONDS, BatchRow, BatchTable
from afserve.server.endpoints.service import Service
from afserve.server.replies.refusal import internal_error, refusal, told

LOOK_SECONDS = HELD_SECONDS / 15  # between two looks at what this gateway holds, and what nobody does
AT_ONCE = 8  # batches whose lines are in memory; the others wait for their turn
SHORTEST_WAIT = 0.05  # seconds, for a key's limit
log = logging.getLogger("afserve.server")


@dataclass(frozen=True, slots=True)
class BatchEnd:
    status: str
    why: str = ""


class Worker:
    """`endpoints` are those that a batch may name. With a state that gateways share, a batch outlives this one."""

    def __init__(self, service: Service, files: FileStore, endpoints: Mapping[str, ASGIApp]) -> None:
        self._service, self._endpoints = service, endpoints
        holder = f"{os.getpid()}-{secrets.token_hex(8)}"
        self.table = BatchTable(service.database, WallClock(), files, holder)
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._leaving = False
        self._stored = 0  # bytes of the answers of what runs here
        self._most_stored = files.most_bytes

    async def start_watching(self) -> None:
        """Where gateways share a state: go on with what nobody holds, and with what this one holds."""
        if self._service.database.shared:
            self._watching = asyncio.create_task(self._watch())

    async def stop_working(self) -> None:
        """What runs is cancelled, or left to another gateway or the next life of this one."""
        self._leaving = self._service.database.shared
        tasks = [*self._running.values(), *filter(None, [self._watching])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def begin_batch(self, row: BatchRow) -> None:
        self._running[row.id] = asyncio.create_task(self._run(row))

    async def cancel_batch(self, batch_id: str) -> None:
        """Returns once it has ended, where it runs here."""
        task = self._running.get(batch_id)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
            except CapacityError as error:
                log.warning("batches: %s", error.message)
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> None:
        for batch_id, task in list(self._running.items()):
            if not await self.table.hold(batch_id):
                task.cancel()
        if any(model.backend.ready() for model in self._service.models):
            for row in await self.table.claim_unheld():
                log.warning(
                    "%s goes on here, with %d of %d lines", row.id, row.completed + row.failed, row.total
                )
                self.begin_batch(row)

    async def _run(self, row: BatchRow) -> None:
        try:
            ending = asyncio.create_task(self._end(row, await self._work(row)))
            while not ending.done():  # whoever cancels it again does not keep its end from being told
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({ending})
            ending.result()
        finally:
            self._running.pop(row.id, None)

    async def _work(self, row: BatchRow) -> BatchEnd:
        try:
            if row.status == CANCELLING:
                return BatchEnd("cancelled")
            async with self._turns:
                await self._answer(row)
            return BatchEnd("completed")
        except asyncio.CancelledError:
            return BatchEnd("cancelled")
        except BatchEnded as ended:
            log.warning("%s: %s", row.id, ended.why)
            return BatchEnd(ended.status, ended.why)
        except AfserveError as error:
            log.warning("%s: ended early: %s", row.id, error.message)
            return BatchEnd("failed", told(error))
        except Exception:  # its own file says what was answered, the log why not more was
            log.exception("%s: ended early", row.id)
            return BatchEnd("failed", "afserve failed on this batch; its log has the reason")

    async def _end(self, row: BatchRow, end: BatchEnd) -> None:
        try:
            if end.status == "cancelled" and self._leaving and not end.why:
                await self.table.release_batch(row.id)
            elif lost := await self.table.end_batch(row.id, end.status, end.why):
                log.warning("a file of a batch is lost: %s", lost)
        except CapacityError as error:
            log.warning("%s: its end is told when the state can be written: %s", row.id, error.message)

    async def _answer(self, row: BatchRow) -> None:
        data, done, stored = await self.table.input(row)
        lines = numbered(data, done)
        del data  # its lines are enough

        async def ask(endpoint: str, body: bytes) -> tuple[int, bytes]:
            return await self._ask(endpoint, body, row)

        async def tell(number: int, status: int, said: bytes) -> None:
            nonlocal stored
            if self._stored + len(said) > self._most_stored:
                raise BatchEnded(
                    "failed",
                    f"the answers of batches that run hold {self._stored} bytes, at most {self._most_stored} are kept "
                    "(--max-file-bytes); send it in parts",
                )
            stored += len(said)
            self._stored += len(said)
            await patiently_told(
                lambda: self.table.keep_answer(row.id, number, said, fine=status == 200), number
            )

        self._stored += stored
        try:
            await run(row.endpoint, lines, ask, tell)
        finally:
            self._stored -= stored

    async def _ask(self, endpoint: str, body: bytes, row: BatchRow) -> tuple[int, bytes]:
        """One line once its key may have one more; waiting for that is no try."""
        while True:
            try:
                account = self._service.accounts.account_named(row.owner)
            except AuthError as error:
                raise BatchEnded("cancelled", error.message) from error
            try:
                async with self._service.accounts.one_more(account):
                    return await self._through(endpoint, body, account)
            except RateLimitedError as error:
                await asyncio.sleep(min(max(error.retry_after, SHORTEST_WAIT), LONGEST_PAUSE))
            except AfserveError as error:
                return _refused(error, endpoint)

    async def _through(self, endpoint: str, body: bytes, account: Account) -> tuple[int, bytes]:
        """One line through the endpoint, as a client would ask it; a refusal is an answer too, and so is a bug."""
        said = _Said()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": endpoint,
            "headers": headers,
            "state": {STATE: account},
        }
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await asyncio.get_running_loop().create_future()  # a client that never leaves
            raise AssertionError("nobody sets it")

        try:
            await self._endpoints[endpoint](scope, receive, said.hear_message)
        except AfserveError as error:
            return _refused(error, endpoint)
        except Exception:
            log.exception("%s: a bug in a line of a batch, see below", endpoint)
            return 500, json.dumps(internal_error()).encode()
        return said.status, b"".join(said.parts)


def _refused(error: AfserveError, endpoint: str) -> tuple[int, bytes]:
    reply = refusal(error, endpoint)
    return reply.status_code, bytes(reply.body)


class _Said:
    def __init__(self) -> None:
        self.status = 500
        self.parts: list[bytes] = []

    async def hear_message(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.parts.append(message.get("body", b""))
