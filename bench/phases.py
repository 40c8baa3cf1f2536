"""Decode beside a flood of prompts at one expert node: the real node, stages of known length, a clock of its own.

    python -m bench.phases                   every case; --json: one object a line; --save: keep the rows; --quick

Nothing is measured of this machine: a stage only moves the clock forward, so the numbers are the same everywhere. The
expert node is the engine's; attention nodes answer after their stage. `whole` computes prompts' messages in one call
each, as an expert node without pieces does. Prompts are compared with the same prefill nodes without decode nodes.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import torch

from afserve.clock import FakeClock
from afserve.comm import connect
from afserve.comm.m2n.link import ExpertLink, Ticket
from afserve.comm.m2n.port import Arrival, ExpertPort
from afserve.comm.transport import Layout, WireType
from afserve.engine.expert_node import ExpertNode
from afserve.engine.pieces import PieceSize
from afserve.member import AttentionPhase
from afserve.placement.placement import Placement
from bench.origin import ROOT, origin

HIDDEN, LAYERS = 8, 16
JITTER = 0.1  # of a stage: without any, loops fall into step
TURN = 5e-6  # seconds of a poll that finds nothing


@dataclass(frozen=True)
class Node:
    """An attention node: `rows` of each of its micro-batches go through all layers, and again. Seconds."""

    rows: int
    stage: float
    micro_batches: int = 2


@dataclass(frozen=True)
class Case:
    """`call` and `row` are what the experts take, in seconds; `period` is how long is counted, after `warm`."""

    name: str
    decode: tuple[Node, ...]
    prefill: tuple[Node, ...] = ()
    call: float = 30e-6
    row: float = 1e-6
    whole: bool = False
    warm: float = 0.3
    period: float = 3.0


class WholeMessages(PieceSize):
    """What an expert node does that knows no pieces."""

    def rows(self, left: int, quiet: float | None = None) -> int:
        return left


class Bank:
    def __init__(self, clock: FakeClock, case: Case) -> None:
        self._clock, self._case = clock, case

    def forward(self, layer, x_RH, slot_RK, weight_RK, out_RH) -> None:
        self._clock.advance(self._case.call + self._case.row * len(x_RH))
        out_RH.copy_(x_RH)


@dataclass
class Loop:
    """One micro-batch of a node. `due`: when its attention stage is over; `ends`: when each pass through all layers
    was."""

    node: Node
    index: int
    link: ExpertLink
    micro_batch: int
    due: float
    dice: Random = field(default_factory=lambda: Random(1))
    layer: int = 0
    ticket: Ticket | None = None
    ends: list[float] = field(default_factory=list)

    def turn(self, now: float, answered: dict[tuple[int, int], float]) -> None:
        """Take the answer where it is there, dispatch where the stage is over. Stages of micro-batches overlap.

        `answered` has when each loop's last message was: the node may have computed something else since."""
        if self.ticket is not None and self.link.ready(self.ticket):
            self.link.combine(self.ticket)
            at = answered[self.index, self.micro_batch]
            self.ticket, self.due = None, at + self.node.stage * self.dice.uniform(1 - JITTER, 1 + JITTER)
            self.layer = (self.layer + 1) % LAYERS
            if not self.layer:
                self.ends.append(at)
        if self.ticket is None and now >= self.due:
            rows = self.node.rows
            self.ticket = self.link.dispatch(
                torch.ones(rows, HIDDEN),
                torch.zeros(rows, 1, dtype=torch.int32),
                torch.ones(rows, 1),
                layer=self.layer,
                micro_batch=self.micro_batch,
            )


