"""What clients notice of a bad network between two hosts: cuts, loss and delay, with real processes in two namespaces.

Each host has an attention and an expert node, the first one also controller and gateway, and every expert is on both.
A cut is a loss, and so it is noticed and answered as one. A network that is only slow or lossy loses nobody.
"""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bench.cable import ADDRESSES, FAIR, Cable, Weather, cabled, inside
from bench.faults_deployment import Deployment
from bench.faults_load import Load, altered, failed, milliseconds, percentile
from bench.faults_nodes import Row
from bench.origin import ROOT
from bench.served import AFSERVE, READY_S, Served, started

QUIET_S = 3.0
LEAVE_S = 3.0
CLUSTER = """
micro_batches = 2
[model]
name = "nano"
[attention]
nodes = 2
tensor_parallel = 1
batch = 64
[experts]
nodes = 2
""" + "".join(
    f'[[host]]\naddress = "{address}"\nrole = "{role}"\nhardware = "cpu-host"\ndevices = 1\n'
    for address in ADDRESSES
    for role in ("attention", "experts")
)
FLAGS = ("--expert-copies", "2")


@dataclass(frozen=True, slots=True)
class NetworkCase:
    """`seconds` of `weather`, of which `controlled` spares the control plane; `rate` requests of `tokens` a second."""

    name: str
    weather: Weather
    seconds: float = 5.0
    rate: float = 2.0
    tokens: int = 96
    controlled: bool = False


CASES = (
    NetworkCase("network cut both ways", Weather(cut=(0, 1))),
    NetworkCase("network cut from the controller's host", Weather(cut=(0,))),
    NetworkCase("network cut towards the controller's host", Weather(cut=(1,))),
    NetworkCase("data plane cut both ways", Weather(cut=(0, 1)), controlled=True),
    NetworkCase("10 % of packets lost", Weather(loss=0.1), seconds=20.0, rate=0.5),
    NetworkCase("100 ms of delay each way", Weather(delay=0.1), seconds=30.0, rate=0.5, tokens=24),
)


@contextmanager
def two_hosts(*flags: str) -> Iterator[tuple[Deployment, Cable]]:
    """This thread is on the first host meanwhile. Raises RuntimeError where they do not start or end well."""
    with cabled() as cable, inside(cable.names[0]), ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        file = folder / "cluster.toml"
        file.write_text(CLUSTER)
        nodes: list[subprocess.Popen[bytes]] = []
        opened.callback(_end, nodes)
        up = opened.enter_context(started("--cluster", str(file), "--insecure-nodes", *FLAGS, *flags))
        opened.callback(cable.tell, FAIR)  # they have to hear that the run ends
        nodes.append(_kept(cable.names[1], _line(up, folder), folder))
        yield opened.enter_context(Deployment(up.wait_ready())), cable


def _line(up: Served, folder: Path) -> str:
    """What has to be run on the second host, once the token has been copied as it says."""
    until = time.monotonic() + READY_S
    command = re.compile(rf"^{re.escape(ADDRESSES[1])}:  afserve (host .*)$", re.MULTILINE)
    while (found := command.search(up.printed())) is None:
        if time.monotonic() > until or up.process.poll() is not None:
            raise RuntimeError(f"afserve up does not say what to run on the other host: {up.printed()}")
        time.sleep(0.05)
    copied = re.search(r"^here:  scp -p (\S+) \S+:(\S+)$", up.printed(), re.MULTILINE)
    assert copied is not None, up.printed()
    token = folder / copied[2]
    shutil.copy2(copied[1], token)
    return found[1].replace(copied[2], str(token))


def _kept(name: str, line: str, folder: Path) -> "subprocess.Popen[bytes]":
    """It runs there, and again whenever it does not end well, while this process lives: as a service would."""
    command = " ".join([*AFSERVE, *line.split()])
    with (folder / "host.log").open("wb") as file:
        return subprocess.Popen(
            ["ip", "netns", "exec", name, "sh", "-c", f"until {command} || ! kill -0 $PPID; do sleep 0.2; done"],
            cwd=ROOT, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip


def control_port(up: Served) -> int:
    """Where nodes join, and where the streams of attention nodes go."""
    found = re.search(r"--join \S+:(\d+)", up.printed())
    assert found is not None, up.printed()
    return int(found[1])


def _end(nodes: "list[subprocess.Popen[bytes]]") -> None:
    """They have heard that the run is over; whoever has not goes now."""
    until = time.monotonic() + LEAVE_S
    for node in nodes:
        with suppress(subprocess.TimeoutExpired):
            node.wait(max(0.0, until - time.monotonic()))
        with suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()


async def play(case: NetworkCase, here: Deployment, cable: Cable) -> Row:
    """One spell of bad weather under load, between two of fair weather."""
    load = Load(here.url, case.rate, case.tokens)
    reference = await load.reference()
    async with load:
        await asyncio.sleep(QUIET_S)
        quiet = time.monotonic()
        await asyncio.sleep(QUIET_S)
        at, said_at = time.monotonic(), time.time()
        cable.tell(replace(case.weather, spared=control_port(here.up)) if case.controlled else case.weather)
        await asyncio.sleep(case.seconds)
        cable.tell(FAIR)
        over = time.monotonic()
        await here.wait_whole()
        back = time.monotonic()
        await asyncio.sleep(QUIET_S)
    lost = [i for i in here.status()["incidents"] if i["what"] == "lost" and i["at"] >= said_at]
    return {
        "bench": "faults_networks",
        "case": case.name,
        "seconds": case.seconds,
        "requests": len(load.answers),
        "tokens": case.tokens,
        "rate": case.rate,
        "failed": failed(load.answers),
        "altered": altered(load.answers, reference),
        "stall_p50_ms": milliseconds(percentile(load.stalls(at), 0.5)),
        "stall_p99_ms": milliseconds(percentile(load.stalls(at), 0.99)),
        "undisturbed_p50_ms": milliseconds(percentile(load.stalls(quiet), 0.5)),
        "undisturbed_p99_ms": milliseconds(percentile(load.stalls(quiet), 0.99)),
        "token_ms": milliseconds(percentile(load.gaps(at, over), 0.5)),
        "token_undisturbed_ms": milliseconds(percentile(load.gaps(quiet, at), 0.5)),
        "lost": len(lost),
        "noticed_ms": [milliseconds(incident["at"] - said_at) for incident in lost],
        "back_ms": milliseconds(back - over),
    }


def line_of(row: Row) -> str:
    return (
        f"{row['case']:<40} {row['requests']:>5} requests: {row['failed']} failed, {row['altered']} altered; stall "
        f"{row['stall_p50_ms']} ms, p99 {row['stall_p99_ms']}, undisturbed {row['undisturbed_p50_ms']} and "
        f"{row['undisturbed_p99_ms']}; {row['token_ms']} ms a token, before {row['token_undisturbed_ms']}; "
        f"{row['lost']} lost, noticed after {row['noticed_ms']} ms; back after {row['back_ms']} ms"
    )
