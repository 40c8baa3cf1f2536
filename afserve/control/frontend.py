"""The `Backend` of the HTTP server over real processes: picks an attention node, streams its events back.

Closing the iterator of `generate` early cancels the request on its node. It knows no HTTP and no text.
"""

from collections.abc import AsyncGenerator
from dataclasses import replace

from afserve.control.affinity import Affinity
from afserve.control.backend import ClusterView, ServedModel
from afserve.control.changes import Change, Changed
from afserve.control.gateway import Gateway
from afserve.control.queries import Queries
from afserve.control.request_trace import RequestTrace
from afserve.control.requests import Request
from afserve.control.wire.values import Cancel, Submit
from afserve.engine.request import GenerationRequest, TokenEvent
from afserve.errors import OverloadedError
from afserve.member import NodeId, attention_node
from afserve.trace import Trace


class Frontend:
    """One per gateway. `trace` is drawn into, if given."""

    def __init__(
        self,
        queries: Queries,
        gateway: Gateway,
        model: ServedModel,
        trace: Trace | None = None,
    ) -> None:
        self.model = model
        self._queries = queries
        self._gateway = gateway
        self._drawn = RequestTrace(trace)
        self._accepting = True
        self._nodes = queries.attention_nodes
        self._affinity = Affinity(self._nodes, queries.block_size)

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
        return self._accepting and self._queries.ready and self._gateway.is_attended(self._nodes)

    def close(self) -> None:
        """Accept nothing new; what runs goes on."""
        self._accepting = False

    async def view(self) -> ClusterView:
        return await self._queries.view()

    async def placement(self) -> str:
        return await self._queries.placement()

    async def apply_placement(self, text: str) -> None:
        await self._queries.apply_placement(text)

    async def record_routing(self, on: bool) -> bytes:
        return await self._queries.record_routing(on)

    async def recorded_routing(self) -> bytes:
        return await self._queries.recorded_routing()

    async def change(self, change: Change) -> Changed:
        return await self._queries.change(change)

    def missing(self) -> list[NodeId]:
        """Attention nodes that have no stream to this gateway."""
        return [attention_node(index) for index in range(self._nodes) if not self._gateway.is_here(index)]

    async def wait_attended(self) -> None:
        """Returns when every attention node has opened its stream."""
        await self._gateway.wait_attended(self._nodes)

    def _submit(self, request: GenerationRequest) -> Request:
        self._queries.check()
        if not self.ready():
            raise OverloadedError(
                "the server is starting or stopping and takes no requests now", retry_after=2.0
            )
        load = [self._gateway.requests.on_node(node) for node in range(self._nodes)]
        opened = self._gateway.requests.open(request, self._affinity.pick(request.prompt_ids, load))
        submitted = replace(request, handle=opened.number)
        self._gateway.send(opened.node, Submit(submitted))
        return opened

    def _finish(self, opened: Request) -> None:
        if not opened.finished:
            self._gateway.send(opened.node, Cancel(opened.number))
        self._gateway.requests.close(opened)
