"""vLLM's two addresses of a deployment that changes its size, in terms of `afserve scale`.

A data parallel engine of vLLM's owns requests and their cache, as an attention node does: `decode` nodes where others
read their prompts, else all attention nodes. Experts are sized by `afserve scale --experts` and by a pilot. Requests go
on meanwhile, which vLLM's do not. Bodies, words and statuses as of vLLM's `serve/elastic_ep/api_router.py`.
"""

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from afserve.control.backend import Backend
from afserve.control.wire.change_values import Changed, ScaleTo
from afserve.control.wire.view_values import ClusterView
from afserve.errors import CapacityError, PeerError, RequestError
from afserve.member import MODEL_ROLES, AttentionPhase
from afserve.server.endpoints.admin import MOST_NODES, Admin
from afserve.server.replies.refusal import json_response

_READY = "ready"
_SIZE, _TIMEOUT = "new_data_parallel_size", "drain_timeout"
_MOST_SECONDS = 3600
_SECONDS = 120  # vLLM's own
_LOOK_SECONDS = 0.2


class ScalingTimeError(RequestError):
    """The other number is wanted, and not there yet."""

    status = 408


class ElasticEndpoints:
    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def scale(self, request: Request) -> Response:
        """Answers when so many serve and nobody else does, after `drain_timeout` seconds at most."""
        backend = self._admin.model(request).backend
        body = await self._admin.read_fields(request, "/scale_elastic_ep")
        size = body.integer(_SIZE, 1, MOST_NODES)
        seconds = body.integer(_TIMEOUT, 1, _MOST_SECONDS) or _SECONDS
        if size is None:
            raise RequestError.about(_SIZE, f'is missing; send such as {{"{_SIZE}": 4}}')
        changed = await backend.change(ScaleTo({_pool(await backend.view()): str(size)}))
        try:
            async with asyncio.timeout(seconds):
                await _done(backend, changed)
        except TimeoutError as error:
            raise ScalingTimeError(
                f"{_TIMEOUT}: {size} nodes are wanted and not all there after {seconds} s; it goes on, see /status",
                param=_TIMEOUT,
            ) from error
        return json_response({"message": f"Scaled to {size} data parallel engines"})

    async def is_scaling(self, request: Request) -> Response:
        view = await self._admin.model(request).backend.view()
        return json_response({"is_scaling_elastic_ep": not _settled(view)})


def _pool(view: ClusterView) -> str:
    phases = {node.phase for node in view.nodes}
    return "decode" if AttentionPhase.PREFILL in phases or AttentionPhase.DECODE in phases else "attention"


async def _done(backend: Backend, changed: Changed) -> None:
    """A controller that is away for a moment is asked again."""
    while True:
        try:
            if _reached(await backend.view(), changed.coming, changed.going):
                return
        except (CapacityError, PeerError):
            pass  # its successor goes on with the change; whoever waits has a deadline
        await asyncio.sleep(_LOOK_SECONDS)


def _reached(view: ClusterView, coming: Sequence[str], going: Sequence[str]) -> bool:
    states = {node.name: node.state for node in view.nodes}
    return all(states.get(name) == _READY for name in coming) and not any(name in states for name in going)


def _settled(view: ClusterView) -> bool:
    """As many as are wanted, and all of them serve."""
    for role in MODEL_ROLES:
        states = [node.state for node in view.nodes if node.role == role]
        if len(states) != view.wanted.get(str(role), len(states)) or any(one != _READY for one in states):
            return False
    return True
