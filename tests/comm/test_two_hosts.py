"""Rows between two hosts, which are network namespaces joined by a virtual cable."""

import os
import shutil
import subprocess
import sys
from multiprocessing.connection import Connection

import pytest

from afserve.comm.transport import Box
from afserve.comm.transports import connect
from tests.comm.begun import FORKED
from tests.comm.conformance import LAYOUT, PATIENCE, answer, arrive, content, send
from tests.warm.process import move_to

BOX, TURNS = Box(0, 0, 0), 20


@pytest.fixture
def hosts():
    """Names of two namespaces; skips where they are not allowed."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip(8)")
    names = [f"afs{os.getpid() % 10000}{side}" for side in "ab"]
    steps = [f"ip netns add {name}" for name in names]
    steps.append(f"ip link add v{names[0]} netns {names[0]} type veth peer name v{names[1]} netns {names[1]}")
    for number, name in enumerate(names, 1):
        inside = f"ip -n {name}"
        steps += [f"{inside} addr add 10.213.7.{number}/24 dev v{name}", f"{inside} link set v{name} up"]
        steps.append(f"{inside} link set lo up")
    made = all(
        subprocess.run(step.split(), capture_output=True, check=False).returncode == 0 for step in steps
    )
    if made:
        yield names
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    if not made:
        pytest.skip("network namespaces cannot be made here")


def expert(network: str, kind: str, pipe: Connection) -> None:
    move_to(network)
    end, address = connect.listen(kind, expert=0, attention_nodes=1, layout=LAYOUT, host="10.213.7.1")
    pipe.send(address)
    for _ in range(TURNS):
        answer(end, BOX, arrive(end, BOX).header, 9)
    pipe.recv()
    end.close()
    pipe.send("done")


def attention(network: str, address: str, pipe: Connection) -> None:
    move_to(network)
    end = connect.connect([address], attention=0, layout=LAYOUT, timeout=PATIENCE)
    for turn in range(TURNS):
        send(end, BOX, turn, 4)
        assert (arrive(end, BOX).x_RH == content(9, 4, LAYOUT.hidden)).all()
    end.close()
    pipe.send("done")


@pytest.mark.process
@pytest.mark.parametrize("kind", ["tcp", "dist"])
def test_rows_cross_from_one_network_to_the_other(hosts, kind):
    if kind not in connect.kinds():
        pytest.skip("this PyTorch has no gloo")
    started, pipes = [], []

    def start(work, host, *args):
        pipe, far = FORKED.Pipe()
        started.append(FORKED.Process(target=work, args=(f"/run/netns/{hosts[host]}", *args, far)))
        started[-1].start()
        far.close()
        pipes.append(pipe)
        return pipe

    def said(pipe):
        assert pipe.poll(PATIENCE)
        return pipe.recv()

    try:
        there = start(expert, 0, kind)
        address = said(there)
        assert address.startswith(f"{kind}:10.213.7.1:")
        assert said(start(attention, 1, address)) == "done"
        there.send("close")
        assert said(there) == "done"
        for process in started:
            process.join(PATIENCE)
        assert [process.exitcode for process in started] == [0, 0]
    finally:
        for process, pipe in zip(started, pipes, strict=True):
            process.kill()
            pipe.close()
