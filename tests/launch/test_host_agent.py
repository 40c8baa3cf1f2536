"""A host that joins compares what nodes take, as they were planned, with what is free there."""

from pathlib import Path

import pytest

from afserve.control.wire.hosts import HostFailed, Welcome
from afserve.errors import RendezvousError
from afserve.launch.plan import host_memory
from afserve.launch.plan.gpus import Gpus
from afserve.launch.plan.machine import Machine
from afserve.launch.sites import host_agent
from afserve.launch.sites.host_agent import HostAgent, HostSettings
from afserve.launch.sites.local import LocalSite

GIB = 1 << 30


class Line:
    """To the controller."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, value: object) -> None:
        self.sent.append(value)

    def close(self) -> None:
        self.sent.append("closed")


def welcome(*devices: str, takes: tuple[int, ...]) -> Welcome:
    nodes = tuple(f"expert-{number}" for number in range(len(devices)))
    return Welcome("there", nodes, "/m", "f", 5.0, devices, takes)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostAgent:
    """4 GiB free, and a GPU with 8."""
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o600)
    monkeypatch.setattr(host_memory, "this_machine", lambda: Machine(2, 4 * GIB, 8 * GIB))
    monkeypatch.setattr(host_agent, "probe_gpus", lambda: Gpus(("A card",), (8 * GIB,), (8 * GIB,)))
    found = HostAgent(HostSettings("127.0.0.1:1", token), LocalSite(token))
    found._stream = Line()
    return found


def test_what_fits_begins(agent: HostAgent) -> None:
    agent._check_memory(welcome("cpu", "cpu", "cuda:0", takes=(2 * GIB, 2 * GIB, 8 * GIB)))
    assert agent._stream.sent == []


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            welcome("cpu", "cpu", takes=(2 * GIB, 3 * GIB)),
            "5 GiB of cpu as they were planned, and 4 GiB are free",
        ),
        (
            welcome("cuda:0", takes=(9 * GIB,)),
            "nodes take 9 GiB of cuda:0 as they were planned, and 8 GiB are free",
        ),
        (
            welcome("cuda:0", "cuda:1", takes=(GIB, GIB)),
            "nodes take 1 GiB of cuda:1 as they were planned, and 0 GiB",
        ),
    ],
)
def test_what_does_not_is_said_here_and_at_the_controller(
    agent: HostAgent, found: Welcome, said: str
) -> None:
    with pytest.raises(RendezvousError) as caught:
        agent._check_memory(found)
    failed, end = agent._stream.sent
    assert (
        isinstance(failed, HostFailed) and failed.field == "memory" and said in failed.why and end == "closed"
    )
    assert failed.why.endswith("for this host in the cluster file, or give --kv-tokens less")
    assert said in caught.value.message


def test_a_controller_that_is_back_is_asked_nothing(
    agent: HostAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its nodes have their memory already."""
    monkeypatch.setattr(agent._site, "names", lambda: ("expert-0",))
    agent._check_memory(welcome("cpu", takes=(100 * GIB,)))
