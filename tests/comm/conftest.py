"""A cluster of real links and ports over any transport, with a bank whose sums are exact in every wire type."""

import gc

import pytest
import torch

from afserve.clock import FakeClock
from afserve.comm.m2n.bank import Bank
from afserve.comm.m2n.link import ExpertLink
from afserve.comm.m2n.port import ExpertPort
from afserve.comm.transport import Layout, WireType
from afserve.comm.transports import connect
from afserve.engine.expert_node import ExpertNode
from afserve.placement.placement import Placement


class ExactBank(Bank):
    """FFN_e(x) = (e + 1) * x + layer, on small whole numbers: any grouping and any order gives the same bits."""

    def __init__(self, held):
        self.held = held
        self.calls = []

    def forward(self, layer, x_RH, slot_RK, weight_RK, out_RH, add=False):
        self.calls.append((layer, len(x_RH)))
        sum_RH = torch.zeros(x_RH.shape)
        for row in range(len(x_RH)):
            for choice in range(slot_RK.shape[1]):
                slot = int(slot_RK[row, choice])
                if slot >= 0:
                    expert = self.held[layer, slot]
                    sum_RH[row] += weight_RK[row, choice] * ((expert + 1) * x_RH[row].float() + layer)
        out_RH.copy_(sum_RH + out_RH if add else sum_RH)


class Cluster:
    """`wrap(end)` may put something between a link or a port and its transport; `stage()` makes an end's stage."""

    def __init__(
        self,
        kind,
        attention,
        placement,
        layout,
        *,
        wrap=lambda end: end,
        stage=lambda: None,
        deadline=30.0,
        **node,
    ):
        self.clock = FakeClock()
        self.placement = placement
        self.layout = layout
        pairs = [
            connect.listen(kind, expert=f, attention_nodes=attention, layout=layout)
            for f in range(placement.nodes)
        ]
        self.banks = [ExactBank({(n, s): e for n, s, e in placement.held(f)}) for f in range(placement.nodes)]
        self.nodes = [
            ExpertNode(
                ExpertPort(wrap(end), stage=stage()), bank, epoch=placement.epoch, clock=self.clock, **node
            )
            for (end, _), bank in zip(pairs, self.banks)
        ]
        addresses = self.addresses = [address for _, address in pairs]
        self.links = [
            ExpertLink(
                wrap(connect.connect(addresses, attention=a, layout=layout, timeout=60.0)),
                attention=a,
                layout=layout,
                placement=placement,
                deadline=deadline,
                clock=self.clock,
                stage=stage(),
            )
            for a in range(attention)
        ]
        held = {(n, e): e for n in range(layout.layers) for e in range(placement.experts)}
        self.oracle = ExactBank(held)

    def expected(self, layer, x_TH, expert_TK, weight_TK):
        y_TH = torch.empty(x_TH.shape)
        self.oracle.forward(layer, x_TH, expert_TK, weight_TK, y_TH)
        return y_TH

    def rows(self, rows, seed):
        """x, experts (distinct per row) and weights, whole numbers."""
        generator = torch.Generator().manual_seed(seed)
        x_TH = torch.randint(-4, 5, (rows, self.layout.hidden), generator=generator).float()
        shape = (rows, self.placement.experts)
        expert_TK = torch.rand(shape, generator=generator).topk(self.layout.top_k).indices.int()
        weight_TK = torch.randint(1, 4, (rows, self.layout.top_k), generator=generator).float()
        return x_TH, expert_TK, weight_TK

    def turn(self, seconds=0.001):
        """One turn of every expert node and of the clock."""
        for node in self.nodes:
            node.poll()
        self.clock.advance(seconds)

    def finish(self, link, ticket, turns=200, seconds=0.001):
        """Sockets need a moment of their own beside the clock's, more of it where other work has the cores."""
        for turn in range(turns):
            if link.ready(ticket):
                return link.combine(ticket)
            link.wait([ticket], 0.0 if turn < 20 else 0.01)
            self.turn(seconds)
        raise AssertionError("no answer")

    def close(self):
        for link in self.links:
            link.close()
        for node in self.nodes:
            node.close()


def make_layout(placement, *, hidden=8, top_k=3, max_rows=8, micro_batches=2, wire=WireType.FLOAT32):
    return Layout(
        hidden, top_k, max_rows, micro_batches, len(placement.layers), placement.slots_per_node(), wire, wire
    )


@pytest.fixture(scope="module")
def nothing_else_collected():
    """What is there before a file's tests is looked at once: that takes 0.3 s where transformers is imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def open_cluster():
    """open(kind, attention, placement, options of Cluster, sizes of the layout); the test closes it."""

    def make(kind, attention, placement, *, options=None, **sizes):
        return Cluster(kind, attention, placement, make_layout(placement, **sizes), **(options or {}))

    return make


@pytest.fixture
def build_cluster(open_cluster):
    """The same, with defaults and closed at the end of the test."""
    built = []

    def build(kind="local", attention=1, placement=None, *, options=None, **sizes):
        if placement is None:
            placement = Placement.contiguous(layers=2, experts=8, nodes=2)
        built.append(open_cluster(kind, attention, placement, options=options, **sizes))
        return built[-1]

    yield build
    for cluster in built:
        cluster.close()
