"""What changes or records the cluster while it serves: numbers of nodes, placements, recordings of routing.

All of it needs the admin key. Where several models are served, each says with ?model=NAME which one is meant.
"""

from collections.abc import Awaitable, Callable
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from afserve.control.wire.change_values import Verb
from afserve.errors import RequestError
from afserve.server.answers.hosted import Hosted
from afserve.server.bodies.changes import change_of
from afserve.server.bodies.fields import Fields, parse_object
from afserve.server.endpoints.service import Service
from afserve.server.replies.refusal import json_response

RECORDING = "application/octet-stream"
MOST_CHANGE_BYTES = 1 << 16  # names of some thousand nodes
Endpoint = Callable[[Request], Awaitable[Response]]


class Admin:
    def __init__(self, service: Service) -> None:
        self._service = service

    def _model(self, request: Request) -> Hosted:
        return self._service.models.one(request.query_params.get("model"))

    async def show_placement(self, request: Request) -> Response:
        """The placement in force, as `afserve place --json` prints it."""
        return Response(await self._model(request).backend.placement(), media_type="application/json")

    async def apply(self, request: Request) -> Response:
        """Body: a placement file. Answers at once; /status shows the epoch change when everyone has switched."""
        model = self._model(request)
        self._service.check_ready(model)
        with await self._service.bodies.read_body(request) as body:
            text = text_of(bytes(body.data))
        await model.backend.apply_placement(text)
        return json_response({"status": "moving"}, 202)

    def change_handler(self, verb: Verb) -> Endpoint:
        """What answers this verb: at once, when it is on its way; /status shows how far it is."""

        async def obey(request: Request) -> Response:
            model = self._any_ready() if verb.whole_run else self._model(request)
            asked = change_of(verb, await self._fields(request, verb))
            return json_response(asdict(await model.backend.change(asked)), 202)

        return obey

    def _any_ready(self) -> Hosted:
        models = self._service.models
        return next((model for model in models if model.backend.ready()), models.first_model)

    async def _fields(self, request: Request, verb: Verb) -> Fields:
        """Parsed here and not in a text process, since it is small."""
        with await self._service.bodies.read_body(request) as body:
            if len(body.data) > MOST_CHANGE_BYTES:
                raise RequestError(
                    f"the body has {len(body.data)} bytes, /admin/{verb.name} takes at most {MOST_CHANGE_BYTES}"
                )
            return Fields(parse_object(body.data))

    async def start_recording(self, request: Request) -> Response:
        await self._model(request).backend.record_routing(True)
        return json_response({"status": "recording"})

    async def stop_recording(self, request: Request) -> Response:
        """Ends the recording and returns it."""
        return Response(await self._model(request).backend.record_routing(False), media_type=RECORDING)

    async def dump(self, request: Request) -> Response:
        """What was recorded so far; recording goes on."""
        return Response(await self._model(request).backend.recorded_routing(), media_type=RECORDING)


def text_of(body: bytes) -> str:
    """A placement file as it was sent; the controller reads what it says."""
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is no UTF-8 text: byte {error.start} of {len(body)}") from error
