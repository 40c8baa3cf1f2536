"""Ping-pong with scripted stage times: real links, expert nodes and shared memory, stages that only take time.

    python -m bench.pipeline                 every experiment; --json: one object a line; --save: keep the rows

A stage is a sleep, as a CPU sees an accelerator at work, so that more nodes than cores do not get in each other's way.
The bound of an attention node is one layer of one micro-batch per stage, by the longer of the two stages as they were
measured in the same run. The real model: bench/pipeline_model.py.
"""

import argparse
import json
import multiprocessing
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier, Event

import torch

from afserve.comm.m2n.bank import Bank
from afserve.comm.m2n.link import ExpertLink
from afserve.comm.m2n.port import ExpertPort
from afserve.comm.m2n.ticket import Ticket
from afserve.comm.transport import Box, Dialled, Header, Layout, Offers, Parcel, Transport, WireType
from afserve.comm.transports import connect
from afserve.engine.expert_node import ExpertNode
from afserve.placement.placement import Placement
from bench.origin import ROOT, origin

FORK = multiprocessing.get_context("fork")
STAGE = 0.008  # seconds
LAYERS = 8
ROWS = 4
WARM = 0.6  # seconds before counting
PERIOD = 2.5  # seconds of counting
SPUN = 0.0003  # seconds at the end of a stage that are not slept


@dataclass(frozen=True)
class Script:
    """`slow` stretches the last attention node's stage; 0 leaves it idle. Times are in stages."""

    name: str
    attention: int = 1
    experts: int = 1
    micro_batches: int = 2
    transfer: float = 0.0
    slow: float = 1.0
    hold: float = 0.001


def stage(seconds: float) -> None:
    until = time.monotonic() + seconds
    time.sleep(max(0.0, seconds - SPUN))
    while time.monotonic() < until:
        pass


class SlowWire:
    """Delivers every message a while after it was posted, however busy the sender is then."""

    def __init__(self, inner: Transport, seconds: float) -> None:
        self._inner, self._seconds = inner, seconds
        self._later: queue.SimpleQueue[tuple[float, Box]] = queue.SimpleQueue()
        threading.Thread(target=self._deliver, daemon=True).start()

    @property
    def layout(self) -> Layout:
        return self._inner.layout

    @property
    def device(self) -> torch.device:
        return self._inner.device

    @property
    def offers(self) -> Offers:
        return Offers()

    def boxes(self) -> list[Box]:
        return self._inner.boxes()

    def next_sequence(self, box: Box) -> int:
        return self._inner.next_sequence(box)

    def stage(self, box: Box, header: Header) -> Parcel:
        return self._inner.stage(box, header)

    def post(self, box: Box) -> None:
        self._later.put((time.monotonic() + self._seconds, box))

    def ready(self, boxes: Sequence[Box]) -> list[Box]:
        return self._inner.ready(boxes)

    def wait(self, boxes: Sequence[Box], timeout: float) -> list[Box]:
        return self._inner.wait(boxes, timeout)

    def take(self, box: Box) -> Parcel:
        return self._inner.take(box)

    def refuse(self, box: Box, reason: str) -> None:
        self._inner.refuse(box, reason)

    def dial(self, expert: int, address: str, timeout: float) -> Dialled:
        return self._inner.dial(expert, address, timeout)

    def attach(self, dialled: Dialled) -> None:
        self._inner.attach(dialled)

    def detach(self, expert: int) -> None:
        self._inner.detach(expert)

    def close(self) -> None:
        self._inner.close()

    def _deliver(self) -> None:
        while True:
            at, box = self._later.get()
            time.sleep(max(0.0, at - time.monotonic()))
            self._inner.post(box)


class ScriptedBank(Bank):
    """Takes a stage for the rows of all attention nodes together, less for fewer rows."""

    def __init__(self, attention: int) -> None:
        self._seconds = STAGE / attention / ROWS

    def forward(self, layer, x_RH, slot_RK, weight_RK, out_RH, add=False) -> None:
        stage(self._seconds * len(x_RH))
        out_RH.copy_(x_RH)


def layout_of(script: Script) -> Layout:
    wire = WireType.FLOAT32
    return Layout(16, script.experts, ROWS, script.micro_batches, LAYERS, 1, wire, wire)


def wired(end: Transport, script: Script) -> Transport:
    return SlowWire(end, script.transfer * STAGE) if script.transfer else end


def expert(rank: int, script: Script, pipe: Connection, stop: Event) -> None:
    torch.set_num_threads(1)
    end, address = connect.listen(
        "shm", expert=rank, attention_nodes=script.attention, layout=layout_of(script)
    )
    pipe.send(address)
    bank = ScriptedBank(script.attention)
    node = ExpertNode(ExpertPort(wired(end, script)), bank, longest_hold=script.hold)
    while not stop.is_set():
        if not node.poll():
            node.wait(0.05)
    stats = node.stats()
    pipe.send((stats.messages, stats.calls, stats.hold_seconds, stats.busy_seconds))
    node.close()


