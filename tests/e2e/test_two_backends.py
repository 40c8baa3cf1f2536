"""Each role with its own kernels and weight format in one run, in real processes: Triton's, interpreted, and native."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from afserve.clock import MonotonicClock
from afserve.config import EngineSettings, ModelSource
from afserve.control.backend import ServedModel
from afserve.control.controller import Controller
from afserve.control.controller_wiring import Wiring
from afserve.control.frontend import Frontend
from afserve.control.gateway import Gateway
from afserve.control.membership.recovery import OnLoss, Rules
from afserve.control.queries import OwnQueries
from afserve.control.wire import channel
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.families.table import load_spec
from afserve.launch.plan.machine import this_machine
from afserve.launch.plan.models import CONFIGS
from afserve.launch.plan.topology import choose
from afserve.launch.plan.wishes import Wishes
from tests.engine.driving import collect, config, drive
from tests.warm.interpreter import WARM

pytestmark = pytest.mark.process
SECONDS = 240.0
ROOT = Path(__file__).resolve().parents[2]
NATIVE = ("afserve", "node")
INTERPRETED = ("tests.e2e.interpreted_node",)
PROMPT, COUNT = (5, 6, 7), 3


def start(command: tuple[str, ...], role: str, address: str, token: Path) -> "subprocess.Popen[str]":
    words = (role, address, str(token))
    if command is NATIVE:
        words = ("--role", role, "--join", address, "--token-file", str(token))
        command = ("node",)
    return subprocess.Popen(
        [*WARM.command(), *command, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def tokens_of(folder: Path, kernels: dict[str, tuple[str, ...]], expert_dtype: str) -> tuple[int, ...]:
    """What one attention and one expert node with these programs answer."""
    pytest.importorskip("triton")
    token = channel.new_token(folder)
    nano = CONFIGS / "nano"
    engine = EngineSettings(expert_dtype=expert_dtype)
    wishes = Wishes(1, 1, "1", kv_tokens=1024, threads=1, engine=engine)
    run = choose(load_spec(nano), ModelSource(str(nano), "nano"), this_machine(), wishes).deployment

    async def scenario() -> tuple[list[int], list["subprocess.Popen[str]"]]:
        gateway, clock = Gateway(channel.read_token(token)), MonotonicClock()
        rules = Rules(OnLoss.END, patience=SECONDS, deadline=SECONDS)
        wiring = Wiring(tell_attention=gateway.update_nodes)
        controller = Controller(run, channel.read_token(token), clock, rules=rules, wiring=wiring)
        frontend = Frontend(OwnQueries(controller, {}, clock), gateway, ServedModel("nano", "", 64, 64, 0))
        address = await controller.start(also=[gateway.handler])
        nodes = [start(command, role, address, token) for role, command in kernels.items()]
        try:
            await asyncio.wait_for(controller.wait_ready(), SECONDS)
            await asyncio.wait_for(frontend.wait_attended(), SECONDS)
            sampling = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
            request = GenerationRequest(1, PROMPT, sampling)
            return [one async for event in frontend.open(request).events() for one in event.token_ids], nodes
        except BaseException:
            for node in nodes:
                node.kill()
                print(node.communicate()[0])
            raise
        finally:
            await controller.stop()

    found, nodes = asyncio.run(scenario())
    said = {role: node.communicate(timeout=SECONDS)[0] for role, node in zip(kernels, nodes)}
    for role, command in kernels.items():
        assert ("kernels: Triton, interpreted" in said[role]) is (command is INTERPRETED), said
    return tuple(found)


RUNS = {
    "triton attends, native int8 experts": ({"expert": NATIVE, "attention": INTERPRETED}, "int8"),
    "native attends, triton experts": ({"expert": INTERPRETED, "attention": NATIVE}, "auto"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if "int8" in name else pytest.param(name, marks=pytest.mark.long) for name in RUNS]
)
def test_attention_in_triton_with_native_experts_and_the_reverse(name: str, tmp_path: Path):
    """Greedy tokens of a trained model do not hang on the last bit, so all of them agree."""
    sampling = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
    node = colocated(ModelSource(str(CONFIGS / "nano"), "nano"), config())
    (native,) = collect(drive(node, [GenerationRequest(0, PROMPT, sampling)]))
    assert len(native) == COUNT
    assert tokens_of(tmp_path, *RUNS[name]) == tuple(native)
