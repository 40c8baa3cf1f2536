"""Prefill and decode nodes as processes: prompts are handed over, and no client sees who computed what, or was lost."""

import asyncio
from itertools import product

import pytest

from afserve.comm.kv.carriers.table import CARRIERS, lacking
from afserve.control.membership.events import ChangePhase
from afserve.member import AttentionPhase, attention_node
from tests.e2e.test_lost_attention import Stream, homes, kill, serving, until

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("warm_fork_servers")]
LONG = {"prompt": "import os\nimport sys\n" * 150, "max_tokens": 30}
OTHER = {"prompt": "class Tree:\n    pass\n" * 100, "max_tokens": 30, "temperature": 0.9, "seed": 7}


def stats(run, index):
    return run.controller.members.last_at(attention_node(index)).stats


def ready(run):
    return len(run._gateway._attendance.usable()) == 3


@pytest.mark.parametrize("over", ["sockets", "dist"])
def test_prompts_are_handed_over_and_either_side_may_be_lost(over):
    if over in CARRIERS and (why := lacking(over)):
        pytest.skip(f"{over}: {why}")

    async def scenario():
        async with serving(attention=None, prefill=1, decode=2, over=over) as (run, client):
            asked = [LONG, OTHER]
            await until(lambda: ready(run))
            streams = [Stream(client, one) for one in asked]
            await asyncio.gather(*(stream.read() for stream in streams))
            first = [stream.answer() for stream in streams]
            await until(lambda: stats(run, 1).kv.handed + stats(run, 2).kv.handed >= 2)
            assert not stats(run, 0).generated_tokens - stats(run, 0).kv.prompts, (
                "it has drawn nothing itself"
            )

            again = {**LONG, "prompt": "x = 1\n" + LONG["prompt"]}
            stream = Stream(client, again)
            reading = asyncio.create_task(stream.read())
            await until(lambda: homes(run))
            kill(run, 0)
            await reading
            await until(lambda: ready(run))
            run.controller.obey(ChangePhase(attention_node(1), AttentionPhase.BOTH))
            other = Stream(client, again)
            reading = asyncio.create_task(other.read())
            await until(lambda: homes(run))
            kill(run, next(iter(homes(run))))
            await reading
            assert stream.answer() == other.answer()
            await until(lambda: ready(run))
            repeated = [await Stream(client, one).read() for one in asked]
            assert [one.answer() for one in repeated] == first

    asyncio.run(scenario())


async def answers_over(name):
    """Of prompts that were handed over so, with the bytes that went."""
    async with serving(attention=None, prefill=1, decode=1, over=name) as (run, client):
        await until(lambda: len(run._gateway._attendance.usable()) == 2)
        streams = [await Stream(client, asked).read() for asked in (LONG, OTHER)]
        await until(lambda: stats(run, 1).kv.handed == 2)
        moved = stats(run, 1).kv
        assert not moved.handed_short and not moved.recomputed_tokens
        return [stream.answer() for stream in streams], moved.bytes_received


@pytest.mark.parametrize("name", CARRIERS)
def test_a_library_may_carry_what_is_handed_over(name):
    if why := lacking(name):
        pytest.skip(f"{name}: {why}")
    assert asyncio.run(answers_over(name)) == asyncio.run(answers_over("sockets"))


ALONE = {"ttft": None, "cache_salt": "computed by one node"}


def numbered(number, **fields):
    """Prompts of one length, no two of which have a block in common."""
    return {"prompt": f"# {number:05}\n" + "import os\nimport sys\n" * 250, "max_tokens": 12, **fields}


def split(run):
    return sum(stats(run, index).kv.split for index in (0, 1))


async def split_one(run, client, number):
    """(stream, what was asked, seconds until all of it was there): asks for the first token sooner than one node has
    it, until a prompt is split."""

    async def alone():
        began = asyncio.get_running_loop().time()
        await Stream(client, numbered(number, max_tokens=1, cache_salt=f"{number}")).read()
        return asyncio.get_running_loop().time() - began

    await alone()  # how fast prefill nodes are is told with the first prompts
    seconds = 0.0
    for attempt in range(40):
        number += 1
        if attempt % 5 == 0:  # other work on the machine makes them slower and faster
            seconds = await alone()
            number += 1
        before, wanted = split(run), seconds * (0.95 - 0.1 * (attempt % 5))
        asked = numbered(number, ttft=wanted)
        began = asyncio.get_running_loop().time()
        stream = await Stream(client, asked).read()
        took = asyncio.get_running_loop().time() - began
        await asyncio.sleep(0.6)  # a heartbeat tells
        if split(run) > before:
            return stream, asked, took
    raise AssertionError(f"of 40 prompts, which take {seconds:.2f} s, none was split")


@pytest.mark.alone
@pytest.mark.parametrize("shares", [(0.5,), pytest.param((0.3, 0.7), marks=pytest.mark.long)], ids=str)
def test_a_long_prompt_is_split_over_two_prefill_nodes_and_either_may_be_killed(shares):
    """`shares` of the time that such a prompt takes have passed then."""

    async def scenario():
        async with serving(attention=None, prefill=2, decode=1, experts=2) as (run, client):
            await until(lambda: ready(run))
            stream, asked, took = await split_one(run, client, 0)
            whole = await Stream(client, {**asked, **ALONE}).read()
            assert stream.answer() == whole.answer()
            kv = [stats(run, index).kv for index in (0, 1)]
            assert sum(one.split_short for one in kv) == 0
            assert sum(one.parts for one in kv) == split(run)
            assert all(one.bytes_sent and one.bytes_received for one in kv)
            for attempt, (index, share) in enumerate(product((0, 1), shares)):
                again = {**asked, "prompt": numbered(100 + attempt)["prompt"]}
                stream = Stream(client, again)
                reading = asyncio.create_task(stream.read())
                await asyncio.sleep(share * took)
                kill(run, index)
                await reading
                await until(lambda: ready(run))
                whole = await Stream(client, {**again, **ALONE}).read()
                assert stream.answer() == whole.answer()

    asyncio.run(scenario())