def attention(rank: int, script: Script, addresses: list[str], pipe: Connection, meet: Barrier) -> None:
    torch.set_num_threads(1)
    layout = layout_of(script)
    end = wired(connect.connect(addresses, attention=rank, layout=layout, timeout=10.0), script)
    placement = Placement.contiguous(layers=LAYERS, experts=script.experts, nodes=script.experts)
    link = ExpertLink(end, attention=rank, layout=layout, placement=placement)
    pace = script.slow if rank == script.attention - 1 else 1.0
    meet.wait()
    begin = time.monotonic() + WARM
    pipe.send(count_layers(link, script, pace, begin, begin + PERIOD) if pace else (0, 0.0))
    link.close()


def count_layers(
    link: ExpertLink, script: Script, pace: float, begin: float, end: float
) -> tuple[int, float]:
    """Layers that end between two times, all micro-batches taking turns, and the mean stage in seconds."""
    x_TH = torch.ones(ROWS, 16)
    expert_TK = torch.arange(script.experts, dtype=torch.int32).repeat(ROWS, 1)
    weight_TK = torch.ones(ROWS, script.experts)
    tickets: dict[int, Ticket] = {}
    layer = [0] * script.micro_batches
    counted = stages = 0
    spent = 0.0
    while time.monotonic() < end:
        moved = False
        for m in range(script.micro_batches):
            if m in tickets:
                if not link.ready(tickets[m]):
                    continue
                link.combine(tickets.pop(m))
                layer[m] = (layer[m] + 1) % LAYERS
                counted += begin <= time.monotonic() < end
            started = time.monotonic()
            stage(STAGE * pace)
            spent += time.monotonic() - started
            stages += 1
            tickets[m] = link.dispatch(x_TH, expert_TK, weight_TK, layer=layer[m], micro_batch=m)
            moved = True
        if not moved:
            link.wait(list(tickets.values()), 0.05)
    return counted, spent / stages


def run(script: Script) -> dict[str, object]:
    stop, meet = FORK.Event(), FORK.Barrier(script.attention)
    experts = [launch(expert, rank, script, stop=stop) for rank in range(script.experts)]
    addresses = [pipe.recv() for _, pipe in experts]
    fronts = [launch(attention, rank, script, addresses, meet=meet) for rank in range(script.attention)]
    counts = [pipe.recv() for _, pipe in fronts]
    stop.set()
    messages, calls, held, busy = (sum(column) for column in zip(*(pipe.recv() for _, pipe in experts)))
    for process, _ in (*fronts, *experts):
        process.join()
    alike = counts[:-1] if script.slow != 1.0 else counts
    each = sum(count for count, _ in alike) / len(alike)
    own = sum(seconds for _, seconds in alike) / len(alike)
    theirs = script.attention * busy / max(messages, 1)
    return {
        "experiment": script.name,
        "nodes": f"{script.attention}x{script.experts}",
        "micro_batches": script.micro_batches,
        "transfer_stages": script.transfer,
        "layers_per_s": round(each / PERIOD, 2),
        "stage_ms": [round(1e3 * own, 2), round(1e3 * theirs, 2)],
        "of_bound": round(each * max(own, theirs) / PERIOD, 3),
        "messages_per_call": round(messages / max(calls, 1), 2),
        "hold_us_per_call": round(held / max(calls, 1) * 1e6, 1),
    }


def launch(target, rank, script, *args, **events):
    mine, theirs = FORK.Pipe()
    process = FORK.Process(target=target, args=(rank, script, *args, theirs, *events.values()), daemon=True)
    process.start()
    theirs.close()
    return process, mine


def scripts() -> Iterator[Script]:
    equal = Script("equal stages")
    yield from (replace(equal, micro_batches=m) for m in (1, 2, 3))
    yield from (
        replace(equal, name="transfer a quarter", micro_batches=m, transfer=0.25) for m in (1, 2, 3, 4)
    )
    yield from (Script("ratio", attention=a, experts=f, micro_batches=3) for a, f in ((1, 2), (2, 1), (3, 2)))
    for name, slow in (("three alike", 1.0), ("one of three idle", 0.0), ("one of three 10x slower", 10.0)):
        yield Script(name, attention=3, experts=2, micro_batches=3, slow=slow)
    yield Script("three alike, no hold", attention=3, experts=2, micro_batches=3, hold=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--save", action="store_true", help="append to bench/results/pipeline.jsonl")
    options = parser.parse_args()
    known = origin()
    for script in scripts():
        row = run(script)
        print(
            json.dumps(row) if options.json else "  ".join(f"{key} {value}" for key, value in row.items()),
            flush=True,
        )
        if options.save:
            with (ROOT / "bench" / "results" / "pipeline.jsonl").open("a") as file:
                file.write(json.dumps({**row, **known}) + "\n")


if __name__ == "__main__":
    main()
