"""Measures an exchange with an expert node that computes nothing: a process that lets a given time pass instead.

Started as a module with one JSON argument, the process prints its address and answers until its standard input ends.
Each line there says how long a call takes from then on, because a caller that waits long parks, and its wake-up is part
of the cost. All else is real: mailboxes in shared memory, link, port, soft barrier. `whole.py` has the same with
experts.
"""

import json
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import IO

from torch import Tensor

from afserve.child import module
from afserve.cli.bench.marked import NotedLink
from afserve.cli.bench.stages import WARM, AttentionSide, Row
from afserve.clock import Clock, MonotonicClock
from afserve.comm.m2n.bank import Bank
from afserve.comm.m2n.port import ExpertPort
from afserve.comm.transport import Layout
from afserve.comm.transports import connect
from afserve.config import AUTO, EngineConfig, ModelSource
from afserve.engine.build import layout_for, spec_of
from afserve.engine.expert_node import ExpertNode
from afserve.errors import PeerLost
from afserve.launch.plan.machine import this_machine
from afserve.placement.placement import Placement

DISPATCH_BYTES = 2  # per element: the planner names an exchange by the bytes of its rows on the way out
_PARK = 0.05
_KEPT = 1024  # answers, the newest


class Idle(Bank):
    """A bank whose experts take `seconds` and give zeros. `busy` all the while, or asleep
    where that would take the core from whom it is measured with.

    `took`: seconds of the last call."""

    def __init__(self, busy: bool = True) -> None:
        self.seconds = self.took = 0.0
        self._busy = busy

    def forward(
        self, layer: int, x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, out_RH: Tensor, add: bool = False
    ) -> None:
        """A sum of nothing: what is in fresh memory may not be finite, and a request with such rows ends."""
        begin = now = time.perf_counter()
        if not add:
            out_RH.zero_()
        if not self._busy:
            time.sleep(self.seconds)
            now = time.perf_counter()
        while now - begin < self.seconds:
            now = time.perf_counter()
        self.took = now - begin


@dataclass(frozen=True, slots=True)
class ExchangeBench:
    link: NotedLink
    nodes: tuple["Pipes", ...]

    def take(self, seconds: float) -> list[float]:
        """From now on every call of an expert node takes so long. What an answer took each of them until now beside the
        call: the median, 0 where it answered nothing."""
        for pipes in self.nodes:
            pipes.input.write(f"{seconds}\n")
            pipes.input.flush()
        return [float(pipes.output.readline()) for pipes in self.nodes]


@dataclass(frozen=True, slots=True)
class Pipes:
    """The other ends of a node's standard input and output."""

    input: IO[str]
    output: IO[str]


@contextmanager
def exchange(
    source: ModelSource,
    peers: int,
    clock: Clock | None = None,
    node: str = "afserve.cli.bench.exchange",
    isa: str = AUTO,
) -> Iterator[ExchangeBench]:
    """With so many nodes, each a process of the module `node`, which live as long as the context. `isa` is for one that
    computes."""
    layout, placement = layout_of(source, peers)
    with ExitStack() as stack:
        # all start at once
        nodes = [stack.enter_context(_node(node, isa, source, peers, index)) for index in range(peers)]
        addresses = [address for address, _ in nodes]
        end = connect.connect(addresses, attention=0, layout=layout, timeout=30.0)
        link = NotedLink(end, layout=layout, placement=placement, clock=clock or MonotonicClock())
        stack.callback(link.close)
        yield ExchangeBench(link, tuple(pipes for _, pipes in nodes))


@contextmanager
def _node(name: str, isa: str, source: ModelSource, peers: int, index: int) -> Iterator[tuple[str, Pipes]]:
    arguments = json.dumps({"source": asdict(source), "peers": peers, "index": index, "isa": isa})
    command = [*module(name), arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise PeerLost(f"expert-{index}", "it ended before it listened; what it said is above")
        yield address, Pipes(process.stdin, process.stdout)
        process.stdin.close()


class ExchangePoint:
    """So many requests whose experts take `experts` seconds a layer. A direction is half of what passes from the
    beginning of a dispatch to the end of its combine, less the experts; a kernel is one send or receive: half of what
    both take of the attention node's time. An answer is what an expert node itself does for one message beside its
    experts."""

    def __init__(
        self,
        engine: AttentionSide,
        made: ExchangeBench,
        experts: float,
        requests: int,
        context: int,
        most: int,
    ) -> None:
        self._made, self._experts = made, experts
        self._decoding = engine.decode_batch(made.link, requests, context, most)
        size = requests * engine.spec.expert_width * DISPATCH_BYTES
        self._size: Row = {"requests": requests, "peers": len(made.nodes), "bytes": size}
        self._kernels: list[float] = []
        self._directions: list[float] = []
        self._answers: list[float] = []

    def turn(self, steps: int) -> None:
        made = self._made
        made.take(self._experts)
        self._decoding.go(WARM)
        made.link.clear_marks()
        self._decoding.go(steps)
        self._kernels.append(fmean(made.link.own) / 2)
        self._directions.append((fmean(made.link.rounds) - self._experts) / 2)
        self._answers.append(made.take(self._experts)[0])

    def rows(self) -> Iterator[Row]:
        direction = max(median(self._directions), 1e-6)
        kernel = min(max(median(self._kernels), 1e-7), direction)
        yield {"part": "kernel", **self._size, "seconds": kernel}
        if len(self._made.nodes) == 1:
            yield {"part": "exchange", **self._size, "seconds": direction}
            own = median(self._answers)
            answer = max(min(own, 2 * (direction - kernel)), 0.2 * own, 1e-7)
            yield {"part": "answer", **self._size, "seconds": answer}


def layout_of(source: ModelSource, peers: int) -> tuple[Layout, Placement]:
    spec = spec_of(source)
    placement = Placement.contiguous(layers=spec.moe_layers, experts=spec.experts, nodes=peers)
    config = EngineConfig(max_model_len=2, kv_blocks=1, micro_batches=1)
    return layout_for(source, spec, config, placement.slots_per_node()), placement


def main(source: ModelSource, peers: int, index: int) -> None:
    layout, placement = layout_of(source, peers)
    end, address = connect.listen("shm", expert=index, attention_nodes=1, layout=layout)
    bank, answers = Idle(busy=peers < this_machine().cores), deque[float](maxlen=_KEPT)
    node = ExpertNode(ExpertPort(end), bank, epoch=placement.epoch)
    print(address, flush=True)
    while True:
        if select.select([sys.stdin], [], [], 0)[0]:
            line = sys.stdin.readline()
            if not line:
                break
            bank.seconds = float(line)
            print(median(answers) if answers else 0.0, flush=True)
            answers.clear()
        begin = time.perf_counter()
        if node.poll():
            answers.append(time.perf_counter() - begin - bank.took)
        else:
            node.wait(_PARK)
    node.close()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(ModelSource(**given["source"]), given["peers"], given["index"])
