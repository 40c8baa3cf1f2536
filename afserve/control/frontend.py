"""The `Backend` of the HTTP server over real processes: picks an attention node, streams its events back.

Closing the iterator of `generate` early cancels the request on its node. It knows no HTTP and no text.
"""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace

from afserve.clock import Clock
from afserve.control.affinity import Affinity
from afserve.control.controller import Controller
from afserve.control.gateway import Gateway
from afserve.control.request_trace import RequestTrace
from afserve.control.requests import Request
from afserve.control.wire.values import Cancel, Submit
from afserve.engine.request import GenerationRequest, TokenEvent
from afserve.errors import OverloadedError
from afserve.member import NodeId, Role, attention_node
from afserve.placement.placement import Placement
from afserve.server.backend import ClusterView, NodeView, ServedModel
from afserve.trace import Trace


class Frontend:
    """One per gateway. `picked` is what the launcher chose and why, for `view`; `trace` is drawn into, if given."""

    def __init__(
        self,
        controller: Controller,
        gateway: Gateway,
        model: ServedModel,
        picked: Mapping[str, str],
        clock: Clock,
        trace: Trace | None = None,
    ) -> None:
        self.model = model
        self._controller = controller
        self._gateway = gateway
        self._picked = picked
        self._clock = clock
        self._drawn = RequestTrace(trace)
        self._accepting = True
        deployment = controller.deployment
        self._nodes = deployment.count(Role.ATTENTION)
        self._affinity = Affinity(self._nodes, deployment.engine.block_size)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        opened, drawn = self._submit(request), self._drawn.begin()
        try:
            while True:
                event = await opened.get()
                drawn.token()
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            drawn.end()
            self._finish(opened)

    def ready(self) -> bool:
        return self._accepting and self._controller.ready and self._gateway.is_attended(self._nodes)

    def close(self) -> None:
        """Accept nothing new; what runs goes on."""
        self._accepting = False

    def view(self) -> ClusterView:
        now = self._clock.now()
        nodes = tuple(
            NodeView(str(m.node), m.node.role, m.state, m.pid, now - m.seen_at, m.resident_bytes, m.stats)
            for m in self._controller.members
        )
        balancing = self._controller.balancing
        return ClusterView(
            self._controller.placement.epoch,
            nodes,
            self._picked,
            balancing.imbalance(),
            tuple(f"{now - d.now:.0f} s ago: {d.action.value}, {d.reason}" for d in balancing.decisions),
            balancing.moves,
            balancing.routed(),
        )

    def placement(self) -> str:
        return self._controller.placement.to_json()

    def apply_placement(self, text: str) -> None:
        self._controller.apply(Placement.from_json(text))

    def record_routing(self, on: bool) -> bytes:
        recorder = self._controller.balancing.recorder
        if on:
            recorder.start(self._clock.now())
            return b""
        return recorder.stop()

    def recorded_routing(self) -> bytes:
        return self._controller.balancing.recorder.dump()

    def missing(self) -> list[NodeId]:
        """Attention nodes that have no stream to this gateway."""
        return [attention_node(index) for index in range(self._nodes) if not self._gateway.is_here(index)]

    async def wait_attended(self) -> None:
        """Returns when every attention node has opened its stream."""
        await self._gateway.wait_attended(self._nodes)

    def _submit(self, request: GenerationRequest) -> Request:
        self._controller.check()
        if not self.ready():
            raise OverloadedError(
                "the server is starting or stopping and takes no requests now", retry_after=2.0
            )
        load = [self._gateway.requests.on_node(node) for node in range(self._nodes)]
        opened = self._gateway.requests.open(request, self._affinity.pick(request.prompt_ids, load))
        submitted = replace(request, request_id=str(opened.number))
        self._gateway.send(opened.node, Submit(submitted))
        return opened

    def _finish(self, opened: Request) -> None:
        if not opened.finished:
            self._gateway.send(opened.node, Cancel(opened.number))
        self._gateway.requests.close(opened)
