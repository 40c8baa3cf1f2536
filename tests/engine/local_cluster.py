"""A whole cluster in one thread: attention and expert nodes over the in-process transport, stepped in turn.

The nodes are the ones that real processes run. Every step gives each node one turn, so a run is repeatable.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from afserve.clock import Clock
from afserve.comm.device_exchange.wire import open_link, open_port
from afserve.comm.m2n.ticket import Ticket
from afserve.comm.transport import HOST, Layout, Transport
from afserve.comm.transports import connect
from afserve.config import EngineConfig, ModelSource
from afserve.engine.attention_node import AttentionNode
from afserve.engine.build import AnyBank, build_attention_node, build_expert_bank, layout_for, spec_of
from afserve.engine.device_queues import queue_per_box, queues_of
from afserve.engine.expert_node import ExpertNode
from afserve.engine.kv.groups import KvGroup
from afserve.engine.scheduling.request import GenerationRequest, TokenEvent
from afserve.kernels.devices.opened import device_of
from afserve.kernels.ops import Ops, open_ops
from afserve.placement.migrate import fills
from afserve.placement.placement import Placement

Wrap = Callable[[Transport], Transport]


def _bare(end: Transport) -> Transport:
    return end


class LocalCluster:
    """M attention and N expert nodes. Requests go to attention nodes in turn; `lost` expert nodes have no turn."""

    def __init__(
        self,
        attention: list[AttentionNode[Ticket]],
        experts: list[ExpertNode],
        banks: list[AnyBank],
        placement: Placement,
        layout: Layout,
        between: torch.device,
        expert_device: torch.device,
    ) -> None:
        """Mailboxes lie on the device `between`."""
        self.attention = attention
        self.experts = experts
        self.banks = banks
        self.placement = placement
        self.lost: set[int] = set()
        self._layout, self._between, self._expert_device = layout, between, expert_device
        self._epochs = [placement.epoch]
        self._submitted = 0

    @classmethod
    def build(
        cls,
        source: ModelSource,
        config: EngineConfig,
        *,
        attention: int = 1,
        experts: int = 1,
        placement: Placement | None = None,
        ops: Ops | Sequence[Ops] | None = None,
        expert_ops: Ops | None = None,
        clock: Clock | None = None,
        wrap: Wrap = _bare,
        groups: Sequence[KvGroup] = (),
        expert_memory: int = 0,
    ) -> "LocalCluster":
        """All nodes on one device, that of `ops` if given, with mailboxes there too. With `expert_ops` of another
        device expert nodes are there, and mailboxes in host memory. Several `ops` are those of each attention node, on
        one device, where the first ones compute experts, too.

        `clock` is that of the attention nodes' deadlines; `wrap` may put something between any node and its transport;
        `groups` are what attention nodes keep. `expert_memory`: bytes of each expert node, as of `build_expert_bank`.
        """
        spec = spec_of(source, config.drafts())
        ops = ops or open_ops(config.device, config.threads, isa=config.isa)
        several = [ops] * attention if isinstance(ops, Ops) else ops
        ops = several[0]
        expert_ops = expert_ops or ops
        between = ops.device if expert_ops.device == ops.device else HOST
        plan = placement or Placement.contiguous(layers=spec.moe_layers, experts=spec.experts, nodes=experts)
        slots = plan.slots_per_node()
        layout = layout_for(source, spec, config, slots)
        nodes, banks, addresses = [], [], []
        for index in range(experts):
            end, address = connect.listen(
                "local", expert=index, attention_nodes=attention, layout=layout, device=between
            )
            held = plan.held(index)
            bank = build_expert_bank(
                source,
                held,
                slots,
                expert_dtype=config.expert_dtype,
                ops=expert_ops,
                memory=expert_memory,
                in_host=config.experts_in_host,
                draft=config.drafts(),
            )
            place = device_of(expert_ops.device)
            port = open_port(wrap(end), bank, expert_ops.device, queue_per_box(place))
            nodes.append(
                ExpertNode(
                    port,
                    bank,
                    epoch=plan.epoch,
                    step_rows=config.step_rows,
                    prompt_share=config.prompt_share,
                    device=queues_of(place),
                )
            )
            banks.append(bank)
            addresses.append(address)
        fronts = []
        for index, ops in enumerate(several):
            end = connect.connect(addresses, attention=index, layout=layout, timeout=60.0)
            link = open_link(
                wrap(end), attention=index, layout=layout, placement=plan, clock=clock, device=ops.device
            )
            fronts.append(build_attention_node(source, config, link, ops=ops, groups=groups))
        return cls(fronts, nodes, banks, plan, layout, between, expert_ops.device)

    def submit(self, request: GenerationRequest) -> None:
        self.attention[self._submitted % len(self.attention)].submit(request)
        self._submitted += 1

    def step(self) -> list[TokenEvent]:
        """One turn for every node, attention first."""
        events = [event for node in self.attention for event in node.step()]
        for index, expert in enumerate(self.experts):
            if index not in self.lost:
                expert.poll()
        return events

    def run(self, requests: list[GenerationRequest], *, most_steps: int = 100_000) -> Iterator[TokenEvent]:
        """Submit all, then step until nobody is busy."""
        for request in requests:
            self.submit(request)
        for _ in range(most_steps):
            yield from self.step()
            if not any(node.busy for node in self.attention):
                return
        raise AssertionError(f"still busy after {most_steps} steps")

    def migrate(self, placement: Placement) -> None:
        """Fill what `placement` has and the one before has not, then switch.

        Raises ConfigError where a slot is in use.
        """
        for fill in fills(self.placement, placement):
            self.banks[fill.node].fill(fill.layer, fill.slot, fill.expert)
        self.switch(placement)

    def accept(self, placement: Placement) -> None:
        """Expert nodes take what is routed by a placement whose slots are filled; attention nodes `adopt` it next."""
        for expert in self.experts:
            expert.accept(placement.epoch)
        self._epochs.append(placement.epoch)
        self.placement = placement

    def switch(self, placement: Placement) -> None:
        """Expert nodes accept a placement whose slots are filled; attention nodes route by it from now on."""
        self.accept(placement)
        for node in self.attention:
            node.adopt(placement)

    def retire(self, epoch: int) -> None:
        """Nothing routed under `epoch` is under way any more: its slots may be filled anew."""
        self._epochs.remove(epoch)
        for expert in self.experts:
            expert.retire(epoch)

    def lose(self, index: int) -> None:
        """An expert node ends as a process that was killed does. Nobody is told."""
        self.experts[index].close()
        self.lost.add(index)

    def succeed(self, index: int) -> str:
        """Another expert node with the same experts in a lost one's place; the address for attention nodes to dial."""
        end, address = connect.listen(
            "local",
            expert=index,
            attention_nodes=len(self.attention),
            layout=self._layout,
            device=self._between,
        )
        node = ExpertNode(
            open_port(end, self.banks[index], self._expert_device),
            self.banks[index],
            epoch=self._epochs[0],
            device=queues_of(device_of(self._expert_device)),
        )
        for epoch in self._epochs[1:]:
            node.accept(epoch)
        self.experts[index] = node
        self.lost.discard(index)
        return address

    def close(self) -> None:
        for index, expert in enumerate(self.experts):
            if index not in self.lost:
                expert.close()
