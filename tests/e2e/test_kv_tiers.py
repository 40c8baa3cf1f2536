"""A killed node finds in its next life what it had on its disk; what left a cache is found in host memory. The tokens
are the same."""

import asyncio

import pytest

from afserve.member import attention_node
from tests.e2e.test_lost_attention import Stream, kill, serving, until

pytestmark = pytest.mark.process
LONG = {"prompt": "import os\nimport sys\n" * 150, "max_tokens": 40}


def test_a_killed_node_finds_its_disk_again(tmp_path):
    async def scenario():
        async with serving(attention=1, disk=str(tmp_path)) as (run, client):

            def stats():
                member = run.controller.members.last_at(attention_node(0))
                return member.stats if member is not None else None

            first = await Stream(client, LONG).read()
            await until(lambda: stats().tiers.blocks >= 901 // 16)
            kill(run, 0)
            again = await Stream(client, LONG).read()
            assert again.answer() == first.answer()
            assert again.usage["prompt_tokens_details"]["cached_tokens"] > 0.9 * again.usage["prompt_tokens"]
            await until(lambda: stats() is not None and stats().tiers.hit_tokens > 800)
            metrics = (await client.get("/metrics")).text
            assert 'afserve_kv_hit_tokens_total{model_name="nano",node="attention-0",tier="disk"}' in metrics

    asyncio.run(scenario())


def test_what_left_the_cache_is_found_in_host_memory():
    async def scenario():
        async with serving(attention=1, host="64MiB", kv_tokens=2048) as (run, client):
            first = await Stream(client, LONG).read()
            for word in ("class A:\n", "for i in x:\n"):  # each fills most of the cache
                await Stream(client, {"prompt": word * 250, "max_tokens": 8}).read()
            again = await Stream(client, LONG).read()
            assert again.answer() == first.answer()
            assert again.usage["prompt_tokens_details"]["cached_tokens"] > 0.9 * again.usage["prompt_tokens"]

            def found():
                member = run.controller.members.last_at(attention_node(0))
                return member.stats.tiers.host.hit_tokens

            await until(lambda: found() > 500)
            metrics = (await client.get("/metrics")).text
            assert 'afserve_kv_hit_tokens_total{model_name="nano",node="attention-0",tier="host"}' in metrics

    asyncio.run(scenario())
