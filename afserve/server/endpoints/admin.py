"""What changes or records the cluster while it serves: numbers of nodes, placements, recordings of routing.

All of it needs the admin key. Where several models are served, each says with ?model=NAME which one is meant.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from afserve.control.wire.change_values import PHASE_POOLS, POOLS, Argument, Change, Form, Verb
from afserve.errors import RequestError
from afserve.server.answers.hosted import Hosted
from afserve.server.bodies.fields import Fields, or_else, parse_object
from afserve.server.endpoints.service import Service
from afserve.server.replies.refusal import json_response

MOST_NODES = 4096
_NUMBER = 'a number of nodes, or a change of it as text: 3, "+1" or "-1"'
_TEXT: Mapping[str, object] = {"type": "string"}


# Bodies that change the running deployment, as checked values and as JSON schemas: both as the change is declared.


def change_of(verb: Verb, body: Fields) -> Change:
    """Raises RequestError naming the field, or what is missing in the words of the declaration."""
    found: dict[str, Any] = {each.name: _read(verb, each, body) for each in verb.arguments}
    if not found:
        for name in body.raw():
            body.refuse_field(name, "nothing: the body is {}")
    if any(value is None for value in found.values()):
        first = verb.arguments[0]
        raise RequestError(verb.missing, param=None if first.form is Form.COUNTS else first.name)
    return verb.change(**found)


def _read(verb: Verb, asked: Argument, body: Fields) -> object:
    """None where it is needed and not there."""
    match asked.form:
        case Form.TEXT:
            return or_else(body.text(asked.name), asked.default)
        case Form.NUMBER:
            return or_else(body.real(asked.name, 0.0, asked.most), asked.default)
        case Form.NAMES:
            names, every = body.texts(asked.name, MOST_NODES), body.flag("all")
            return None if bool(names) == every else names
        case Form.COUNTS:
            return _counts(body) or None


def _counts(body: Fields) -> dict[str, str]:
    """{"attention": 3, "experts": "-1"}: a number is how many there shall be, text with a sign a change of it."""
    for pool, value in body.raw().items():
        if isinstance(value, bool) or not isinstance(value, int | str):
            body.refuse_field(pool, _NUMBER)
    return {pool: str(value) for pool, value in body.raw().items()}


def schema_of(verb: Verb) -> Mapping[str, object]:
    properties: dict[str, object] = {}
    for each in verb.arguments:
        match each.form:
            case Form.TEXT:
                properties[each.name] = _TEXT
            case Form.NUMBER:
                properties[each.name] = {"type": "number", "minimum": 0, "maximum": each.most}
            case Form.NAMES:
                properties[each.name] = {"type": "array", "items": _TEXT, "maxItems": MOST_NODES}
                properties["all"] = {"type": ["boolean", "null"]}
            case Form.COUNTS:
                properties |= {pool: {"type": ["integer", "string"]} for pool in (*POOLS, *PHASE_POOLS)}
    needed = [each.name for each in verb.arguments if each.default is None and each.form is Form.TEXT]
    return {"type": "object", "required": needed, "properties": properties}


RECORDING = "application/octet-stream"
MOST_CHANGE_BYTES = 1 << 16  # names of some thousand nodes
Endpoint = Callable[[Request], Awaitable[Response]]


class Admin:
    def __init__(self, service: Service) -> None:
        self._service = service

    def model(self, request: Request) -> Hosted:
        return self._service.models.one(request.query_params.get("model"))

    async def show_placement(self, request: Request) -> Response:
        """The placement in force, as `afserve place --json` prints it."""
        return Response(await self.model(request).backend.placement(), media_type="application/json")

    async def apply(self, request: Request) -> Response:
        """Body: a placement file. Answers at once; /status shows the epoch change when everyone has switched."""
        model = self.model(request)
        self._service.check_ready(model)
        with await self._service.bodies.read_body(request) as body:
            text = text_of(bytes(body.data))
        await model.backend.apply_placement(text)
        return json_response({"status": "moving"}, 202)

    def change_handler(self, verb: Verb) -> Endpoint:
        """What answers this verb: at once, when it is on its way; /status shows how far it is."""

        async def obey(request: Request) -> Response:
            model = self._any_ready() if verb.whole_run else self.model(request)
            asked = change_of(verb, await self.read_fields(request, verb.path))
            return json_response(asdict(await model.backend.change(asked)), 202)

        return obey

    def _any_ready(self) -> Hosted:
        models = self._service.models
        return next((model for model in models if model.backend.ready()), models.first_model)

    async def read_fields(self, request: Request, path: str) -> Fields:
        """Parsed here and not in a text process, since it is small."""
        with await self._service.bodies.read_body(request) as body:
            if len(body.data) > MOST_CHANGE_BYTES:
                raise RequestError(
                    f"the body has {len(body.data)} bytes, {path} takes at most {MOST_CHANGE_BYTES}"
                )
            return Fields(parse_object(body.data))

    async def start_recording(self, request: Request) -> Response:
        await self.model(request).backend.record_routing(True)
        return json_response({"status": "recording"})

    async def stop_recording(self, request: Request) -> Response:
        """Ends the recording and returns it."""
        return Response(await self.model(request).backend.record_routing(False), media_type=RECORDING)

    async def dump(self, request: Request) -> Response:
        """What was recorded so far; recording goes on."""
        return Response(await self.model(request).backend.recorded_routing(), media_type=RECORDING)


def text_of(body: bytes) -> str:
    """A placement file as it was sent; the controller reads what it says."""
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is no UTF-8 text: byte {error.start} of {len(body)}") from error
