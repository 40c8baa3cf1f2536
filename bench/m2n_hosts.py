"""Two network namespaces joined by a virtual cable, as two hosts: our transports against plain gloo send/recv.

python -m bench.m2n_hosts --json        one object a line; needs root and ip(8), says "not measured" without

The wires take turns in short bursts, so that a machine that is busy with something else is so for all of them;
`over_gloo` compares the medians of one turn. `fill` is a copy of the rows into a mailbox, one on either side of a round
trip, which plain gloo, sending what it got, does without.
"""

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch

from bench.m2n import FORK, KIB, QUANTILES, save
from bench.m2n_wires import (
    Case,
    Side,
    gloo_attention,
    gloo_expert,
    mailbox_attention,
    mailbox_expert_on,
)
from bench.origin import ROOT, origin

SIZES = (2 * KIB, 32 * KIB, 128 * KIB, 256 * KIB, 1024 * KIB, 8192 * KIB)
ADDRESSES = ("10.213.8.1", "10.213.8.2")  # the expert nodes' host, then the attention nodes'
PEERS: dict[str, tuple[Side, Side]] = {
    "gloo": (gloo_attention, gloo_expert),
    **{
        kind: (mailbox_attention(kind), mailbox_expert_on(kind, ADDRESSES[0]))
        for kind in ("dist", "tcp", "pairs")
    },
}
LONGEST = 60.0
_NETWORK = 0x40000000  # CLONE_NEWNET


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces that reach each other and nobody else."""
    names = f"afsb{os.getpid() % 100000}x", f"afsb{os.getpid() % 100000}y"
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", f"v{names[0]}", "netns", names[0], "type", "veth", "peer", "name", f"v{names[1]}",
           "netns", names[1])  # fmt: skip
        for name, address in zip(names, ADDRESSES):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", f"v{name}")
            ip("-n", name, "link", "set", f"v{name}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def enter(name: str) -> None:
    """Move this process into a namespace; torch's processes are forked into theirs."""
    handle = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(handle, _NETWORK):
        raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")
    os.close(handle)
    os.environ["GLOO_SOCKET_IFNAME"] = f"v{name}"  # for plain gloo, which has no other way of being told


def run_side(side: Side, host: str, rank: int, case: Case, meet: object, pipe: Connection) -> None:
    enter(host)
    torch.set_num_threads(1)
    pipe.send(side(rank, case, meet))  # type: ignore[arg-type]


def burst(case: Case, hosts: tuple[str, str]) -> list[float]:
    """Seconds of every round trip of every attention node."""
    attention, expert = PEERS[case.wire]
    meet = FORK.Barrier(case.attention + case.experts)
    jobs = [(attention, hosts[1], a) for a in range(case.attention)]
    jobs += [(expert, hosts[0], f) for f in range(case.experts)]
    running, found = [], []
    for side, host, rank in jobs:
        mine, theirs = FORK.Pipe()
        process = FORK.Process(target=run_side, args=(side, host, rank, case, meet, theirs), daemon=True)
        process.start()
        theirs.close()
        running.append((process, mine))
    try:
        for _, mine in running:
            if not mine.poll(LONGEST):
                raise SystemExit(f"bench.m2n_hosts: {case} took longer than {LONGEST:g} s")
            found += mine.recv()[case.warm :]
    finally:
        for process, mine in running:
            process.join(2.0)
            process.kill()
            process.join()
            mine.close()
    return found


def rows(
    sizes: Sequence[int], pairs: Sequence[tuple[int, int]], bursts: int, wires: Sequence[str]
) -> Iterator[dict[str, object]]:
    with two_hosts() as hosts:
        for attention, experts in pairs:
            for size in sizes:
                rounds = max(20, min(300, (32 << 20) // size // (attention * experts)))
                seconds: dict[str, list[list[float]]] = {wire: [] for wire in wires}
                for _ in range(bursts):
                    for wire in wires:
                        with tempfile.TemporaryDirectory() as folder:
                            case = Case(wire, size, attention, experts, rounds, rounds // 10, folder)
                            seconds[wire].append(sorted(burst(case, hosts)))
                yield from compared(size, f"{attention}x{experts}", seconds)


def compared(size: int, pairs: str, seconds: dict[str, list[list[float]]]) -> Iterator[dict[str, object]]:
    """`over_gloo` is the median over bursts of one wire's median by gloo's of the same turn."""
    fill = copy_seconds(size)
    for wire, bursts in seconds.items():
        together = sorted(one for burst in bursts for one in burst)
        at = {name: together[min(len(together) - 1, int(q * len(together)))] for name, q in QUANTILES.items()}
        ratios = sorted(middle(mine) / middle(gloo) for mine, gloo in zip(bursts, seconds["gloo"]))
        yield {
            "transport": wire,
            "hosts": "two network namespaces",
            "bytes": size,
            "pairs": pairs,
            **{f"{name.replace('.', '_')}_us": round(1e6 * value, 1) for name, value in at.items()},
            "over_gloo": round(middle(ratios), 3),
            "over_gloo_spread": [round(ratios[0], 3), round(ratios[-1], 3)],
            "fill_us": round(1e6 * fill, 1) if wire != "gloo" else 0.0,
            "bursts": len(bursts),
            "rounds": len(together),
        }


def middle(ordered: Sequence[float]) -> float:
    return ordered[len(ordered) // 2]


def copy_seconds(size: int) -> float:
    """One copy of `size` bytes; a round trip through mailboxes has two, one on either side."""
    there, back = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    seconds = []
    for _ in range(50):
        began = time.perf_counter()
        there.copy_(back)
        seconds.append(time.perf_counter() - began)
    return middle(sorted(seconds))


def possible() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") is not None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.m2n_hosts", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one object a line instead of a table")
    parser.add_argument("--sizes", default=",".join(str(size // KIB) for size in SIZES), help="KiB each way")
    parser.add_argument("--pairs", default="1x1", help="comma-separated, such as 1x1,2x3")
    parser.add_argument("--wires", default=",".join(PEERS), help="gloo among them")
    parser.add_argument("--bursts", type=int, default=5, help="how often the wires take turns")
    parser.add_argument("--save", action="store_true", help="append to bench/results/m2n_hosts.jsonl")
    options = parser.parse_args()
    if not possible():
        print("not measured: network namespaces need Linux, root and ip(8)")
        return
    torch.set_num_threads(1)
    sizes = [int(size) * KIB for size in options.sizes.split(",")]
    pairs = [(int(a), int(f)) for a, _, f in (pair.partition("x") for pair in options.pairs.split(","))]
    path, known = ROOT / "bench" / "results" / "m2n_hosts.jsonl", origin()
    for found in rows(sizes, pairs, options.bursts, options.wires.split(",")):
        print(json.dumps(found) if options.json else line(found), flush=True)
        if options.save:
            save(path, {**found, **known})


def line(found: dict[str, object]) -> str:
    return (
        f"{found['transport']:6} {found['pairs']:4} {int(str(found['bytes'])) // KIB:6} KiB  "
        f"p50 {found['p50_us']:>9} us  p99 {found['p99_us']:>9} us  "
        f"{found['over_gloo']:>6} x gloo {found['over_gloo_spread']}  fill {found['fill_us']} us"
    )


if __name__ == "__main__":
    main()
