"""The fork server as a real process: a node has one process at a time, whatever state the earlier one is in."""

import asyncio
import os
import signal
import socket
import sys

import psutil
import pytest

from afserve.launch import processes
from afserve.launch.processes import HELPER, NodeProcesses
from afserve.member import expert_node

pytestmark = pytest.mark.process


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def replaced(processes, nobody, stopped):
    """A second order for a node that waits for a controller: (first pid, second pid, exits that were reported)."""
    exits = []
    watch = asyncio.create_task(processes.watch(lambda who, why: exits.append((who, why))))
    node = expert_node(0)
    processes.spawn(node, nobody)
    await until(lambda: "expert-0" in processes.pids)
    first = processes.pids["expert-0"]
    if stopped:
        os.kill(first, signal.SIGSTOP)
    processes.spawn(node, nobody)
    await until(lambda: processes.pids.get("expert-0", first) != first)
    second = processes.pids["expert-0"]
    assert not psutil.pid_exists(first) and psutil.pid_exists(second)
    assert exits == [], "the end of the first is nobody's business any more"
    os.kill(second, signal.SIGKILL)
    await until(lambda: exits)
    await asyncio.to_thread(processes.stop)
    await watch
    return exits


@pytest.mark.parametrize("stopped", [False, True])
def test_an_order_for_a_node_kills_what_is_left_of_its_earlier_process(stopped):
    with socket.socket() as silent, NodeProcesses() as processes:
        silent.bind(("127.0.0.1", 0))  # nobody listens: a node waits for it
        nobody = f"127.0.0.1:{silent.getsockname()[1]}"
        ((who, why),) = asyncio.run(replaced(processes, nobody, stopped))
    assert who == expert_node(0) and "SIGKILL" in why


def test_nodes_start_beside_a_folder_that_is_called_afserve(tmp_path, monkeypatch):
    """So is the folder of a clone: a user's shell may stand next to it."""
    (tmp_path / "afserve").mkdir()
    monkeypatch.chdir(tmp_path)
    with socket.socket() as silent, NodeProcesses(warm=False) as processes:
        silent.bind(("127.0.0.1", 0))
        exits = asyncio.run(replaced(processes, f"127.0.0.1:{silent.getsockname()[1]}", stopped=False))
    assert [who for who, _ in exits] == [expert_node(0)]


def ended(run):
    """What is said of a fork server that ends by itself, and its last words, which outlive it."""

    async def watched():
        said = []
        async with asyncio.timeout(60):
            await run.watch(lambda who, why: said.append((who, why)))
        return said

    said = asyncio.run(watched())
    assert run.token_file.exists(), "whoever reads it next would blame the token"
    return *said, run.last_words(HELPER)


def test_a_fork_server_that_cannot_begin_says_why(monkeypatch):
    broken = "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('%s', run_name='__main__')"
    monkeypatch.setattr(processes, "module", lambda name: [sys.executable, "-c", broken % name])
    with NodeProcesses() as run:
        (who, why), words = ended(run)
    assert who == HELPER and "exit code 1" in why and "import of torch halted" in words
    assert not run.folder.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_fork_server_that_is_killed_leaves_the_token_to_its_run(number):
    with NodeProcesses(warm=False) as run:
        (helper,) = (
            each for each in psutil.Process().children() if "fork_server" in " ".join(each.cmdline())
        )
        helper.send_signal(number)
        (who, why), _ = ended(run)
    assert who == HELPER and why
    assert not run.folder.exists()
