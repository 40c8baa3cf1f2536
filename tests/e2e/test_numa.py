"""A run on a pretended machine of two NUMA nodes with one core each: where its processes and their memory are."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from afserve import LLM, SamplingParams
from afserve.cli.main import run
from afserve.comm.binding import refusal
from tests.e2e.test_losses import kill, serving, wait, whole
from tests.launch.pretended_machine import pretend
from tests.warm.interpreter import WARM

pytestmark = pytest.mark.process
CORES = sorted(os.sched_getaffinity(0))[:2]
MODULE = "tests.launch.pretended_machine"
PROMPT, GREEDY = "def main():", SamplingParams(max_tokens=24, temperature=0)
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="two pretended NUMA nodes want a core each")


@pytest.fixture
def machine(tmp_path):
    return pretend(tmp_path, *((str(core), 4 << 20) for core in CORES))


def cores_of(pid):
    """Of all threads, but for those that end meanwhile."""
    found = set()
    for thread in psutil.Process(pid).threads():
        with suppress(ProcessLookupError):
            found |= os.sched_getaffinity(thread.id)
    return found


def policies(pid):
    """Of its memory, as the kernel says."""
    lines = Path(f"/proc/{pid}/numa_maps").read_text(encoding="utf-8").splitlines()
    return {line.split()[1] for line in lines}


def are_bound(server, wanted):
    pids = serving(server)
    return {name: cores_of(pid) for name, pid in pids.items() if name in wanted} == wanted


@two_cores
@pytest.mark.usefixtures("warm_fork_servers")
def test_every_node_is_on_its_cores_and_says_the_same_tokens(up, machine):
    with LLM("nano", attention=1, experts=1, numa="off") as llm:
        (expected,) = llm.generate([PROMPT], GREEDY)
    server = up("--expert-copies", "2", command=(MODULE, str(machine)))  # each prefers its near replica
    first, second = ({core} for core in CORES)
    wanted = {"attention-0": first, "expert-1": first, "attention-1": second, "expert-0": second}
    assert are_bound(server, wanted)
    asked = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    for _ in range(2):  # each attention node
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).json()
        assert answer["choices"][0]["text"] == expected.text
    before = serving(server)["expert-1"]
    if not refusal(0):
        assert "prefer:0" in policies(before)
    kill(before, number=signal.SIGKILL)
    wait(lambda: whole(server)["expert-1"] != before, "another process in its place")
    assert are_bound(server, wanted), "it is where its predecessor was"
    code, printed = server.stop()
    assert code == 0 and printed.count("cores only, memory of NUMA node") <= 1
    assert f"numa: 2 nodes; attention-0, expert-1 on cores {CORES[0]}" in " ".join(printed.split())


@two_cores
@pytest.mark.usefixtures("warm_fork_servers")
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"numa": "off"}, "off, as asked for"),
        ({"attention": 1, "experts": 2}, "not bound: 3 nodes cannot be dealt evenly to 2 NUMA nodes"),
    ],
)
def test_nothing_is_bound_where_it_is_off_or_uneven(machine, monkeypatch, asked, said):
    monkeypatch.setattr("afserve.launch.plan.numa.SYSFS", machine)
    with LLM("nano", threads=1, **asked) as llm:
        assert said in llm.topology.picked["numa"]
        children = psutil.Process().children(recursive=True)
        assert all(os.sched_getaffinity(child.pid) == os.sched_getaffinity(0) for child in children)


@two_cores
def test_a_node_by_hand_is_bound_to_what_it_is_told(machine, tmp_path, capsys):
    token = tmp_path / "token"
    token.write_text("0" * 64, encoding="ascii")
    token.chmod(0o600)
    words = ["node", "--role", "expert", "--join", "127.0.0.1:9", "--token-file", str(token)]
    with open(os.devnull, "wb") as nowhere:
        process = WARM.run([MODULE, str(machine), *words, "--numa", "1"], nowhere)
    until = time.monotonic() + 30
    while os.sched_getaffinity(process.pid) != {CORES[1]}:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    process.kill()
    assert process.wait(30) == -signal.SIGKILL
    assert run([*words, "--numa", "1023"]) == 2
    assert "--numa 1023: " in capsys.readouterr().err
