"""The fork server as a real process: a node has one process at a time, whatever state the earlier one is in."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys

import psutil
import pytest

from afserve.launch.processes import forker
from afserve.launch.processes.forker import HELPER
from afserve.launch.sites.local import LocalSite
from afserve.member import expert_node

pytestmark = pytest.mark.process


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def replaced(processes, nobody, stopped):
    """A second order for a node that waits for a controller: (first pid, second pid, exits that were reported)."""
    exits = []
    watch = asyncio.create_task(processes.watch_nodes(lambda who, why: exits.append((who, why))))
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
    with socket.socket() as silent, LocalSite(warm=False) as processes:
        silent.bind(("127.0.0.1", 0))  # nobody listens: a node waits for it
        nobody = f"127.0.0.1:{silent.getsockname()[1]}"
        ((who, why),) = asyncio.run(replaced(processes, nobody, stopped))
    assert who == expert_node(0) and "SIGKILL" in why


def test_nodes_start_beside_a_folder_that_is_called_afserve(tmp_path, monkeypatch):
    """So is the folder of a clone: a user's shell may stand next to it."""
    (tmp_path / "afserve").mkdir()
    monkeypatch.chdir(tmp_path)
    with socket.socket() as silent, LocalSite(warm=False) as processes:
        silent.bind(("127.0.0.1", 0))
        exits = asyncio.run(replaced(processes, f"127.0.0.1:{silent.getsockname()[1]}", stopped=False))
    assert [who for who, _ in exits] == [expert_node(0)]


async def first_end(run):
    said = []
    watch = asyncio.create_task(run.watch_nodes(lambda who, why: said.append((who, why))))
    await until(lambda: said)
    watch.cancel()
    return said


def test_a_fork_server_that_cannot_begin_says_why(monkeypatch):
    broken = "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('%s', run_name='__main__')"
    monkeypatch.setattr(forker, "module", lambda name: [sys.executable, "-c", broken % name])

    with LocalSite() as run:
        ((who, why),) = asyncio.run(first_end(run))
        assert who == HELPER and "exit code 1" in why
        assert "import of torch halted" in run.last_words(HELPER)
    assert not run.folder.exists()


def fork_server():
    """Of this process, or None while there is none."""
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ProcessLookupError):  # it ends at this moment
            if each.name() == "afserve-fork" and os.getsid(each.pid) == each.pid:  # no node that begins
                return each
    return None


async def beside_losses(processes, nobody, lose):
    """Pids of two nodes around `lose(fork server)`, which returns once another one is there; and what ended."""
    exits = []
    watch = asyncio.create_task(processes.watch_nodes(lambda who, why: exits.append((who, why))))
    processes.spawn(expert_node(0), nobody)
    await until(lambda: "expert-0" in processes.pids)
    await lose(fork_server())
    processes.spawn(expert_node(1), nobody)
    await until(lambda: "expert-1" in processes.pids)
    assert exits == [] and psutil.Process(processes.pids["expert-0"]).is_running()
    for name in ("expert-0", "expert-1"):
        os.kill(processes.pids[name], signal.SIGKILL)
    await until(lambda: len(exits) == 2)
    await asyncio.to_thread(processes.stop)
    await watch
    return dict(exits)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP])
def test_nodes_go_on_without_their_fork_server_and_another_one_starts(number, monkeypatch, caplog):
    monkeypatch.setattr(forker, "STOPPED_SECONDS", 0.5)

    async def lose(lost):
        lost.send_signal(number)
        await until(lambda: (found := fork_server()) is not None and found.pid != lost.pid)

    with socket.socket() as silent, LocalSite(warm=False) as run:
        silent.bind(("127.0.0.1", 0))
        ends = asyncio.run(beside_losses(run, f"127.0.0.1:{silent.getsockname()[1]}", lose))
    assert set(ends) == {expert_node(0), expert_node(1)}
    assert all("SIGKILL" in why for why in ends.values()), "their end is noticed, with its reason"
    said = "it was stopped" if number == signal.SIGSTOP else number.name
    assert said in caplog.text and "another one starts, nodes go on" in caplog.text
    assert not run.folder.exists()


@pytest.mark.parametrize("ready", [False, True])
def test_an_order_that_a_lost_fork_server_had_is_done_by_the_next_one(ready):
    async def ordered(processes, nobody):
        watch = asyncio.create_task(processes.watch_nodes(lambda who, why: None))
        if ready:
            await until(fork_server)
        (lost,) = set(psutil.Process().children()) - before
        lost.suspend()
        processes.spawn(expert_node(0), nobody)
        await asyncio.to_thread(lost.kill)
        await until(lambda: "expert-0" in processes.pids)
        await asyncio.to_thread(processes.stop)
        await watch

    before = set(psutil.Process().children())  # of other tests
    with socket.socket() as silent, LocalSite(warm=False) as run:
        silent.bind(("127.0.0.1", 0))
        asyncio.run(ordered(run, f"127.0.0.1:{silent.getsockname()[1]}"))


def test_a_fork_server_that_is_killed_again_and_again_before_it_is_ready_ends_the_run(monkeypatch):
    dying = "import os; os.kill(os.getpid(), 9)"
    monkeypatch.setattr(forker, "module", lambda name: [sys.executable, "-c", dying])
    with LocalSite() as run:
        ((who, why),) = asyncio.run(first_end(run))
    assert who == HELPER and "SIGKILL" in why


def test_a_node_that_cannot_be_forked_is_told_and_may_be_ordered_again(monkeypatch):
    broken = (
        "import os, runpy; real, left = os.fork, [1];"
        "os.fork = lambda: real() if not left or left.pop() is None else fail();"
        "fail = lambda: exec('raise OSError(12, os.strerror(12))');"
        "runpy.run_module('%s', run_name='__main__')"
    )
    monkeypatch.setattr(forker, "module", lambda name: [sys.executable, "-c", broken % name])

    async def twice(processes, nobody):
        exits = []
        watch = asyncio.create_task(processes.watch_nodes(lambda who, why: exits.append((who, why))))
        processes.spawn(expert_node(0), nobody)
        await until(lambda: exits)
        processes.spawn(expert_node(0), nobody)
        await until(lambda: "expert-0" in processes.pids)
        await asyncio.to_thread(processes.stop)
        await watch
        return exits

    with socket.socket() as silent, LocalSite(warm=False) as run:
        silent.bind(("127.0.0.1", 0))
        ((who, why),) = asyncio.run(twice(run, f"127.0.0.1:{silent.getsockname()[1]}"))
    assert who == expert_node(0) and "cannot be forked: Cannot allocate memory" in why


def test_a_token_that_was_given_is_in_no_other_file(tmp_path):
    token = tmp_path / "token"
    token.write_text("given")
    with LocalSite(token, warm=False) as run:
        assert run.token == "given" and run.token_file == token
        assert not [path for path in run.folder.rglob("*") if b"given" in path.read_bytes()]


def test_the_folder_may_go_while_nodes_are_there():
    async def removed(processes, nobody):
        async def lose(lost):
            shutil.rmtree(processes.folder)
            lost.kill()
            await until(lambda: (found := fork_server()) is not None and found.pid != lost.pid)

        return await beside_losses(processes, nobody, lose)

    with socket.socket() as silent, LocalSite(warm=False) as run:
        silent.bind(("127.0.0.1", 0))
        assert len(asyncio.run(removed(run, f"127.0.0.1:{silent.getsockname()[1]}"))) == 2
