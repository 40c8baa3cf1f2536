"""What gateways of a host agree on through their state: who has a batch, and what a key has used. No HTTP."""

import asyncio
from types import SimpleNamespace

import pytest

from afserve.clock import FakeClock
from afserve.server.access.accounts import Accounts
from afserve.server.access.key_file import Key, KeyLimits
from afserve.server.access.keyring import Keyring
from afserve.server.access.ledger import HELD_SECONDS as RUNS_SECONDS
from afserve.server.access.ledger import Ledger, RateLimitedError
from afserve.server.batches.files import FILE_BYTES, FileStore
from afserve.server.batches.table import HELD_SECONDS, BatchTable
from afserve.server.batches.work import AT_ONCE, Worker
from afserve.server.state.database import Database


def of(database, clock, holder):
    return BatchTable(database, clock, FileStore(database, clock, 1 << 20, 1000.0), holder)


def test_a_batch_of_a_gateway_that_was_killed(tmp_path):
    async def check():
        clock = FakeClock()
        first, second = Database(str(tmp_path)), Database(str(tmp_path))
        one, two = of(first, clock, "one"), of(second, clock, "two")
        file = await one.files.put_file("me", "asked", "batch", b"a\nb\n")
        row = await one.create("me", "/v1/completions", file.id, 2, {})
        await one.keep_answer(row.id, 0, b"first", fine=True)
        clock.advance(HELD_SECONDS - 1)
        assert await two.claim_unheld() == []
        clock.advance(2)
        (taken,) = await two.claim_unheld()
        assert (taken.id, taken.completed, taken.total) == (row.id, 1, 2)
        assert (await two.input(taken))[1] == {0}
        assert await two.hold(row.id) and not await one.hold(row.id)
        await one.keep_answer(row.id, 0, b"another", fine=True)  # it was stopped only, and comes late
        await one.end_batch(row.id, "completed")
        assert (await one.get_batch("me", row.id)).status == "in_progress", "it is not its any more"
        await two.keep_answer(row.id, 1, b"no", fine=False)
        assert await two.end_batch(row.id, "completed") == ""
        done = await one.get_batch("me", row.id)
        assert (done.status, done.completed, done.failed) == ("completed", 1, 1)
        assert await one.files.content("me", done.about["output_file_id"]) == b"first\n"
        assert await one.claim_unheld() == []
        await first.close_file()
        await second.close_file()

    asyncio.run(check())


def test_answers_without_room_are_told(tmp_path):
    async def check():
        clock, database = FakeClock(), Database()
        table = BatchTable(database, clock, FileStore(database, clock, 10 + FILE_BYTES, 1000.0), "one")
        row = await table.create("me", "/v1/completions", "file-1", 2, {})
        await table.keep_answer(row.id, 0, b"x" * 20, fine=True)
        await table.keep_answer(row.id, 1, b"no", fine=False)
        assert "at most 1034 are kept" in await table.end_batch(row.id, "completed")
        done = (await table.get_batch("me", row.id)).as_json()
        assert done["status"] == "failed" and done["errors"]["data"][0]["code"] == "no_room"
        assert await table.files.content("me", done["error_file_id"]) == b"no\n", (
            "the second file is tried too"
        )
        left = await database.transact(
            lambda db: db.execute("SELECT said FROM answers ORDER BY line").fetchall()
        )
        assert left == [(b"x" * 20,), (b"",)], "only what a file has is blanked"
        await database.close_file()

    asyncio.run(check())


def test_a_key_at_two_gateways():
    key = Key("k", "0" * 64, limits=KeyLimits(concurrent=2, tokens_per_minute=60))

    async def check():
        clock, database = FakeClock(), Database()

        def at(holder):
            return lambda here, spent=0: database.transact(
                lambda db: Ledger(db, holder, clock.now()).enter(key, here, spent)
            )

        one, two = at("one"), at("two")
        await one(0)
        await two(0)
        with pytest.raises(RateLimitedError, match="concurrent: 2 requests"):
            await one(1)
        clock.advance(RUNS_SECONDS + 1)  # the other gateway was killed: what it said to run counts no more
        standing = await one(1, spent=50)
        assert standing.tokens.remaining == 10
        await database.transact(lambda db: Ledger(db, "one", clock.now()).book(key, 0, 40))
        with pytest.raises(RateLimitedError, match="tokens_per_minute") as refused:
            await two(0)
        assert refused.value.retry_after == pytest.approx(31)
        clock.advance(31)
        assert (await two(0)).headers()["x-ratelimit-remaining-tokens"] == "1"
        await database.close_file()

    asyncio.run(check())


def test_who_is_refused_does_not_stay_counted():
    """One that ends while another is on its way in books both as running; the refusal takes the second one back."""
    key = Key("k", "0" * 64, limits=KeyLimits(concurrent=1))

    async def check():
        database = Database()
        accounts = Accounts(Keyring(), database, FakeClock())
        account = accounts.account_for(key)
        first = accounts.one_more(account)
        await first.__aenter__()
        second = asyncio.create_task(accounts.one_more(account).__aenter__())
        await asyncio.sleep(0)  # it counts here, and its transaction is queued
        await first.__aexit__(None, None, None)
        with pytest.raises(RateLimitedError):
            await second
        assert await database.transact(lambda db: db.execute("SELECT * FROM running").fetchall()) == []
        await accounts.stop_telling()
        await database.close_file()

    asyncio.run(check())


def test_the_end_of_a_batch_that_is_cancelled_twice_is_told():
    async def check():
        database = Database()
        service = SimpleNamespace(database=database)
        worker = Worker(service, FileStore(database, FakeClock(), 1 << 20, 1000.0), {})
        worker._answer = lambda row: asyncio.get_running_loop().create_future()
        ids = [
            (await worker.table.create("", "/v1/completions", "file", 1, {})).id for _ in range(AT_ONCE + 1)
        ]
        for batch_id in ids:
            worker.begin_batch(await worker.table.get_batch("", batch_id))
        await asyncio.sleep(0)
        for batch_id in ids:
            await worker.table.ask_to_cancel("", batch_id)
            task = worker._running[batch_id]
            ended = asyncio.create_task(worker.cancel_batch(batch_id))
            while not task.done():
                task.cancel()
                await asyncio.sleep(0)
            await ended
            assert (await worker.table.get_batch("", batch_id)).status == "cancelled"
        assert not worker._running
        await database.close_file()

    asyncio.run(check())
