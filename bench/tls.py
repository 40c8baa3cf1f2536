"""`python -m bench.tls`: what encryption between two hosts costs, as p50 of the time between two tokens of a stream.

Two runs stand at once, one with certificates and one without, each with its attention node in one network namespace and
two expert nodes in another. They are asked in turns, so that a machine that is busy with something else is so for both.
Needs Linux, root, ip(8) and afserve[tls]; says "not measured" without.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import psutil

from bench.m2n import FORK, save
from bench.m2n_hosts import ADDRESSES, enter, middle, possible, two_hosts
from bench.origin import ROOT, origin

AFSERVE = (sys.executable, "-m", "afserve")
EXPERTS, ATTENTION = 0, 1  # of the namespaces
READY_SECONDS, BURST_SECONDS = 120.0, 600.0
WORDS = "import os\n"
CLUSTER = """
micro_batches = 2
[model]
{model}
[attention]
nodes = 1
tensor_parallel = 1
batch = {batch}
[experts]
nodes = 2
[[host]]
address = "{attention}"
role = "attention"
hardware = "cpu-host"
devices = 1
[[host]]
address = "{experts}"
role = "experts"
hardware = "cpu-host"
devices = 2
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One deployment over the two namespaces; `port` is its HTTP port in the attention node's. `parents` are the
    processes that started all others."""

    wire: str
    port: int
    parents: tuple[int, ...]

    def cpu(self) -> float:
        """Seconds that all its processes have computed."""
        found = [psutil.Process(pid) for pid in self.parents]
        found += [child for parent in found for child in parent.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in found)


@contextmanager
def deployed(wire: str, number: int, hosts: Sequence[str], folder: Path, cluster: Path) -> Iterator[Run]:
    """Serves until the end of the block; nothing is left."""
    join, port = f"{ADDRESSES[ATTENTION]}:{7700 + number}", 8000 + number
    trust = ("--certs", str(folder / "host")) if wire == "tls" else ("--insecure-nodes",)
    common = ("--token-file", str(folder / "token"), *trust)
    commands = {
        ATTENTION: ("up", "--cluster", str(cluster), "--listen", join, "--port", str(port)),
        EXPERTS: ("host", "--join", join),
    }
    started = []
    try:
        for host, words in commands.items():
            with open(folder / f"{wire}-{words[0]}.log", "wb") as log:
                inside = ("ip", "netns", "exec", hosts[host], *AFSERVE, *words, *common)
                started.append(subprocess.Popen(inside, cwd=ROOT, stdout=log, stderr=log))
            while not (folder / "token").exists():
                time.sleep(0.05)
        wait_ready(hosts[ATTENTION], port, folder / f"{wire}-up.log")
        yield Run(wire, port, tuple(process.pid for process in started))
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def wait_ready(host: str, port: int, log: Path) -> None:
    ask = ("ip", "netns", "exec", host, "curl", "-sf", "-o", "/dev/null", f"http://127.0.0.1:{port}/ready")
    until = time.monotonic() + READY_SECONDS
    while subprocess.run(ask, check=False).returncode:
        if time.monotonic() > until:
            raise SystemExit(f"bench.tls: not ready within {READY_SECONDS:g} s:\n{log.read_text()}")
        time.sleep(0.2)


async def stream(client: httpx.AsyncClient, model: str, tokens: int) -> list[float]:
    """Seconds between two pieces of one answer; the first comes after the prompt and does not count."""
    body = {
        "model": model,
        "prompt": WORDS,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    found, last = [], 0.0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                if last:
                    found.append(now - last)
                last = now
    return found


async def ask(port: int, sequences: int, tokens: int) -> list[float]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=BURST_SECONDS) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        streams = await asyncio.gather(*(stream(client, model, tokens) for _ in range(sequences)))
    return [seconds for one in streams for seconds in one]


def in_namespace(host: str, port: int, sequences: int, tokens: int, pipe: Connection) -> None:
    enter(host)
    pipe.send(asyncio.run(ask(port, sequences, tokens)))


def burst(host: str, run: Run, sequences: int, tokens: int) -> list[float]:
    mine, theirs = FORK.Pipe()
    process = FORK.Process(target=in_namespace, args=(host, run.port, sequences, tokens, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not mine.poll(BURST_SECONDS):
            raise SystemExit(f"bench.tls: {run.wire} took longer than {BURST_SECONDS:g} s")
        return list(mine.recv())
    finally:
        process.kill()
        process.join()
        mine.close()


def measured(model: str, sequences: int, tokens: int, bursts: int) -> dict[str, object]:
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        certify(folder)
        name = f'path = "{Path(model).resolve()}"' if Path(model).is_dir() else f'name = "{model}"'
        cluster = folder / "cluster.toml"
        cluster.write_text(
            CLUSTER.format(
                model=name,
                batch=max(sequences, 1),
                attention=ADDRESSES[ATTENTION],
                experts=ADDRESSES[EXPERTS],
            )
        )
        runs = [
            stack.enter_context(deployed(wire, number, hosts, folder, cluster))
            for number, wire in enumerate(("plain", "tls"))
        ]
        p50: dict[str, list[float]] = {run.wire: [] for run in runs}
        for run in runs:
            burst(hosts[ATTENTION], run, sequences, tokens)  # warm
        cpu = {run.wire: -run.cpu() for run in runs}
        for _ in range(bursts):
            for run in runs:
                p50[run.wire].append(middle(sorted(burst(hosts[ATTENTION], run, sequences, tokens))))
        for run in runs:
            cpu[run.wire] += run.cpu()
    ratios = sorted(tls / plain for tls, plain in zip(p50["tls"], p50["plain"]))
    return {
        "hosts": "two network namespaces",
        "model": Path(model).name,
        "sequences": sequences,
        "tokens": tokens,
        "bursts": bursts,
        **{f"{wire}_cpu_ms": round(1e3 * seconds / (bursts * tokens), 3) for wire, seconds in cpu.items()},
        **{f"{wire}_p50_ms": round(1e3 * middle(sorted(found)), 3) for wire, found in p50.items()},
        "over_plain": round(middle(ratios), 4),
        "over_plain_spread": [round(ratios[0], 4), round(ratios[-1], 4)],
    }


def certify(folder: Path) -> None:
    """One certificate for both namespaces: who is refused is not measured here."""
    from afserve.launch.sites.authority import Subject, issue, make_authority
    from afserve.tls import CertifiedRole

    make_authority(folder / "authority", 1)
    issue(folder / "authority", Subject("bench", tuple(CertifiedRole)), folder / "host", 1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tls", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="nano", help="bundled name, or a folder (bench.make_checkpoint makes one)"
    )
    parser.add_argument("--sequences", type=int, default=1, help="streams at once")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--bursts", type=int, default=7, help="how often the two take turns")
    parser.add_argument("--json", action="store_true", help="one object instead of words")
    parser.add_argument("--save", action="store_true", help="append to bench/results/tls.jsonl")
    options = parser.parse_args()
    if not possible() or find_spec("cryptography") is None or shutil.which("curl") is None:
        print("not measured: needs Linux, root, ip(8), curl and pip install 'afserve[tls]'")
        return
    found = measured(options.model, options.sequences, options.tokens, options.bursts)
    print(json.dumps(found) if options.json else line(found), flush=True)
    if options.save:
        save(ROOT / "bench" / "results" / "tls.jsonl", {**found, **origin()})


def line(found: dict[str, object]) -> str:
    return (
        f"{found['model']}, {found['sequences']} at once: plain {found['plain_p50_ms']} ms, "
        f"TLS {found['tls_p50_ms']} ms between tokens, {found['over_plain']} x {found['over_plain_spread']}"
    )


if __name__ == "__main__":
    main()
