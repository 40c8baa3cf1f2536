"""Processes that are broken on purpose, as real ones: only those of the run, and only in the life that was meant."""

import asyncio
import os
import signal
import socket

import psutil
import pytest

from afserve.control.wire.change_values import FaultKind
from afserve.errors import ConfigError
from afserve.launch.run.chaos import Chaos
from afserve.launch.sites.local import LocalSite
from afserve.member import expert_node

pytestmark = pytest.mark.process
NODE = expert_node(0)


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def stopped(pid):
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def with_a_node(scenario):
    """`scenario(processes, faults, pid, exits)` with one node that waits for a controller."""

    async def run(processes, nobody):
        exits = []
        watch = asyncio.create_task(processes.watch_nodes(lambda who, why: exits.append((who, why))))
        faults = Chaos(processes)
        with pytest.raises(ConfigError, match="no process that was started from here"):
            faults.begin(NODE, FaultKind.KILL, 0.0)
        processes.spawn(NODE, nobody)
        await until(lambda: processes.pid_of(NODE))
        await scenario(processes, faults, processes.pid_of(NODE), exits)
        faults.stop()
        await asyncio.to_thread(processes.stop)
        await watch

    with socket.socket() as silent, LocalSite(warm=False) as processes:
        silent.bind(("127.0.0.1", 0))  # nobody listens: a node waits for it
        asyncio.run(run(processes, f"127.0.0.1:{silent.getsockname()[1]}"))


def test_a_stopped_node_goes_on_after_its_time():
    async def scenario(processes, faults, pid, exits):
        assert faults.begin(NODE, FaultKind.STOP, 0.5) == pid
        await until(lambda: stopped(pid))
        await until(lambda: not stopped(pid))
        assert exits == []

    with_a_node(scenario)


def test_a_slow_node_is_stopped_again_and_again():
    async def scenario(processes, faults, pid, exits):
        faults.begin(NODE, FaultKind.SLOW, 300.0)
        for _ in range(3):
            await until(lambda: stopped(pid))
            await until(lambda: not stopped(pid))
        faults.stop()
        await until(lambda: not stopped(pid))

    with_a_node(scenario)


def test_a_killed_node_is_gone_and_cannot_be_broken_again():
    async def scenario(processes, faults, pid, exits):
        faults.begin(NODE, FaultKind.STOP, 300.0)
        assert faults.begin(NODE, FaultKind.KILL, 0.0) == pid
        await until(lambda: exits)
        assert exits[0][0] == NODE and "SIGKILL" in exits[0][1]
        with pytest.raises(ConfigError, match="when it is back"):
            faults.begin(NODE, FaultKind.STOP, 1.0)

    with_a_node(scenario)


def test_no_signal_reaches_another_process():
    async def scenario(processes, faults, pid, exits):
        processes.send_signal(NODE, os.getpid(), signal.SIGKILL)
        processes.send_signal(expert_node(1), pid, signal.SIGKILL)
        processes.send_signal(NODE, pid, signal.SIGSTOP)
        await until(lambda: stopped(pid))
        assert exits == []

    with_a_node(scenario)
