"""An expert node that computes nothing, in a process of its own, and what an exchange with it costs.

Started as a module with one JSON argument: prints its address, answers until its standard input ends. Everything but
the experts is real: mailboxes in shared memory, link, port, soft barrier, parking.
"""

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

from torch import Tensor

from afserve.cli.bench.stages import Engine, Row, Steps
from afserve.comm import connect
from afserve.comm.m2n import ExpertLink
from afserve.comm.port import ExpertPort
from afserve.comm.transport import Layout
from afserve.config import EngineConfig, ModelSource
from afserve.engine.build import layout_for, spec_of
from afserve.engine.expert_node import ExpertNode
from afserve.errors import PeerLost
from afserve.placement.plan import Placement

_DISPATCH_BYTES = 2  # per element: the planner names an exchange by the bytes of its rows on the way out
_PARK = 0.05


class Nothing:
    """A bank whose experts take no time; the answer is whatever lies in the mailbox."""

    def forward(self, layer: int, x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, out_RH: Tensor) -> None:
        """Leaves out_RH as it is."""


@contextmanager
def exchange(source: ModelSource, peers: int) -> Iterator[ExpertLink]:
    """A link to so many such nodes, which live as long as the context."""
    layout, placement = _layout(source, peers)
    with ExitStack() as stack:
        addresses = [stack.enter_context(_node(source, peers, index)) for index in range(peers)]
        end = connect.connect(addresses, attention=0, layout=layout, timeout=30.0)
        link = ExpertLink(end, attention=0, layout=layout, placement=placement)
        stack.callback(link.close)
        yield link


@contextmanager
def _node(source: ModelSource, peers: int, index: int) -> Iterator[str]:
    arguments = json.dumps({"source": asdict(source), "peers": peers, "index": index})
    command = [sys.executable, "-m", "afserve.cli.bench.exchange", arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise PeerLost(f"expert-{index}", "it ended before it listened; what it said is above")
        yield address
        process.stdin.close()


def exchange_rows(
    engine: Engine, alone: Steps, link: ExpertLink, peers: int, requests: int, context: int, count: int
) -> Iterator[Row]:
    """`alone`: the same steps without anybody at the other end. A direction is half of what a layer takes longer; a
    kernel is one send or receive: half of what the attention node itself computes longer."""
    both, halves = engine.steps(link, requests, context, count), 2 * engine.spec.moe_layers
    size = {"requests": requests, "peers": peers, "bytes": requests * engine.spec.hidden * _DISPATCH_BYTES}
    direction = max((both.seconds - alone.seconds) / halves, 1e-7)
    kernel = min(max((both.busy - alone.busy) / halves, 1e-7), direction)
    yield {"part": "kernel", **size, "seconds": kernel}
    if peers == 1:
        yield {"part": "exchange", **size, "seconds": direction}


def _layout(source: ModelSource, peers: int) -> tuple[Layout, Placement]:
    spec = spec_of(source)
    placement = Placement.contiguous(layers=spec.moe_layers, experts=spec.experts, nodes=peers)
    config = EngineConfig(max_model_len=2, kv_blocks=1, micro_batches=1)
    return layout_for(source, spec, config, placement.slots_per_node()), placement


def main(source: ModelSource, peers: int, index: int) -> None:
    layout, placement = _layout(source, peers)
    end, address = connect.listen("shm", expert=index, attention_nodes=1, layout=layout)
    node = ExpertNode(ExpertPort(end), Nothing(), epoch=placement.epoch)
    print(address, flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        if not node.poll():
            node.wait(_PARK)
    node.close()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(ModelSource(**given["source"]), given["peers"], given["index"])
