"""Tokenization and templates off the event loop, with a deadline. Knows neither text nor requests.

The threads are daemons: a template that never returns costs its caller a refusal, not the server its exit.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from afserve.errors import DeadlineError

T = TypeVar("T")


class TextWorker:
    """`start()` begins its threads, `stop()` ends them once they are idle."""

    def __init__(self, threads: int = 2, deadline: float = 30.0) -> None:
        self._deadline = deadline
        self._threads = threads
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._started = False

    def start(self) -> None:
        if self._started:
            return
        self._started = True
        for i in range(self._threads):
            threading.Thread(target=self._serve, name=f"text-{i}", daemon=True).start()

    def stop(self) -> None:
        if self._started:
            self._started = False
            for _ in range(self._threads):
                self._jobs.put(None)

    async def run(self, work: Callable[[], T]) -> T:
        """`work()` on a thread. Raises what it raises, or DeadlineError when it takes too long."""
        self.start()
        done: Future[T] = Future()
        self._jobs.put(lambda: _do(work, done))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(done), self._deadline)
        except TimeoutError as error:
            raise DeadlineError(
                f"the prompt was not tokenized within {self._deadline:g} s; send a shorter one or try again later"
            ) from error

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _do(work: Callable[[], T], done: "Future[T]") -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - carried to the waiting request, whatever it is
        done.set_exception(error)
    else:
        done.set_result(result)
