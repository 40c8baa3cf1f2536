"""Decode beside a flood of prompts at one expert node: the real node, stages of known length, a clock of its own.

    python -m bench.phases                   every case; --json: one object a line; --save: keep the rows; --quick

Nothing is measured of this machine: a stage only moves the clock forward, so the numbers are the same everywhere. The
expert node is the engine's; attention nodes answer after their stage. `whole messages`: prompts' are one call each, as
of an expert node without pieces. Prompts are compared with the same prefill nodes without decode nodes. Where experts
are read, a call reads each one that its rows chose: `of rows` cuts there between rows, and reads nearly all of them
again with each piece. On a device, which is scripted too, calls are launched and done later, and blocks of 104 us end
by themselves: the engine has a queue for decoding and one for prompts there. `one queue`: calls are done as launched.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from afserve.clock import FakeClock
from afserve.comm.m2n import bank
from afserve.comm.m2n.link import ExpertLink
from afserve.comm.m2n.port import Arrival, ExpertPort
from afserve.comm.m2n.ticket import Ticket
from afserve.comm.transport import Layout, WireType
from afserve.comm.transports import connect
from afserve.engine.expert_node import ExpertNode
from afserve.engine.pieces import PieceSize
from afserve.member import AttentionPhase
from afserve.placement.placement import Placement
from bench.origin import ROOT, origin
from bench.scripted_device import ScriptedDevice, ScriptedStage

HIDDEN, LAYERS = 8, 16
TOP_K = 4  # where there are so many experts
JITTER = 0.1  # of a stage: without any, loops fall into step
LAUNCH = 20e-6  # seconds of the host to launch a call's kernels
TURN = 5e-6  # seconds of a poll that finds nothing


@dataclass(frozen=True)
class Node:
    """An attention node: `rows` of each of its micro-batches go through all layers, and again. Seconds."""

    rows: int
    stage: float
    micro_batches: int = 2


@dataclass(frozen=True)
class Case:
    """`call` and `row` are what the experts take, in seconds, and `read` for each expert that a call's rows chose, of
    `experts`. A device ends blocks of `block` seconds; 0 is a host. `period` is how long is counted, after `warm`.
    `cut` replaces what says how long a piece is."""

    name: str
    decode: tuple[Node, ...]
    prefill: tuple[Node, ...] = ()
    call: float = 30e-6
    row: float = 1e-6
    cut: type[PieceSize] = PieceSize
    experts: int = 1
    read: float = 0.0
    block: float = 0.0
    one_queue: bool = False
    warm: float = 0.3
    period: float = 3.0


class WholeMessages(PieceSize):
    """What an expert node does that knows no pieces."""

    def rows(self, left: int, quiet: float | None = None) -> int:
        return left

    @property
    def whole_experts(self) -> bool:
        return False


class OfRows(PieceSize):
    """What an expert node does that cuts between rows only."""

    @property
    def whole_experts(self) -> bool:
        return False


class Bank(bank.Bank):
    def __init__(self, clock: FakeClock, case: Case, device: ScriptedDevice | None) -> None:
        self._clock, self._case, self._device = clock, case, device

    def forward(self, layer, x_RH, slot_RK, weight_RK, out_RH, add=False) -> None:
        used_RK = slot_RK >= 0
        rows = float(used_RK.float().mean(1).sum())
        read = len(slot_RK[used_RK].unique()) if self._case.read else 0
        self._take(self._case.call + self._case.row * rows + self._case.read * read)
        out_RH.copy_(x_RH)

    def _take(self, seconds: float) -> None:
        if self._device is None:
            self._clock.advance(seconds)
            return
        self._clock.advance(LAUNCH)
        self._device.launch(seconds)


@dataclass
class Loop:
    """One micro-batch of a node. `due`: when its attention stage is over; `ends`: when each pass through all layers
    was; `answers`: when each layer was."""

    node: Node
    index: int
    link: ExpertLink
    micro_batch: int
    due: float
    expert_TK: Tensor
    dice: Random = field(default_factory=lambda: Random(1))
    layer: int = 0
    ticket: Ticket | None = None
    ends: list[float] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)

    def turn(self, now: float, answered: dict[tuple[int, int], float]) -> None:
        """Take the answer where it is there, dispatch where the stage is over. Stages of micro-batches overlap.

        `answered` has when each loop's last message was, unless a device answers: the node may have computed something
        else since."""
        if self.ticket is not None and self.link.ready(self.ticket):
            self.link.combine(self.ticket)
            at = answered.get((self.index, self.micro_batch), now)
            self.ticket, self.due = None, at + self.node.stage * self.dice.uniform(1 - JITTER, 1 + JITTER)
            self.answers.append(at)
            self.layer = (self.layer + 1) % LAYERS
            if not self.layer:
                self.ends.append(at)
        if self.ticket is None and now >= self.due:
            rows = self.node.rows
            self.ticket = self.link.dispatch(
                torch.ones(rows, HIDDEN),
                self.expert_TK,
                torch.ones(self.expert_TK.shape),
                layer=self.layer,
                micro_batch=self.micro_batch,
            )


def run(case: Case) -> dict[str, Any]:
    """Seconds per token of decode (median, p99) and rows of prompts per second."""
    clock = FakeClock()
    nodes = (*case.decode, *case.prefill)
    most = max(node.micro_batches for node in nodes)
    wire = WireType.FLOAT32
    layout = Layout(
        HIDDEN,
        min(TOP_K, case.experts),
        max(node.rows for node in nodes),
        most,
        LAYERS,
        case.experts,
        wire,
        wire,
    )
    end, address = connect.listen("local", expert=0, attention_nodes=len(nodes), layout=layout)
    phases = {
        index: AttentionPhase.DECODE if index < len(case.decode) else AttentionPhase.PREFILL
        for index in range(len(nodes))
    }
    answered: dict[tuple[int, int], float] = {}

    def watch(layer: int, group: Sequence[Arrival], start: float, done: float, rows: int | None) -> None:
        if device is None:
            answered.update({(arrival.box.attention, arrival.box.micro_batch): done for arrival in group})

    device = ScriptedDevice(clock, case.block, case.one_queue) if case.block else None
    port = ExpertPort(end, stage=ScriptedStage(device) if device else None)
    expert = ExpertNode(
        port, Bank(clock, case, device), clock=clock, phases=phases, watch=watch, device=device
    )
    expert._pieces.sizes = case.cut()
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
    rows = sum(loop.node.rows for loop in prefill for at in loop.answers if at >= since)
    stats = expert.stats()
    return {
        "experiment": case.name,
        "layers": LAYERS,
        "token_ms": round(1e3 * gaps[len(gaps) // 2], 3) if gaps else None,
        "token_p99_ms": round(1e3 * gaps[int(0.99 * len(gaps))], 3) if gaps else None,
        "prompt_tok_s": round(rows / LAYERS / case.period),
        "busy": round((device.taken if device else stats.busy_seconds) / (case.warm + case.period), 3),
        "pieces": stats.prompt_pieces,
    }


def loops_of(nodes: tuple[Node, ...], layout: Layout, address: str, clock: FakeClock) -> Iterator[Loop]:
    """They do not begin in step."""
    placement = Placement.contiguous(layers=LAYERS, experts=layout.slots, nodes=1)
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
            seed = 10 * index + micro_batch
            chance_TE = torch.rand(node.rows, layout.slots, generator=torch.Generator().manual_seed(seed))
            expert_TK = chance_TE.topk(layout.top_k).indices.int()
            yield Loop(node, index, link, micro_batch, begin, expert_TK, Random(seed))


DECODE = (Node(rows=32, stage=700e-6), Node(rows=24, stage=700e-6))
PREFILL = (Node(rows=512, stage=2.5e-3),)
READING: dict[str, Any] = {
    "call": 30e-6,
    "row": 4e-6,
    "experts": 32,
    "read": 20e-6,
}  # as where experts are larger than caches
# An H200 with 24 of DeepSeek-V3's experts in FP8, by its memory and its peak. Both products of a decode call wait for a
# block of 52 us; here the call waits once for both.
DEVICE: dict[str, Any] = {"call": 264e-6, "row": 0.1e-6, "block": 104e-6}
FAST, CHUNKS = (Node(rows=128, stage=1e-3),), (Node(rows=4096, stage=6e-3),)
FEW, SLOW = (Node(rows=4, stage=2e-3),), (Node(rows=512, stage=5e-3),)


def cases() -> Iterator[Case]:
    yield from beside(DECODE, PREFILL, (1, 2, 4), Case("", ()), {"whole messages": WholeMessages})
    reading = Case(", experts read", (), **READING)
    yield from beside(FEW, SLOW, (1, 2), reading, {"of rows": OfRows, "whole messages": WholeMessages})
    for case in beside(FAST, CHUNKS, (1, 2), Case(", device", (), **DEVICE), {}):
        yield case
        if case.decode and case.prefill:
            yield replace(case, name=f"{case.name}, one queue", one_queue=True)


def beside(
    decode: tuple[Node, ...],
    prefill: tuple[Node, ...],
    counts: tuple[int, ...],
    case: Case,
    cuts: Mapping[str, type[PieceSize]],
) -> Iterator[Case]:
    """Each alone, then together, in the engine's pieces and in those of `cuts`."""
    yield replace(case, name="decode alone" + case.name, decode=decode)
    for count in counts:
        nodes = f"{count} prefill node{'s' * (count > 1)}"
        yield replace(case, name=f"{nodes} alone{case.name}", prefill=prefill * count)
        flood = replace(case, name=f"decode and {nodes}{case.name}", decode=decode, prefill=prefill * count)
        yield flood
        for name, cut in cuts.items():
            yield replace(flood, name=f"{flood.name}, {name}", cut=cut)


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