def run(case: Case) -> dict[str, object]:
    """Seconds per token of decode (median, p99) and rows of prompts per second."""
    clock = FakeClock()
    nodes = (*case.decode, *case.prefill)
    most = max(node.micro_batches for node in nodes)
    wire = WireType.FLOAT32
    layout = Layout(HIDDEN, 1, max(node.rows for node in nodes), most, LAYERS, 1, wire, wire)
    end, address = connect.listen("local", expert=0, attention_nodes=len(nodes), layout=layout)
    phases = {
        index: AttentionPhase.DECODE if index < len(case.decode) else AttentionPhase.PREFILL
        for index in range(len(nodes))
    }
    answered: dict[tuple[int, int], float] = {}

    def watch(layer: int, group: Sequence[Arrival], start: float, done: float) -> None:
        answered.update({(arrival.box.attention, arrival.box.micro_batch): done for arrival in group})

    expert = ExpertNode(ExpertPort(end), Bank(clock, case), clock=clock, phases=phases, watch=watch)
    if case.whole:
        expert._pieces = WholeMessages()
    loops = list(loops_of(nodes, layout, address, clock))
    until = clock.now() + case.warm + case.period
    since = clock.now() + case.warm
    while clock.now() < until:
        for loop in loops:
            loop.turn(clock.now(), answered)
        if not expert.poll():
            clock.advance(TURN)
    expert.close()
    decode = [loop for loop in loops if phases[loop.index] is AttentionPhase.DECODE]
    prefill = [loop for loop in loops if loop not in decode]
    gaps = sorted(
        later - before
        for loop in decode
        for before, later in zip(loop.ends, loop.ends[1:], strict=False)
        if before >= since
    )
    chunks = sum(loop.node.rows for loop in prefill for at in loop.ends if at >= since)
    stats = expert.stats()
    return {
        "experiment": case.name,
        "layers": LAYERS,
        "token_ms": round(1e3 * gaps[len(gaps) // 2], 3) if gaps else None,
        "token_p99_ms": round(1e3 * gaps[int(0.99 * len(gaps))], 3) if gaps else None,
        "prompt_tok_s": round(chunks / case.period),
        "busy": round(stats.busy_seconds / (case.warm + case.period), 3),
        "pieces": stats.prompt_pieces,
    }


def loops_of(nodes: tuple[Node, ...], layout: Layout, address: str, clock: FakeClock) -> Iterator[Loop]:
    """They do not begin in step."""
    placement = Placement.contiguous(layers=LAYERS, experts=1, nodes=1)
    for index, node in enumerate(nodes):
        link = ExpertLink(
            connect.connect([address], attention=index, layout=layout, timeout=1.0),
            attention=index,
            layout=layout,
            placement=placement,
            clock=clock,
        )
        for micro_batch in range(node.micro_batches):
            begin = clock.now() + node.stage * (0.37 * index + micro_batch / node.micro_batches)
            yield Loop(node, index, link, micro_batch, begin, Random(10 * index + micro_batch))


DECODE = (Node(rows=32, stage=700e-6), Node(rows=24, stage=700e-6))
PREFILL = (Node(rows=512, stage=2.5e-3),)


def cases() -> Iterator[Case]:
    yield Case("decode alone", DECODE)
    for prefill in (1, 2, 4):
        nodes = f"{prefill} prefill node{'s' * (prefill > 1)}"
        yield Case(f"{nodes} alone", (), PREFILL * prefill)
        flood = Case(f"decode and {nodes}", DECODE, PREFILL * prefill)
        yield flood
        yield replace(flood, name=f"{flood.name}, whole messages", whole=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.phases", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--save", action="store_true", help="append to bench/results/phases.jsonl")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")
    options = parser.parse_args()
    known = origin()
    alone: dict[
        int, float
    ] = {}  # by the number of prefill nodes: their rows per second; without any p99 of a token
    for case in cases():
        row = run(replace(case, warm=0.1, period=0.3) if options.quick else case)
        if not case.prefill:
            alone[0] = float(str(row["token_p99_ms"]))
        elif not case.decode:
            alone[len(case.prefill)] = float(str(row["prompt_tok_s"]))
        else:
            row["p99_of_alone"] = round(float(str(row["token_p99_ms"])) / alone[0], 3)
            rate = float(str(row["prompt_tok_s"]))
            row["prompt_time_of_alone"] = round(alone[len(case.prefill)] / max(rate, 1e-9), 3)
        print(json.dumps(row) if options.json else "  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
        if options.save:
            with (ROOT / "bench" / "results" / "phases.jsonl").open("a") as file:
                file.write(json.dumps({**row, **known}) + "\n")


if __name__ == "__main__":
    main()
