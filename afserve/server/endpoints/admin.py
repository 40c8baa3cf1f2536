"""What changes or records the cluster while it serves: numbers of nodes, placements, recordings of routing.

All of it needs the admin key. Where several models are served, each says with ?model=NAME which one is meant.
"""

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from afserve.control.wire.changes import decode_change
from afserve.server.answers.hosted import Hosted
from afserve.server.endpoints.service import Service
from afserve.server.replies.refusal import json_response
from afserve.server.text.prepare import BodyKind

RECORDING = "application/octet-stream"


class Admin:
    def __init__(self, service: Service) -> None:
        self._service = service

    def _model(self, request: Request) -> Hosted:
        return self._service.models.one(request.query_params.get("model"))

    async def placement(self, request: Request) -> Response:
        """The placement in force, as `afserve place --json` prints it."""
        return Response(await self._model(request).backend.placement(), media_type="application/json")

    async def apply(self, request: Request) -> Response:
        """Body: a placement file. Answers at once; /status shows the epoch change when everyone has switched."""
        model = self._model(request)
        self._service.check_ready(model)
        with await self._service.bodies.read(request) as body:
            text = await self._service.text.prepare(BodyKind.PLACEMENT, body.data)
        assert isinstance(text, bytes)
        await model.backend.apply_placement(text.decode())
        return json_response({"status": "moving"}, 202)

    async def scale(self, request: Request) -> Response:
        """Other numbers of nodes. Answers when they are on their way; /status shows who is there."""
        return await self._change(request, BodyKind.SCALE)

    async def drain(self, request: Request) -> Response:
        """One node goes once nothing needs it."""
        return await self._change(request, BodyKind.DRAIN)

    async def restart(self, request: Request) -> Response:
        """New processes for some nodes or all, one after another."""
        return await self._change(request, BodyKind.RESTART)

    async def role(self, request: Request) -> Response:
        """One node goes, and one of another role starts in its place."""
        return await self._change(request, BodyKind.ROLE)

    async def phase(self, request: Request) -> Response:
        """One attention node computes prompts for others, or decodes what others computed, or does both."""
        return await self._change(request, BodyKind.PHASE)

    async def fault(self, request: Request) -> Response:
        """One node is broken on purpose; /status shows what that led to."""
        return await self._change(request, BodyKind.FAULT)

    async def down(self, request: Request) -> Response:
        """The run ends with all its models."""
        models = self._service.models
        ready = (model for model in models if model.backend.ready())
        return await self._changed(request, BodyKind.END, next(ready, models.first))

    async def _change(self, request: Request, kind: BodyKind) -> Response:
        return await self._changed(request, kind, self._model(request))

    async def _changed(self, request: Request, kind: BodyKind, model: Hosted) -> Response:
        with await self._service.bodies.read(request) as body:
            asked = await self._service.text.prepare(kind, body.data)
        assert isinstance(asked, bytes)
        return json_response(asdict(await model.backend.change(decode_change(asked))), 202)

    async def start(self, request: Request) -> Response:
        await self._model(request).backend.record_routing(True)
        return json_response({"status": "recording"})

    async def stop(self, request: Request) -> Response:
        """Ends the recording and returns it."""
        return Response(await self._model(request).backend.record_routing(False), media_type=RECORDING)

    async def dump(self, request: Request) -> Response:
        """What was recorded so far; recording goes on."""
        return Response(await self._model(request).backend.recorded_routing(), media_type=RECORDING)
