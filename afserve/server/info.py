"""The endpoints that make no text: models, tokens, health, version, metrics, the cluster's state."""

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from afserve import __version__
from afserve.errors import NotFoundError, RequestError
from afserve.server.fields import Fields
from afserve.server.openai import chat_request
from afserve.server.refusal import json_response
from afserve.server.service import Service

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Info:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        served = self._service.backend.model.name
        if name != served:
            raise NotFoundError(f"model: {name!r} is not served here, {served!r} is", param="model")
        return json_response(self._model())

    def _model(self) -> dict[str, object]:
        model = self._service.backend.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "afserve",
            "max_model_len": model.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        """{"prompt"} or {"messages"} -> {"count", "max_model_len", "tokens"[, "token_strs"]}."""
        body = await self._service.read(request)
        fields = Fields(body)
        self._service.check_model(fields.text("model"))
        text = fields.text("prompt")
        if text is None and fields.get("messages") is None:
            raise RequestError("prompt: is missing; send a prompt or messages", param="prompt")
        if text is None:
            text, special = await self._service.render(chat_request(body)), False
        else:
            special = fields.flag("add_special_tokens", True)
        (ids,) = await self._service.tokenize([text], add_special_tokens=special)
        reply: dict[str, object] = {
            "count": len(ids),
            "max_model_len": self._service.backend.model.max_model_len,
        }
        reply["tokens"] = ids
        if fields.flag("return_token_strs"):
            reply["token_strs"] = [self._service.tokenizer.token(token_id) for token_id in ids]
        return json_response(reply)

    async def detokenize(self, request: Request) -> Response:
        """{"tokens"} -> {"prompt"}: the text, special tokens spelled out."""
        fields = Fields(await self._service.read(request))
        self._service.check_model(fields.text("model"))
        if fields.get("tokens") is None:
            fields.refuse("tokens", "an array of token ids")
        ids = fields.integers("tokens")
        top = self._service.backend.model.vocab_size
        for i, token_id in enumerate(ids):
            if not 0 <= token_id < top:
                raise RequestError(f"tokens[{i}]: {token_id} is outside [0, {top - 1}]", param="tokens")
        decode = self._service.tokenizer.decode
        text = await self._service.worker.run(lambda: decode(ids, skip_special_tokens=False))
        return json_response({"prompt": text})

    async def health(self, request: Request) -> Response:
        """This process answers; whether it takes traffic is /ready."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        self._service.check_ready()
        return json_response({"status": "ready"})

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        text = self._service.metrics.text(self._service.backend, len(self._service.inflight))
        return PlainTextResponse(text, headers={"content-type": METRICS_TYPE})

    async def status(self, request: Request) -> Response:
        """The model and the cluster as the controller sees them, for `afserve status` and `afserve top`."""
        backend = self._service.backend
        view = backend.view()
        return json_response(
            {
                "model": self._model(),
                "ready": backend.ready() and not self._service.inflight.draining,
                "version": __version__,
                "epoch": view.epoch,
                "picked": dict(view.picked),
                "balance": list(view.balance),
                "decisions": list(view.decisions),
                "moves": view.moves,
                "routed": view.routed,
                "nodes": [asdict(node) for node in view.nodes],
            }
        )
