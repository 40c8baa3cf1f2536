"""Work off the event loop: its result, its exception, and a deadline that frees the one who waits."""

import asyncio
import threading

import pytest

from afserve.errors import DeadlineError, RequestError
from afserve.server.text_worker import TextWorker


def refuse() -> None:
    raise RequestError("no")


def test_results_and_errors_come_back():
    async def use() -> None:
        worker = TextWorker()
        assert await asyncio.gather(*(worker.run(lambda i=i: i * i) for i in range(20))) == [
            i * i for i in range(20)
        ]
        with pytest.raises(RequestError):
            await worker.run(refuse)
        assert await worker.run(lambda: threading.current_thread().daemon)
        worker.stop()

    asyncio.run(use())


def test_a_hanging_job_costs_only_its_caller():
    release = threading.Event()

    async def use() -> None:
        worker = TextWorker(threads=2, deadline=0.05)
        with pytest.raises(DeadlineError, match=r"0\.05 s"):
            await worker.run(release.wait)
        assert await worker.run(lambda: 5) == 5
        release.set()
        worker.stop()

    asyncio.run(use())


def test_threads_end():
    async def use() -> None:
        before = set(threading.enumerate())
        worker = TextWorker(threads=3)
        await worker.run(lambda: None)
        mine = set(threading.enumerate()) - before
        assert len(mine) == 3
        worker.stop()
        for thread in mine:
            thread.join(20)
            assert not thread.is_alive()

    asyncio.run(use())
