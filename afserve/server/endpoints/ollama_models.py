"""Ollama's /api/tags, /api/ps and /api/show: the models as its clients list and ask about them."""

import asyncio
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from afserve.control.backend import ServedModel
from afserve.errors import RequestError
from afserve.server.bodies.fields import Fields, or_else, parse_object
from afserve.server.bodies.prepared import Computed
from afserve.server.endpoints.model_card import ModelCard, card_of
from afserve.server.endpoints.service import Service
from afserve.server.reading.table import thinks
from afserve.server.replies.refusal import json_response
from afserve.server.surfaces.ollama import served_name
from afserve.server.text.prepare import BodyKind

MOST_BYTES = 1 << 16  # of a body that names a model
_FOREVER = "2318-01-01T00:00:00Z"  # what Ollama says of a model that is never unloaded


class OllamaModels:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def tags(self, request: Request) -> Response:
        return json_response({"models": await self._listed(lambda model: {"modified_at": _since(model)})})

    async def ps(self, request: Request) -> Response:
        """Every model is loaded. Where its weights lie, /status tells."""
        return json_response(
            {
                "models": await self._listed(
                    lambda model: {
                        "expires_at": _FOREVER,
                        "size_vram": 0,
                        "context_length": model.max_model_len,
                    }
                )
            }
        )

    async def show(self, request: Request) -> Response:
        with await self._service.bodies.read_body(request) as body:
            if body.size > MOST_BYTES:
                raise RequestError(
                    f"the body has {body.size} bytes, at most {MOST_BYTES} are needed to name a model"
                )
            fields = Fields(parse_object(body.data))
        name = fields.text("model") or fields.text("name")
        if not name:
            fields.refuse_field("model", "the name of a model")
        models = self._service.models
        served = models.named(served_name(name, models.served_names)).backend.model
        card = await asyncio.to_thread(card_of, served.path)
        asked = json.dumps({"model": served.name}).encode()
        about = await self._service.text.prepare(BodyKind.TOKENIZER, asked)
        assert isinstance(about, Computed), "nothing is generated for it"
        template = or_else(json.loads(about.body)["chat_template"], "")
        return json_response(_shown(served, card, template))

    async def _listed(self, more: Callable[[ServedModel], Mapping[str, object]]) -> list[object]:
        models = self._service.models
        listed: list[object] = []
        for name in models.served_names:
            served = models.named(name).backend.model
            card = await asyncio.to_thread(card_of, served.path)
            head = {"name": name, "model": name, "size": card.size, "digest": card.digest}
            listed.append({**head, "details": _details(card), **more(served)})
        return listed


def _shown(served: ServedModel, card: ModelCard, template: str) -> Mapping[str, object]:
    capabilities = ["completion", *(["tools"] if template else ())]
    return {
        "license": "",
        "modelfile": f"# served by afserve\nFROM {served.name}\n",
        "parameters": f"num_ctx {served.max_model_len}",
        "template": template,
        "details": _details(card),
        "model_info": _info(served, card),
        "capabilities": [*capabilities, *(["thinking"] if thinks(template) else ())],
        "modified_at": _since(served),
    }


def _info(served: ServedModel, card: ModelCard) -> Mapping[str, object]:
    """Keys as GGUF files have them."""
    family = card.family
    info: dict[str, object] = {
        "general.architecture": family,
        "general.basename": served.name,
        f"{family}.context_length": served.max_model_len,
        f"{family}.vocab_size": served.vocab_size,
    }
    if (spec := card.spec) is not None:
        info |= {
            "general.parameter_count": card.parameters,
            f"{family}.block_count": spec.layers,
            f"{family}.embedding_length": spec.hidden,
            f"{family}.expert_count": spec.experts,
            f"{family}.expert_used_count": spec.moe.top_k,
        }
    return info


def _details(card: ModelCard) -> Mapping[str, object]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": card.family,
        "families": [card.family],
        "parameter_size": card.parameter_size,
        "quantization_level": card.quantization,
    }


def _since(served: ServedModel) -> str:
    return datetime.fromtimestamp(served.created, UTC).isoformat()
