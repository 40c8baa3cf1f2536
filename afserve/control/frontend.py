"""The `Backend` of the HTTP server over real processes: picks an attention node, streams its events back.

Closing the iterator of `generate` early cancels the request on its node. It knows no HTTP and no text.
"""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace

from afserve.clock import Clock
from afserve.control.affinity import Affinity
from afserve.control.controller import Controller
from afserve.control.lanes import Lane, Lanes
from afserve.control.request_trace import RequestTrace
from afserve.control.wire.values import Cancel, Submit
from afserve.engine.request import GenerationRequest, TokenEvent
from afserve.errors import OverloadedError
from afserve.member import Role, attention_node
from afserve.placement.placement import Placement
from afserve.server.backend import ClusterView, NodeView, ServedModel
from afserve.trace import Trace


class Frontend:
    """One per gateway. `picked` is what the launcher chose and why, for `view`; `trace` is drawn into, if given."""

    def __init__(
        self,
        controller: Controller,
        lanes: Lanes,
        model: ServedModel,
        picked: Mapping[str, str],
        clock: Clock,
        trace: Trace | None = None,
    ) -> None:
        self.model = model
        self._controller = controller
        self._lanes = lanes
        self._picked = picked
        self._clock = clock
        self._drawn = RequestTrace(trace)
        self._accepting = True
        deployment = controller.deployment
        self._nodes = deployment.count(Role.ATTENTION)
        self._affinity = Affinity(self._nodes, deployment.engine.block_size)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        lane, drawn = self._submit(request), self._drawn.begin()
        try:
            while True:
                event = await lane.get()
                drawn.token()
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            drawn.end()
            self._finish(lane)

    def ready(self) -> bool:
        return self._accepting and self._controller.ready

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

    def _submit(self, request: GenerationRequest) -> Lane:
        self._controller.check()
        if not self.ready():
            raise OverloadedError(
                "the server is starting or stopping and takes no requests now", retry_after=2.0
            )
        load = [self._lanes.on_node(node) for node in range(self._nodes)]
        node = self._affinity.pick(request.prompt_ids, load)
        lane = self._lanes.open(node)
        submitted = replace(request, handle=lane.number)
        self._controller.send(attention_node(lane.node), Submit(submitted))
        return lane

    def _finish(self, lane: Lane) -> None:
        if not lane.finished:
            self._controller.send(attention_node(lane.node), Cancel(lane.number))
        self._lanes.close(lane)
