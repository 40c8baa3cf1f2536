"""The only expert node is lost and nobody takes its place for a while: new requests are refused with the reason."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from afserve.member import expert_node
from tests.e2e.test_lost_attention import ASKED, Stream, serving, until

pytestmark = pytest.mark.process


def test_new_requests_get_503_with_the_reason_and_running_ones_go_on_when_the_node_is_back():
    async def scenario():
        async with serving(attention=1) as (run, client):
            undisturbed = await Stream(client, ASKED[0]).read()
            recovery = run.controller.membership._recovery
            recovery.rules = replace(
                recovery.rules, restarts=0
            )  # else new requests wait for the next process
            spawn, run.processes.spawn = run.processes.spawn, lambda *_, **__: None
            stream = Stream(client, ASKED[0])
            reading = asyncio.create_task(stream.read())
            await until(lambda: stream.pieces > 3)
            os.kill(run.processes.pids["expert-0"], signal.SIGKILL)
            await until(lambda: run._gateway.refusing)
            refused = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
            assert refused.status_code == 503 and float(refused.headers["Retry-After"]) > 0
            message = refused.json()["error"]["message"]
            assert "expert 0 of MoE layer 0" in message and "stood only on expert-0 (" in message
            status = (await client.get("/status")).json()
            assert status["absent"][0].startswith("expert-0 is gone") and status["refusing"] in message
            run.processes.spawn = spawn
            run._start(expert_node(0))
            await reading
            assert stream.answer() == undisturbed.answer()
            await until(lambda: not run._gateway.refusing)
            assert (await Stream(client, ASKED[0]).read()).answer() == undisturbed.answer()

    asyncio.run(scenario())
