"""`afserve node`: nodes that join a controller by themselves, and leave when it does."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from afserve.clock import MonotonicClock
from afserve.config import ModelSource
from afserve.control.backend import ServedModel
from afserve.control.controller import Controller
from afserve.control.controller_wiring import Wiring
from afserve.control.frontend import Frontend
from afserve.control.gateway import Gateway
from afserve.control.queries import OwnQueries
from afserve.control.wire import channel
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.families.table import load_spec
from afserve.launch.plan.machine import this_machine
from afserve.launch.plan.models import CONFIGS
from afserve.launch.plan.topology import choose
from afserve.launch.plan.wishes import Wishes
from tests.warm.interpreter import WARM

pytestmark = pytest.mark.process
SECONDS = 120.0


def start(role: str, address: str, token: Path) -> subprocess.Popen[str]:
    words = ["node", "--role", role, "--join", address, "--token-file", str(token)]
    command = [*WARM.command(), *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def run_of_nano(experts: int):
    folder = CONFIGS / "nano"
    source = ModelSource(str(folder), "nano")
    return choose(
        load_spec(folder), source, this_machine(), Wishes(1, experts, kv_tokens=8192, threads=1)
    ).deployment


@pytest.mark.parametrize(("polite", "experts"), [(True, 2), (False, 1)])
def test_nodes_join_serve_and_leave_with_the_controller(tmp_path: Path, polite: bool, experts: int):
    token = channel.new_token(tmp_path)
    assert token.stat().st_mode & 0o777 == 0o600

    async def scenario() -> list[subprocess.Popen[str]]:
        gateway, clock = Gateway(channel.read_token(token)), MonotonicClock()
        wiring = Wiring(tell_attention=gateway.update_nodes)
        controller = Controller(run_of_nano(experts), channel.read_token(token), clock, wiring=wiring)
        frontend = Frontend(OwnQueries(controller, {}, clock), gateway, ServedModel("nano", "", 64, 64, 0))
        address = await controller.start(also=[gateway.handler])
        nodes = [start(role, address, token) for role in ("expert", "attention", *["expert"] * (experts - 1))]
        await asyncio.wait_for(controller.wait_ready(), SECONDS)
        await asyncio.wait_for(frontend.wait_attended(), SECONDS)
        request = GenerationRequest(
            1, (5, 6, 7), SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        )
        found = [token async for event in frontend.open(request).events() for token in event.token_ids]
        assert len(found) == 4
        if not polite:
            await controller._streams._server.stop(
                None
            )  # as if the connection broke: nobody was told to stop
        await controller.stop()
        return nodes

    nodes = asyncio.run(scenario())
    ended = [node.communicate(timeout=SECONDS)[1] for node in nodes]
    assert {node.returncode for node in nodes} == {0 if polite else 1}
    assert all("Traceback" not in said for said in ended), ended


def test_a_wrong_token_is_refused(tmp_path: Path):
    wrong = channel.new_token(tmp_path)

    async def scenario() -> tuple[int | None, str]:
        controller = Controller(run_of_nano(1), "another", MonotonicClock())
        node = start("expert", await controller.start(), wrong)
        _, said = await asyncio.to_thread(node.communicate, timeout=SECONDS)
        await controller.stop()
        return node.returncode, said

    code, said = asyncio.run(scenario())
    assert code == 2
    assert said.startswith("error: ") and "--token-file" in said
