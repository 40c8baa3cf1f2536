"""Measures decode steps that are one native call at either end, as nodes of one host serve them.

Such a step notes nothing between its layers; the attention node's own counters say how long rows were under way, and
in which part of that it only waited. Steps of the same sequences that note every dispatch take turns with them: what
those take longer beside the exchanges is Python's between two layers. The expert node has real experts, since one that
only lets time pass cannot answer in one call. Started as a module with one JSON argument, the process prints its
address and serves until its standard input ends; each line there asks what a call took since the last one.
"""

import json
import select
import sys
from collections.abc import Iterator
from statistics import median

from afserve.cli.bench.exchange import DISPATCH_BYTES, ExchangeBench, layout_of
from afserve.cli.bench.stages import WARM, AttentionSide, Row
from afserve.comm.m2n.port import ExpertPort
from afserve.comm.transports import connect
from afserve.config import ModelSource
from afserve.engine.build import build_expert_bank
from afserve.engine.expert_node import ExpertNode
from afserve.kernels.ops import open_ops

NODE = "afserve.cli.bench.whole"
_PARK = 0.05
_LEAST = 0.2  # of a layer's half that is left: differences of two steps may say anything


class WholePoint:
    """`half`: seconds of a layer's attention half where every dispatch is noted."""

    def __init__(
        self, engine: AttentionSide, made: ExchangeBench, half: float, requests: int, context: int, most: int
    ) -> None:
        self._made, self._half, self._layers = made, half, engine.spec.layers
        self._decoding = engine.decode_batch(made.link, requests, context, 2 * most)
        size = requests * engine.spec.expert_width * DISPATCH_BYTES
        self._size: Row = {"requests": requests, "context": context, "peers": len(made.nodes), "bytes": size}
        self._saved: list[float] = []
        self._kernels: list[float] = []
        self._directions: list[float] = []

    @property
    def in_one_call(self) -> bool:
        """Whether steps were one call."""
        return bool(self._saved)

    def turn(self, steps: int) -> None:
        """Nothing is kept where a layer of the second half was sent by itself."""
        link = self._made.link
        link.whole = False
        self._decoding.go(WARM)
        link.clear_marks()
        noted = self._decoding.go(steps).seconds - sum(link.rounds) / steps
        link.whole = True
        self._decoding.go(WARM)
        link.clear_marks()
        self._made.take(0.0)
        step = self._decoding.go(steps)
        there = max(self._made.take(0.0))
        if link.rounds or not step.dispatches:
            return
        exchanges = step.dispatches / steps
        self._saved.append((noted - (step.seconds - step.under_way)) / self._layers)
        self._kernels.append((step.under_way - step.waited) / exchanges / 2)
        self._directions.append((step.under_way / exchanges - there) / 2)

    def rows(self) -> Iterator[Row]:
        if not self.in_one_call:
            return
        direction = max(median(self._directions), 1e-6)
        yield {
            "part": "whole",
            **self._size,
            "half": max(self._half - median(self._saved), _LEAST * self._half),
            "kernel": min(max(median(self._kernels), 1e-7), direction),
            "seconds": direction,
        }


def main(source: ModelSource, peers: int, index: int, isa: str) -> None:
    layout, placement = layout_of(source, peers)
    end, address = connect.listen("shm", expert=index, attention_nodes=1, layout=layout)
    bank = build_expert_bank(source, placement.held(index), placement.slots_per_node(), ops=open_ops(isa=isa))
    node = ExpertNode(ExpertPort(end), bank, epoch=placement.epoch)
    print(address, flush=True)
    before = node.stats()
    while True:
        if select.select([sys.stdin], [], [], 0)[0]:
            if not sys.stdin.readline():
                break
            now = node.stats()
            calls = max(now.calls - before.calls, 1)
            print((now.busy_seconds - before.busy_seconds) / calls, flush=True)
            before = now
        if not node.poll():
            node.wait(_PARK)
    node.close()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(ModelSource(**given["source"]), given["peers"], given["index"], given["isa"])
