"""The endpoints that make no text: models, tokens, health, version, metrics, the cluster as its controller sees it."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from afserve import __version__
from afserve.control.backend import ServedModel
from afserve.server.answers.hosted import Hosted
from afserve.server.bodies.prepared import Computed
from afserve.server.endpoints.service import Service
from afserve.server.metrics.nodes import hits, hot_set, queues
from afserve.server.metrics.observe import exposition
from afserve.server.replies.refusal import json_response
from afserve.server.text.kinds import BodyKind

ANTHROPIC = "anthropic-version"  # the header that Anthropic's clients send
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Info:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: Request) -> Response:
        names = self._service.models.served_names
        if ANTHROPIC in request.headers:
            return json_response(anthropic_models([(self._served(name), name) for name in names]))
        data = [model_object(self._served(name), name) for name in names]
        return json_response({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        made = anthropic_object if ANTHROPIC in request.headers else model_object
        return json_response(made(self._served(name), name))

    def _served(self, name: str) -> ServedModel:
        return self._service.models.named(name).backend.model

    async def tokenize(self, request: Request) -> Response:
        return await self._text(request, BodyKind.TOKENIZE)

    async def detokenize(self, request: Request) -> Response:
        return await self._text(request, BodyKind.DETOKENIZE)

    async def tokenizer(self, request: Request) -> Response:
        """What a client needs to make prompts of token ids as this server would; of one model, or of ?model=NAME."""
        name = request.query_params.get("model")
        asked = json.dumps({} if name is None else {"model": name}).encode()
        return await self._computed(BodyKind.TOKENIZER, asked)

    async def _text(self, request: Request, kind: BodyKind) -> Response:
        with await self._service.bodies.read_body(request) as body:
            return await self._computed(kind, body.data)

    async def _computed(self, kind: BodyKind, body: bytes) -> Response:
        found = await self._service.text.prepare(kind, body)
        assert isinstance(found, Computed)
        headers = self._service.ignored.headers(found.ignored)
        return Response(found.body, headers=headers, media_type="application/json")

    async def health(self, request: Request) -> Response:
        """This process answers; whether it takes traffic is /ready, of every model or of ?model=NAME."""
        return json_response({"status": "ok"})

    async def show_ready(self, request: Request) -> Response:
        models = self._service.models
        name = request.query_params.get("model")
        self._service.check_ready(*(models if name is None else (models.named(name),)))
        return json_response({"status": "ready"})

    async def show_load(self, request: Request) -> Response:
        """Requests that are being answered by this gateway, in all and by model."""
        service = self._service
        models = {
            each.model_name: service.answering.count_of_model(each.model_name)
            + service.resumables.count_readers(each.model_name)
            for each in service.models
        }
        return json_response({"server_load": len(service.answering), "models": models})

    async def count_message(self, request: Request) -> Response:
        return await self._text(request, BodyKind.MESSAGE_COUNT)

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        service = self._service
        models = [(each.backend, each.metrics) for each in service.models]
        text = await exposition(service.http, models, len(service.answering), len(service.connections))
        return PlainTextResponse(text, headers={"content-type": METRICS_TYPE})

    async def status(self, request: Request) -> Response:
        models = self._service.models
        name = request.query_params.get("model")
        model = models.first_model if name is None else models.named(name)
        return json_response(await status_object(self._service, model))


def model_object(model: ServedModel, name: str) -> dict[str, object]:
    """By one of its names, with the length of its context in every client's words."""
    lengths = ("max_model_len", "context_length", "context_window", "max_input_tokens", "max_tokens")
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "afserve",
        **dict.fromkeys(lengths, model.max_model_len),
    }


def anthropic_object(model: ServedModel, name: str) -> dict[str, object]:
    """The same in Anthropic's words."""
    created = datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created,
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
    }


def anthropic_models(models: Sequence[tuple[ServedModel, str]]) -> dict[str, object]:
    ends = {"first_id": models[0][1], "last_id": models[-1][1], "has_more": False}
    return {"data": [anthropic_object(model, name) for model, name in models], **ends}


async def status_object(service: Service, model: Hosted) -> dict[str, object]:
    backend, view = model.backend, await model.backend.view()
    return {
        "model": model_object(backend.model, backend.model.name),
        "models": [each.model_name for each in service.models],
        "ready": backend.ready() and not service.answering.draining,
        "version": __version__,
        "audit": None if service.audit is None else service.audit.file.last,
        "epoch": view.epoch,
        "picked": dict(view.picked),
        "balance": list(view.balance),
        "decisions": list(view.decisions),
        "moves": view.moves,
        "routed": view.routed,
        "waiting": view.waiting,
        "moved": dict(view.moved),
        "incidents": [{**asdict(each), "text": str(each)} for each in view.incidents],
        "lost": {role: dict(causes) for role, causes in view.lost.items()},
        "reloaded_bytes": view.reloaded_bytes,
        "resent_rows": view.resent_rows,
        "stalled": dict(view.stalled),
        "wanted": dict(view.wanted),
        "absent": list(view.absent),
        "refusing": view.refusing,
        "refused": dict(view.refused),
        "pilot": None if view.pilot is None else asdict(view.pilot),
        "phases": queues(view.nodes),
        "kv_hits": hits(view.nodes),
        "key_hits": model.metrics.keys.figures(),
        "hot_set": hot_set(view.nodes),
        "goodput": model.metrics.goodput.figures(),
        "nodes": [asdict(node) for node in view.nodes],
    }
