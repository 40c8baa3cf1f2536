"""An attention node is killed under streams: each goes on at the other one, and no client can tell."""

import asyncio
import json
import os
import signal
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import psutil
import pytest

from afserve.config import EngineSettings, ModelSource
from afserve.control.membership.recovery import OnLoss
from afserve.errors import ProtocolError
from afserve.families.table import load_spec
from afserve.launch.plan.gpus import Gpus
from afserve.launch.plan.hosts import HostAssignment
from afserve.launch.plan.machine import this_machine
from afserve.launch.plan.models import find_model
from afserve.launch.plan.topology import choose
from afserve.launch.plan.wishes import Wishes
from afserve.launch.processes.gateway_options import options_of
from afserve.launch.processes.http import HttpHere, HttpInProcesses
from afserve.launch.run.local_run import GatewayProcesses, LocalRun
from afserve.launch.sites.local import LocalSite
from afserve.server.http.settings import ServerSettings
from afserve.server.serve import bind
from afserve.tokens.tokenizer import Tokenizer

pytestmark = [pytest.mark.process, pytest.mark.alone, pytest.mark.usefixtures("warm_fork_servers")]
SECONDS = 90.0
BASE = {"stream": True, "ignore_eos": True, "temperature": 0, "stream_options": {"include_usage": True}}
ASKED = [
    {"prompt": "import os\n", "max_tokens": 500},
    {"prompt": "def add(x, y):\n", "max_tokens": 400, "temperature": 0.9, "seed": 7, "top_p": 0.9},
    {"prompt": "class Tree:\n", "max_tokens": 400, "frequency_penalty": 0.7, "repetition_penalty": 1.1},
    {"prompt": "for i in", "max_tokens": 300, "logprobs": 2, "presence_penalty": 0.5},
    {"prompt": "x = [", "max_tokens": 400, "temperature": 1.1, "seed": 3, "stop": ["never to be seen"]},
    {"prompt": "import sys\n" * 20, "max_tokens": 400, "n": 2, "temperature": 0.7, "seed": 11},
]


@asynccontextmanager
async def serving(
    attention=2,
    experts=1,
    gateways=0,
    grace=1.0,
    copies=0,
    disk="",
    host="",
    over="sockets",
    kv_tokens=32768,
    **phases,
):
    """(run, client): nano with attention nodes that are started again when they are lost."""
    with LocalSite() as processes, bind("127.0.0.1", 0) as sock:
        found = find_model("nano", processes.folder)
        source = ModelSource(str(found.folder), found.name)
        # One token a step: what is to happen in the middle of an answer finds one.
        engine = EngineSettings(
            stream_grace=grace, kv_copies=copies, kv_ssd=disk, kv_host=host, kv_transport=over, draft="off"
        )
        wishes = Wishes(
            attention, experts, kv_tokens=kv_tokens, threads=1, gateways=gateways, engine=engine, **phases
        )
        topology = choose(load_spec(found.folder), source, this_machine(), wishes)
        assignment = HostAssignment.all_here(topology.deployment, Gpus())
        settings = ServerSettings(drain_seconds=0)
        elsewhere = GatewayProcesses(options_of("nano", str(found.tokenizer), settings), sock)
        run = LocalRun(
            topology,
            found,
            "nano",
            processes,
            None,
            assignment,
            elsewhere if gateways else None,
            OnLoss.RECOVER,
        )
        tokenizer = Tokenizer.from_folder(found.tokenizer)
        http = (
            HttpInProcesses(run.controller, 0)
            if gateways
            else HttpHere([(run.frontend, tokenizer)], settings, sock)
        )
        url, stop = f"http://127.0.0.1:{sock.getsockname()[1]}", asyncio.Event()
        async with run:
            await asyncio.wait_for(run.wait_ready(), SECONDS)
            answering = asyncio.create_task(http.run(stop))
            async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as client:
                yield run, client
            stop.set()
            await answering


