"""An expert node that is killed under scripted stages: what the others still make, beside their share of the work.

    python -m bench.pipeline_losses [--kills 20] [--json] [--save]

Real links, expert nodes and shared memory; stages only take time, and the expert nodes' is the longer one, so that
what they make is their number. Each expert is on two of three nodes. Nothing is started again: of three nodes two
survive, and layers per second may fall to 2/3 of before. Nobody tells the attention nodes: how soon a loss is noticed
and what clients see of it is in `bench.faults`.
"""

import argparse
import json
import os
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

import torch

from afserve.comm.m2n.bank import Bank
from afserve.comm.m2n.link import ExpertLink
from afserve.comm.m2n.port import ExpertPort
from afserve.comm.m2n.ticket import Ticket
from afserve.comm.transport import Layout, WireType
from afserve.comm.transports import connect
from afserve.engine.expert_node import ExpertNode
from afserve.placement.placement import LayerPlacement, Placement
from bench.origin import ROOT, origin
from bench.pipeline import FORK, LAYERS, launch, stage

ATTENTION, NODES, MICRO_BATCHES = 2, 3, 3
EXPERTS, TOP_K, ROWS = 12, 4, 48
ATTENTION_STAGE, PAIR = 0.002, 0.0000625  # seconds; PAIR: of one row at one expert
WARM, PERIOD, BACK = 0.6, 2.0, 5.0  # seconds; BACK: from a loss until it counts again
WAIT = 30.0  # seconds within which any process answers
Row = dict[str, object]


@dataclass(frozen=True)
class Counted:
    """Of one attention node: layers per second."""

    before: float
    after: float


class PacedBank(Bank):
    """Takes time for each row at each of its experts."""

    def forward(self, layer, x_RH, slot_RK, weight_RK, out_RH, add=False) -> None:
        stage(PAIR * int((slot_RK >= 0).sum()))
        out_RH.copy_(x_RH)


def layout() -> Layout:
    wire = WireType.FLOAT32
    return Layout(16, TOP_K, ROWS, MICRO_BATCHES, LAYERS, EXPERTS * 2 // NODES, wire, wire)


def placed() -> Placement:
    """Each expert on two nodes, half of its rows on either; all nodes hold as many."""
    homes = [(expert % NODES, (expert + 1) % NODES) for expert in range(EXPERTS)]
    slots = tuple(tuple(e for e in range(EXPERTS) if node in homes[e]) for node in range(NODES))
    share = tuple((0.5,) * len(row) for row in slots)
    return Placement(0, NODES, EXPERTS, (LayerPlacement(slots, share),) * LAYERS)


def expert(rank: int, script: None, pipe: Connection, stop: Event) -> None:
    torch.set_num_threads(1)
    end, address = connect.listen("shm", expert=rank, attention_nodes=ATTENTION, layout=layout())
    pipe.send((os.getpid(), address))
    node = ExpertNode(ExpertPort(end), PacedBank())
    while not stop.is_set():
        if not node.poll():
            node.wait(0.05)
    node.close()


def attention(rank: int, script: None, addresses: list[str], pipe: Connection, meet, killed) -> None:
    torch.set_num_threads(1)
    end = connect.connect(addresses, attention=rank, layout=layout(), timeout=10.0)
    link = ExpertLink(end, attention=rank, layout=layout(), placement=placed())
    meet.wait(WAIT)
    pipe.send(count(link, killed))
    link.close()


def count(link: ExpertLink, killed) -> Counted:
    """Layers that end in a period before the kill and in one that begins `BACK` after it."""
    expert_TK = torch.tensor([[(row + k) % EXPERTS for k in range(TOP_K)] for row in range(ROWS)])
    expert_TK, weight_TK = expert_TK.int(), torch.full((ROWS, TOP_K), 1.0 / TOP_K)
    tickets: dict[int, Ticket] = {}
    layer = [0] * MICRO_BATCHES
    ends: list[float] = []
    began, lost = time.monotonic(), None
    while lost is None or time.monotonic() < lost + BACK + PERIOD:
        lost = killed.value or None
        moved = False
        for m in range(MICRO_BATCHES):
            if m in tickets:
                if not link.ready(tickets[m]):
                    continue
                link.combine(tickets.pop(m))
                layer[m] = (layer[m] + 1) % LAYERS
                ends.append(time.monotonic())
            stage(ATTENTION_STAGE)
            x_TH = torch.randn(ROWS, 16)  # which replica a row takes depends on what is in it
            tickets[m] = link.dispatch(x_TH, expert_TK, weight_TK, layer=layer[m], micro_batch=m)
            moved = True
        if not moved:
            link.wait(list(tickets.values()), 0.05)
        assert time.monotonic() < began + WAIT, "nobody was killed"
    before = sum(lost - PERIOD <= at < lost for at in ends) / PERIOD
    after = sum(lost + BACK <= at < lost + BACK + PERIOD for at in ends) / PERIOD
    return Counted(before, after)


def run(turn: int) -> list[Counted]:
    """One kill: what each attention node counted."""
    stop, meet, killed = FORK.Event(), FORK.Barrier(ATTENTION + 1), FORK.Value("d", 0.0)
    experts = [launch(expert, rank, None, stop=stop) for rank in range(NODES)]
    met = [pipe.recv() for _, pipe in experts]
    addresses = [address for _, address in met]
    fronts = [launch(attention, rank, None, addresses, meet=meet, killed=killed) for rank in range(ATTENTION)]
    meet.wait(WAIT)
    time.sleep(WARM + PERIOD)
    os.kill(met[turn % NODES][0], signal.SIGKILL)
    killed.value = time.monotonic()
    for _, pipe in fronts:
        assert pipe.poll(WAIT), "an attention node does not answer"
    counts = [pipe.recv() for _, pipe in fronts]
    stop.set()
    for process, _ in (*fronts, *experts):
        process.join(WAIT)
    return counts


def measure(kills: int) -> Iterator[Row]:
    found = [counted for turn in range(kills) for counted in run(turn)]
    ratios = sorted(c.after / c.before for c in found)
    share = (NODES - 1) / NODES
    yield {
        "experiment": "expert node killed, scripted stages",
        "nodes": f"{ATTENTION}x{NODES}",
        "micro_batches": MICRO_BATCHES,
        "kills": kills,
        "layers_per_s": round(statistics.median(c.before for c in found), 1),
        "after": round(statistics.median(ratios), 3),
        "after_spread": [round(ratios[0], 3), round(ratios[-1], 3)],
        "survivors_share": round(share, 3),
        "of_share": round(statistics.median(ratios) / share, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pipeline_losses", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--save", action="store_true", help="append to bench/results/pipeline.jsonl")
    options = parser.parse_args()
    for row in measure(options.kills):
        print(json.dumps(row) if options.json else "  ".join(f"{key} {value}" for key, value in row.items()))
        if options.save:
            with (ROOT / "bench" / "results" / "pipeline.jsonl").open("a") as file:
                file.write(json.dumps({**row, **origin()}) + "\n")


if __name__ == "__main__":
    main()
