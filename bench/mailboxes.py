"""`python -m bench.mailboxes`: what one node with many peers reserves for mailboxes, and what of it is in memory.

Two processes over a real transport. One is measured: an expert node with `--peers` attention nodes, or an attention
node with as many expert nodes; the other plays all peers. The shape is DeepSeek-V3's: 7,168 columns, 512 rows a
message at most, two micro-batches. In a round every box carries a dispatch and its answer.

Figures: bytes of addresses; seconds until all are connected; MiB of resident memory that connections, a round of 8
rows, one of 256 rows, another one of 8 rows and, after attention nodes got a row limit of 8, a last one of 8 rows add.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import torch

from afserve.comm.mailbox import lanes
from afserve.comm.mailbox.segment import SegmentMap
from afserve.comm.transport import Box, Header, Kind, Layout, Transport, WireType
from afserve.comm.transports import connect
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "mailboxes.jsonl"
SECONDS = 120.0
DECODE, PREFILL = 8, 256
LAYOUT = Layout(
    hidden=7168,
    top_k=8,
    max_rows=512,
    micro_batches=2,
    layers=58,
    slots=3,
    dispatch_wire=WireType.BFLOAT16,
    combine_wire=WireType.FLOAT32,
)


def ask(end: Transport, rows: int) -> None:
    """An attention node's round: every box, one after another."""
    for box in end.boxes():
        sequence = end.next_sequence(box)
        parcel = end.stage(box, Header(Kind.DISPATCH, 0, sequence, 0, rows, LAYOUT.dispatch_wire))
        assert parcel.slot_RK is not None and parcel.weight_RK is not None
        parcel.x_RH.fill_(1.0)
        parcel.slot_RK.zero_()
        parcel.weight_RK.fill_(1.0)
        end.post(box)
        for got in taken(end, [box]):
            assert end.take(got).header.rows == rows


def reply(end: Transport, boxes: list[Box]) -> None:
    """An expert node's: one answer for each of `boxes`."""
    for box in taken(end, boxes):
        header = end.take(box).header
        answer = header._replace(kind=Kind.COMBINE, wire=LAYOUT.combine_wire)
        end.stage(box, answer).x_RH.fill_(2.0)
        end.post(box)


def taken(end: Transport, boxes: list[Box]) -> Iterator[Box]:
    """Each once, as their messages come."""
    left, until = set(boxes), time.monotonic() + SECONDS
    while left:
        if time.monotonic() > until:
            raise TimeoutError(f"{len(left)} messages did not come within {SECONDS:.0f} s")
        for box in end.wait(sorted(left), 0.01):
            left.discard(box)
            yield box


def limit(ends: list[Transport], attention_nodes: int) -> None:
    """They all decode from now on."""
    for end in ends:
        limiting = end.offers.limiting
        assert limiting is not None
        for attention in range(attention_nodes):
            limiting.limit(attention, DECODE)


def peers_part(kind: str, side: str, count: int) -> None:
    """Plays `count` attention nodes, or expert nodes. A line in is an address, or the rows of a round; to each there is
    an answer."""
    with ExitStack() as opened:
        ends: list[Transport] = []
        if side == "attention":
            print(json.dumps("here"), flush=True)
            address = json.loads(sys.stdin.readline())
            for index in range(count):
                ends.append(connect.connect([address], attention=index, layout=LAYOUT, timeout=SECONDS))
                opened.callback(ends[-1].close)
            print(json.dumps("connected"), flush=True)
        else:
            addresses = []
            for index in range(count):
                end, address = connect.listen(kind, expert=index, attention_nodes=1, layout=LAYOUT)
                opened.callback(end.close)
                ends.append(end)
                addresses.append(address)
            print(json.dumps(addresses), flush=True)
        while line := sys.stdin.readline():
            if line.strip() == "limit":
                limit(ends, count)
                continue
            for end in ends:
                if side == "attention":
                    ask(end, int(line))
                else:
                    reply(end, end.boxes())
            print(json.dumps("done"), flush=True)


def measured(kind: str, side: str, count: int) -> dict[str, float]:
    """`side` is what the measured node is."""
    other = "attention" if side == "expert" else "expert"
    kept = str(lanes.KEPT_BYTES >> 20)
    arguments = ["--part", other, "--kind", kind, "--peers", str(count), "--keep-mib", kept]
    process = psutil.Process(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-m", "bench.mailboxes", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        said = json.loads(child.stdout.readline())
        before, began = process.memory_info().rss, time.perf_counter()
        if side == "expert":
            end, address = connect.listen(kind, expert=0, attention_nodes=count, layout=LAYOUT)
            print(json.dumps(address), file=child.stdin, flush=True)
            json.loads(child.stdout.readline())
            end.ready([])
        else:
            end = connect.connect(said, attention=0, layout=LAYOUT, timeout=SECONDS)
        seconds = time.perf_counter() - began

        def resident() -> float:
            return round(float(process.memory_info().rss - before) / 2**20, 1)

        row: dict[str, float] = {"reserved_gib": round(reserved(kind, side, count) / 2**30, 1)}
        row |= {"connect_s": round(seconds, 2), "connected_mib": resident()}
        for name, rows in (
            ("decode", DECODE),
            ("prefill", PREFILL),
            ("decode_again", DECODE),
            ("decode_limited", DECODE),
        ):
            if name == "decode_limited":
                limit([end], count)
                print("limit", file=child.stdin, flush=True)
            print(rows, file=child.stdin, flush=True)
            if side == "expert":
                for attention in range(count):
                    reply(end, [box for box in end.boxes() if box.attention == attention])
            else:
                ask(end, rows)
            json.loads(child.stdout.readline())
            row[f"{name}_mib"] = resident()
        child.stdin.close()
        child.wait(SECONDS)
        end.close()
    return row


def reserved(kind: str, side: str, count: int) -> int:
    if side == "expert":
        return SegmentMap(LAYOUT, 0, count).total_bytes
    return count * SegmentMap(LAYOUT, 0, 1).total_bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.mailboxes", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--kind", choices=("shm", "tcp", "dist"), help="of transport; shm and tcp by default")
    parser.add_argument("--peers", type=int, default=64)
    parser.add_argument("--keep-mib", type=int, help=f"{lanes.KEPT_BYTES >> 20} by default")
    parser.add_argument("--save", nargs="?", const=str(OUT), help="append rows to this file")
    parser.add_argument("--part", choices=("attention", "expert"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.keep_mib is not None:
        lanes.KEPT_BYTES = options.keep_mib << 20
    if options.part:
        peers_part(options.kind, options.part, options.peers)
        return
    for kind in (options.kind,) if options.kind else ("shm", "tcp"):
        for side in ("expert", "attention"):
            row = {"bench": "mailboxes", "kind": kind, "node": side, "peers": options.peers}
            row |= measured(kind, side, options.peers)
            print(json.dumps(row), flush=True)
            if options.save:
                with Path(options.save).open("a") as file:
                    file.write(json.dumps({**row, **origin()}) + "\n")


if __name__ == "__main__":
    main()