class Stream:
    """One answer, read as it comes."""

    def __init__(self, client, asked):
        self.client, self.asked = client, {**BASE, **asked}
        self.texts, self.reasons, self.scores, self.usage = {}, {}, [], None
        self.pieces, self.done = 0, False

    async def read(self, most=None):
        """All of it, or so many characters of it at least."""
        async with self.client.stream("POST", "/v1/completions", json=self.asked) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                self.done = self.done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    self.add(json.loads(line[6:]))
                if most is not None and len(self.texts.get(0, "")) >= most:
                    return self
        assert self.done
        return self

    def add(self, body):
        assert "error" not in body, body
        self.usage = body.get("usage") or self.usage
        for choice in body["choices"]:
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            self.reasons[index] = choice["finish_reason"] or self.reasons.get(index)
            self.scores += (choice["logprobs"] or {}).get("token_logprobs", [])
            self.pieces += 1

    def answer(self):
        counts = {key: self.usage[key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
        return self.texts, self.reasons, counts


@pytest.fixture(scope="module")
def answers():
    """What ASKED is answered where nothing happens: the same from every deployment, so it is asked once."""
    known = []

    async def undisturbed(client):
        if not known:
            known.extend(await asyncio.gather(*(Stream(client, asked).read() for asked in ASKED)))
        return known

    return undisturbed


async def ready(client):
    async with asyncio.timeout(SECONDS):
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.02)


async def until(condition):
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


def homes(run):
    """Index of the attention node -> its open requests."""
    requests = run._gateway.requests
    return {life.index: requests.load(life) for life in requests.homes()}


def kill(run, index):
    os.kill(run.processes.pids[f"attention-{index}"], signal.SIGKILL)


async def both_there(run):
    await until(lambda: not run._gateway.unattended() and len(run._gateway._attendance.usable()) == 2)


@pytest.mark.parametrize("losses", [1, pytest.param(2, marks=pytest.mark.long)])
def test_every_stream_goes_on_with_the_same_tokens(answers, losses):
    async def scenario():
        async with serving() as (run, client):
            undisturbed = await answers(client)
            for turn in range(losses):
                await both_there(run)
                streams = [Stream(client, asked) for asked in ASKED]
                reading = [asyncio.create_task(stream.read()) for stream in streams]
                await until(lambda: all(stream.pieces > 3 * (turn + 1) for stream in streams))  # noqa: B023
                assert homes(run).keys() == {0, 1}
                before = sum(run._gateway.moves.counts.values())
                kill(run, turn)
                await asyncio.gather(*reading)
                assert sum(run._gateway.moves.counts.values()) > before
                for stream, other in zip(streams, undisturbed, strict=True):
                    assert stream.answer() == other.answer()
                    assert stream.scores == pytest.approx(other.scores, abs=1e-4)
            await both_there(run)
            metrics = (await client.get("/metrics")).text
            assert 'afserve_requests_moved_total{model_name="nano",cause="lost"}' in metrics
            assert (await client.get("/status")).json()["moved"]["lost"] > 0
            assert len(run._gateway.requests) == 0

    asyncio.run(scenario())


def test_a_gateway_process_is_told_who_attends(answers):
    async def scenario():
        async with serving(gateways=1) as (run, client):
            undisturbed = await answers(client)
            await ready(client)
            streams = [Stream(client, asked) for asked in ASKED]
            reading = [asyncio.create_task(stream.read()) for stream in streams]
            await until(lambda: all(stream.pieces > 3 for stream in streams))
            kill(run, 0)
            await asyncio.gather(*reading)
            assert [stream.answer() for stream in streams] == [other.answer() for other in undisturbed]
            assert (await client.get("/status")).json()["moved"]["lost"] > 0

    asyncio.run(scenario())


def test_without_a_node_requests_wait_for_one_and_can_be_cancelled(answers):
    async def scenario():
        async with serving(attention=1) as (run, client):
            undisturbed = (await answers(client))[0]
            first, left = Stream(client, ASKED[0]), Stream(client, ASKED[1])
            reading, leaving = asyncio.create_task(first.read()), asyncio.create_task(left.read())
            await until(lambda: first.pieces > 3 and left.pieces > 3)
            kill(run, 0)
            await until(lambda: len(run._gateway.requests.waiting) == 2)
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/status")).json()["waiting"] == 2
            assert "num_requests_waiting{" in (await client.get("/metrics")).text
            leaving.cancel()
            await until(lambda: len(run._gateway.requests.waiting) == 1)
            late = asyncio.create_task(Stream(client, ASKED[0]).read())
            await until(lambda: len(run._gateway.requests.waiting) == 2)
            await reading
            assert first.answer() == undisturbed.answer() == (await late).answer()
            assert len(run._gateway.requests) == 0

    asyncio.run(scenario())


def test_requests_leave_a_node_that_drains(answers):
    async def scenario():
        async with serving() as (run, client):
            undisturbed = await answers(client)
            await both_there(run)
            streams = [Stream(client, asked) for asked in ASKED]
            reading = [asyncio.create_task(stream.read()) for stream in streams]
            await until(lambda: all(stream.pieces > 3 for stream in streams))
            attending = run.controller._news.nodes
            first, second = attending.nodes
            run._gateway.update_nodes(replace(attending, nodes=(first, replace(second, accepting=False))))
            assert homes(run).keys() == {0} and run._gateway.moves.counts.keys() == {"drained"}
            await asyncio.gather(*reading)
            assert [stream.answer() for stream in streams] == [other.answer() for other in undisturbed]
            process = psutil.Process(run.processes.pids["attention-1"])
            assert process.is_running()

    asyncio.run(scenario())


def test_a_stream_that_only_breaks_costs_no_token_and_no_move(answers):
    async def scenario():
        async with serving(grace=60.0) as (run, client):
            undisturbed = await answers(client)
            await both_there(run)
            homes, left, heard = run._gateway._homes, {0: 3, 1: 3}, Counter()
            hear = homes.heard

            def broken(stream, value):
                """Each node's stream breaks up to three times, and what came by it last is lost."""
                placed = homes.requests._placed.values()
                heard[stream] += len(placed) == 7 and all(request.generated for request in placed)
                if left[stream.life.index] and heard[stream] == 3:
                    left[stream.life.index] -= 1
                    raise ProtocolError("the stream is cut")
                hear(stream, value)

            homes.heard = broken
            streams = [Stream(client, asked) for asked in ASKED]
            reading = [asyncio.create_task(stream.read()) for stream in streams]
            await asyncio.gather(*reading)
            assert min(left.values()) < 3 and run._gateway.moves.counts == {}
            assert [stream.answer() for stream in streams] == [other.answer() for other in undisturbed]

    asyncio.run(scenario())
