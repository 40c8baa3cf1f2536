"""What gateways of a host agree on through their state: who has a batch, and what a key has used. No HTTP."""

import asyncio

import pytest

from afserve.clock import FakeClock
from afserve.server.access.key_file import Key, KeyLimits
from afserve.server.access.ledger import HELD_SECONDS as RUNS_SECONDS
from afserve.server.access.ledger import Ledger, RateLimitedError
from afserve.server.batches.files import FileStore
from afserve.server.batches.table import HELD_SECONDS, BatchTable
from afserve.server.state.database import Database


def of(database, clock, holder):
    return BatchTable(database, FileStore(database, clock, 1 << 20, 1000.0), clock, holder)


def test_a_batch_of_a_gateway_that_was_killed(tmp_path):
    async def check():
        clock = FakeClock()
        first, second = Database(str(tmp_path)), Database(str(tmp_path))
        one, two = of(first, clock, "one"), of(second, clock, "two")
        file = await one.files.put("me", "asked", "batch", b"a\nb\n")
        row = await one.create("me", "/v1/completions", file.id, 2, {})
        await one.answered(row.id, 0, b"first", fine=True)
        clock.advance(HELD_SECONDS - 1)
        assert await two.take() == []
        clock.advance(2)
        (taken,) = await two.take()
        assert (taken.id, taken.completed, taken.total) == (row.id, 1, 2)
        assert (await two.input(taken))[1] == {0}
        assert await two.hold(row.id) and not await one.hold(row.id)
        await one.answered(row.id, 0, b"another", fine=True)  # it was stopped only, and comes late
        await one.end(row.id, "completed")
        assert (await one.get("me", row.id)).status == "in_progress", "it is not its any more"
        await two.answered(row.id, 1, b"no", fine=False)
        assert await two.end(row.id, "completed") == ""
        done = await one.get("me", row.id)
        assert (done.status, done.completed, done.failed) == ("completed", 1, 1)
        assert await one.files.content("me", done.about["output_file_id"]) == b"first\n"
        assert await one.take() == []
        await first.close()
        await second.close()

    asyncio.run(check())


def test_answers_without_room_are_told(tmp_path):
    async def check():
        clock, database = FakeClock(), Database()
        table = BatchTable(database, FileStore(database, clock, 10, 1000.0), clock, "one")
        row = await table.create("me", "/v1/completions", "file-1", 1, {})
        await table.answered(row.id, 0, b"x" * 20, fine=True)
        assert "at most 10 are kept" in await table.end(row.id, "completed")
        assert (await table.get("me", row.id)).status == "completed"
        await database.close()

    asyncio.run(check())


def test_a_key_at_two_gateways():
    key = Key("k", "0" * 64, limits=KeyLimits(concurrent=2, tokens_per_minute=60))

    async def check():
        clock, database = FakeClock(), Database()

        def at(holder):
            return lambda here, spent=0: database.run(
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
        await database.run(lambda db: Ledger(db, "one", clock.now()).book(key, 0, 40))
        with pytest.raises(RateLimitedError, match="tokens_per_minute") as refused:
            await two(0)
        assert refused.value.retry_after == pytest.approx(31)
        clock.advance(31)
        assert (await two(0)).headers()["x-ratelimit-remaining-tokens"] == "1"
        await database.close()

    asyncio.run(check())
