"""What clients notice when nodes are killed and stopped, in a real deployment under a steady load.

    python -m bench.faults [--quick] [--json] [--save]

nano on 2 attention and 3 expert nodes as real processes; greedy streams begin at a fixed rate. Each case breaks one
node after another, and between two faults looks at a moment in which nothing happens: the undisturbed stall beside it.
A stall is the longest wait for a token of a stream that was open at the moment. Every stream is compared with an
undisturbed one.
"""

import argparse
import asyncio
import json
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from afserve.client import Client
from bench.faults_load import Load, altered, failed, percentile
from bench.origin import ROOT, origin

RESULTS = ROOT / "bench" / "results" / "faults.jsonl"
NODES = ("--attention", "2", "--experts", "3")
COPIES = ("--expert-copies", "2")
AROUND_S = 3.0  # throughput is counted over so long before a fault, and from BACK_S after it
BACK_S = 5.0
READY_S = 120.0
FOR_EVER = 3600.0
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of fault. `stopped` in seconds: None kills, FOR_EVER lasts longer than the case."""

    name: str
    role: str
    flags: tuple[str, ...]
    stopped: float | None = None
    rare: bool = False  # takes long: fewer of them


CASES = (
    Case("expert node killed, two copies", "expert", COPIES),
    Case("attention node killed", "attention", COPIES),
    Case("expert node killed, experts reloaded", "expert", ()),
    Case("expert node stopped for 1 s", "expert", COPIES, 1.0, rare=True),
    Case("expert node stopped for 10 s", "expert", COPIES, 10.0, rare=True),
    Case("expert node stopped for ever", "expert", COPIES, FOR_EVER, rare=True),
    Case("attention node stopped for 1 s", "attention", COPIES, 1.0, rare=True),
    Case("attention node stopped for 10 s", "attention", COPIES, 10.0, rare=True),
    Case("attention node stopped for ever", "attention", COPIES, FOR_EVER, rare=True),
)


@dataclass(slots=True)
class Seen:
    """Of all faults of a case: seconds, and tokens per second before and after."""

    stalls: list[float] = field(default_factory=list)
    undisturbed: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)


class Deployment:
    """A running server, asked by HTTP with its admin key."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._client = Client(url, api_key=key)

    def status(self) -> Any:
        return self._client.status()

    def break_one(self, node: str, stopped: float | None) -> None:
        """The server does it: it starts the node again without counting how often."""
        if stopped is None:
            self._client.fault(node, "kill")
        else:
            self._client.fault(node, "stop", stopped)

    def serving(self) -> dict[str, int]:
        return {n["name"]: n["pid"] for n in self.status()["nodes"] if n["state"] == "ready"}

    async def wait_whole(self, not_pid: int | None = None) -> None:
        """Until all nodes serve, none of them in this process."""
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            status = await asyncio.to_thread(self.status)
            pids = [node["pid"] for node in status["nodes"] if node["state"] == "ready"]
            if len(pids) == sum(status["wanted"].values()) and not_pid not in pids:
                return
            await asyncio.sleep(0.05)
        raise RuntimeError(f"not all nodes serve {READY_S:.0f} s after a fault: {status['nodes']}")


