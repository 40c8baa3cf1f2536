"""KV goes along with a request that moves, and is there already where copies are kept: usage counts what was cached."""

import asyncio

import pytest

from afserve.control.membership.events import DrainNode
from afserve.member import Role, attention_node
from tests.e2e.test_lost_attention import Stream, both_there, homes, kill, serving, until

pytestmark = [pytest.mark.process, pytest.mark.alone, pytest.mark.usefixtures("warm_fork_servers")]
LONG = {"prompt": "import os\nimport sys\n" * 150, "max_tokens": 300}
SHORT = {"prompt": "class Tree:\n", "max_tokens": 200, "temperature": 0.9, "seed": 7}


def cached(stream):
    return stream.usage["prompt_tokens_details"]["cached_tokens"]


def kv_of(run):
    """What each attention node last said."""
    found = (run.controller.members.last_at(attention_node(index)) for index in (0, 1))
    return [member.stats.kv for member in found]


def test_a_drained_node_hands_its_kv_over_and_goes():
    async def scenario():
        async with serving() as (run, client):
            streams = [Stream(client, asked) for asked in (LONG, SHORT, {**LONG, "prompt": "x = 1\n" * 300})]
            reading = [asyncio.create_task(stream.read()) for stream in streams]
            await until(lambda: all(stream.pieces > 20 for stream in streams))
            assert homes(run).keys() == {0, 1}
            leaver = next(life.index for life in run._gateway.requests.homes())
            run.controller.obey(DrainNode(attention_node(leaver)))
            await asyncio.gather(*reading)
            await until(lambda: len(run.controller.members.places(Role.ATTENTION)) == 1)
            moved = [stream for stream in streams if cached(stream)]
            assert all(cached(stream) > 0.9 * stream.usage["prompt_tokens"] for stream in moved) and moved
            stayed = run.controller.members.last_at(attention_node(1 - leaver))
            await until(lambda: stayed.stats.kv.pulls == len(moved))
            assert stayed.stats.kv.bytes_received and not stayed.stats.kv.pulls_failed
            for stream in streams:
                again = await Stream(client, stream.asked).read()
                assert stream.answer() == again.answer()

    asyncio.run(scenario())


def test_where_copies_are_kept_a_killed_node_costs_no_recomputation():
    async def scenario():
        async with serving(copies=1) as (run, client):
            await both_there(run)
            asked = {**LONG, "max_tokens": 2500}  # so that copies are reported before it ends
            stream = Stream(client, asked)
            reading = asyncio.create_task(stream.read())
            await until(lambda: stream.pieces > 20)
            (home,) = homes(run)
            await until(lambda: kv_of(run)[home].copied_blocks >= 901 // 16)
            assert not stream.done
            said = len(stream.texts[0])
            kill(run, home)
            await reading
            assert stream.reasons == {0: "length"} and stream.usage["completion_tokens"] == 2500
            assert cached(stream) > 0.95 * stream.usage["prompt_tokens"]
            await until(lambda: kv_of(run)[1 - home].copy_hits >= 901 // 16)
            metrics = (await client.get("/metrics")).text
            assert "afserve_kv_copy_hits_total" in metrics and "afserve_kv_bytes_total" in metrics
            beyond = said + 300  # characters
            again = await Stream(client, asked).read(beyond)
            assert stream.texts[0][:beyond] == again.texts[0][:beyond]

    asyncio.run(scenario())


HISTORY = "".join(f"def f{number}(x):\n    return x + {number}\n\n" for number in range(40))


def asked_after(answer, number):
    return {"prompt": f"{HISTORY}{answer}\n# Question {number}\n", "max_tokens": 64}


async def found_at_peers(client):
    """Prompt tokens of all nodes, as /metrics counts them."""
    lines = (await client.get("/metrics")).text.splitlines()
    counts = [one for one in lines if one.startswith("afserve_kv_hit_tokens_total{") and 'tier="peer"' in one]
    assert counts
    return sum(float(one.split()[-1]) for one in counts)


def test_a_conversation_that_many_go_on_with_is_pulled_by_the_other_node():
    """The home of the first turn is too busy for all that follow; whoever goes elsewhere brings its KV along."""

    async def scenario():
        async with serving() as (run, client):
            await both_there(run)
            first = await Stream(client, {"prompt": HISTORY, "max_tokens": 32}).read()
            assert not await found_at_peers(client)
            turns = [Stream(client, asked_after(first.texts[0], number)) for number in range(24)]
            reading = [asyncio.create_task(turn.read()) for turn in turns]
            await until(lambda: homes(run).keys() == {0, 1})
            await asyncio.gather(*reading)
            await until(lambda: sum(kv.pulls for kv in kv_of(run)) > 0)
            while not await found_at_peers(client):
                await asyncio.sleep(0.05)
            for turn in turns[-2:]:
                again = await Stream(client, turn.asked).read()
                assert turn.answer() == again.answer()

    asyncio.run(scenario())
