"""What changes or records the cluster while it serves: numbers of nodes, placements, recordings of routing.

All of it needs the admin key. Where several models are served, each says with ?model=NAME which one is meant.
"""

from collections.abc import Awaitable, Callable
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from afserve.errors import RequestError
from afserve.server.answers.hosted import Hosted
from afserve.server.bodies.verbs import Verb, change_of
from afserve.server.endpoints.service import Service
from afserve.server.replies.refusal import json_response

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
            text = text_of(bytes(body.data))
        await model.backend.apply_placement(text)
        return json_response({"status": "moving"}, 202)

    def changes(self, verb: Verb) -> Callable[[Request], Awaitable[Response]]:
        """What answers POST /admin/VERB: at once, when the change is on its way; /status shows how far it is."""

        async def answer(request: Request) -> Response:
            model = self._model(request) if verb.of_model else self._any()
            with await self._service.bodies.read(request) as body:
                change = change_of(verb, bytes(body.data))
            return json_response(asdict(await model.backend.change(change)), 202)

        return answer

    def _any(self) -> Hosted:
        """One that is ready, for what is asked of the whole run."""
        models = self._service.models
        return next((model for model in models if model.backend.ready()), models.first)

    async def start(self, request: Request) -> Response:
        await self._model(request).backend.record_routing(True)
        return json_response({"status": "recording"})

    async def stop(self, request: Request) -> Response:
        """Ends the recording and returns it."""
        return Response(await self._model(request).backend.record_routing(False), media_type=RECORDING)

    async def dump(self, request: Request) -> Response:
        """What was recorded so far; recording goes on."""
        return Response(await self._model(request).backend.recorded_routing(), media_type=RECORDING)


def text_of(body: bytes) -> str:
    """A placement file; whoever applies it reads what it says."""
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is no UTF-8 text: byte {error.start} of {len(body)}") from error