@contextmanager
def serving(flags: tuple[str, ...]) -> Iterator[Deployment]:
    """Raises RuntimeError where it does not start or end well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    key = secrets.token_hex()
    with tempfile.TemporaryFile("w+") as log, tempfile.NamedTemporaryFile("w") as key_file:
        key_file.write(key)
        key_file.flush()
        flags = (*flags, "--admin-key-file", key_file.name)
        command = [sys.executable, "-m", "afserve", "up", *NODES, *flags, "--port", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            _wait_ready(process, url)
            yield Deployment(url, key)
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(60)
        if code:
            log.seek(0)
            raise RuntimeError(f"afserve up ended with {code}: {log.read()}")


def _wait_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"afserve up ended with {process.returncode} before it was ready")
        try:
            if httpx.get(f"{url}/ready").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise RuntimeError(f"afserve up was not ready in {READY_S:.0f} s")


async def play(case: Case, here: Deployment, faults: int, rate: float, tokens: int) -> Row:
    """All faults of one case under one load."""
    seen, load = Seen(), Load(here.url, rate, tokens)
    reference = await load.reference()
    async with load:
        await asyncio.sleep(AROUND_S)
        for turn in range(faults):
            quiet = time.monotonic()
            await asyncio.sleep(AROUND_S)
            at = time.monotonic()
            await _break_one(case, here, turn, seen)
            await asyncio.sleep(max(0.0, at + BACK_S + AROUND_S - time.monotonic()))
            seen.undisturbed += load.stalls(quiet)
            seen.stalls += load.stalls(at)
            seen.before.append(load.rate(at - AROUND_S, at))
            seen.after.append(load.rate(at + BACK_S, at + BACK_S + AROUND_S))
    status = here.status()
    return {
        "bench": "faults",
        "case": case.name,
        "faults": faults,
        "requests": len(load.answers),
        "tokens": tokens,
        "rate": rate,
        "failed": failed(load.answers),
        "altered": altered(load.answers, reference),
        "stall_p50_ms": _ms(percentile(seen.stalls, 0.5)),
        "stall_p99_ms": _ms(percentile(seen.stalls, 0.99)),
        "undisturbed_p50_ms": _ms(percentile(seen.undisturbed, 0.5)),
        "undisturbed_p99_ms": _ms(percentile(seen.undisturbed, 0.99)),
        "back_ms": _ms(statistics.median(seen.back)),
        "tokens_per_second": round(statistics.median(seen.before)),
        "throughput_after": round(sum(seen.after) / max(1e-9, sum(seen.before)), 3),
        "lost": sum(sum(causes.values()) for causes in status["lost"].values()),
    }


async def _break_one(case: Case, here: Deployment, turn: int, seen: Seen) -> None:
    """Returns when all nodes serve, in the process that was broken where that may go on."""
    nodes = {name: pid for name, pid in here.serving().items() if name.startswith(case.role)}
    name = sorted(nodes)[turn % len(nodes)]
    pid, began = nodes[name], time.monotonic()
    here.break_one(name, case.stopped)
    goes_on = case.stopped is not None and case.stopped < FOR_EVER
    if goes_on:
        await asyncio.sleep(case.stopped or 0.0)
    await here.wait_whole(None if goes_on else pid)
    seen.back.append(time.monotonic() - began)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    for case in CASES:
        faults = max(1, options.faults // 4) if case.rare else options.faults
        if options.only and options.only not in case.name:
            continue
        with serving(case.flags) as here:
            row = asyncio.run(play(case, here, faults, options.rate, options.tokens))
        yield {**row, **origin()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.faults", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--faults", type=int, default=20, help="of each case; a quarter where a node is stopped"
    )
    parser.add_argument("--quick", action="store_true", help="three faults of each case")
    parser.add_argument("--rate", type=float, default=4.0, help="requests that begin per second")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--only", help="cases whose name has this in it")
    parser.add_argument("--json", action="store_true", help="rows instead of a table")
    parser.add_argument("--save", nargs="?", const=str(RESULTS), help="append rows to this file")
    options = parser.parse_args()
    if options.quick:
        options.faults = 3
    if not options.json:
        print(HEAD)
    for row in measure(options):
        print(json.dumps(row) if options.json else line_of(row), flush=True)
        if options.save:
            with open(options.save, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


HEAD = (
    f"{'case':<38} {'faults':>6} {'requests':>8} {'failed':>6} {'altered':>7} {'stall ms p50, p99':>18} "
    f"{'undisturbed':>14} {'back ms':>8} {'tokens/s':>8} {'after':>6}"
)


def line_of(row: Row) -> str:
    stall = f"{row['stall_p50_ms']:,} {row['stall_p99_ms']:,}"
    quiet = f"{row['undisturbed_p50_ms']:,} {row['undisturbed_p99_ms']:,}"
    return (
        f"{row['case']:<38} {row['faults']:>6} {row['requests']:>8} {row['failed']:>6} {row['altered']:>7} "
        f"{stall:>18} {quiet:>14} {row['back_ms']:>8} {row['tokens_per_second']:>8} {row['throughput_after']:>6}"
    )


if __name__ == "__main__":
    main()
