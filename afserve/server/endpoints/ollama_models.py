"""Ollama's /api/tags, /api/ps and /api/show: the models as its clients list and ask about them."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from afserve.control.backend import ServedModel
from afserve.errors import AfserveError, RequestError
from afserve.families.table import load_spec
from afserve.server.bodies.fields import Fields, or_else, parse_object
from afserve.server.bodies.prepared import Computed
from afserve.server.endpoints.service import Service
from afserve.server.reading.table import thinks
from afserve.server.replies.refusal import json_response
from afserve.server.surfaces.ollama import served_name
from afserve.server.text.kinds import BodyKind
from afserve.spec import ModelSpec

_ENDS = ("safetensors", "gguf")
_ELEMENT = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a model's folder tells of it. `size` in bytes, `parameters` a count, `digest` of the configuration and of
    the weights' names and sizes.

    `spec` is None where the folder has no config.json that is known here.
    """

    size: int
    digest: str
    parameters: int
    spec: ModelSpec | None

    @property
    def family(self) -> str:
        return "moe" if self.spec is None else self.spec.family

    @property
    def quantization(self) -> str:
        """As Ollama calls it: what most weights are stored in."""
        if self.spec is None:
            return ""
        if (how := self.spec.quantization) is not None and how.layout != "mixed":
            return how.layout.upper() if how.gguf else "INT4"
        short = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
        return "F8_E4M3" if self.spec.fp8_block is not None else short.get(self.spec.dtype, "")

    @property
    def parameter_size(self) -> str:
        """In three digits, such as 671B."""
        for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
            if self.parameters >= unit:
                return f"{self.parameters / unit:.3g}{name}"
        return ""


@lru_cache(maxsize=256)
def card_of(folder: str) -> ModelCard:
    """Raises nothing: what cannot be read is not told."""
    try:
        spec = load_spec(folder)
    except (AfserveError, OSError):
        spec = None
    sizes: list[tuple[str, int]] = []
    with suppress(OSError):
        files = sorted(path for end in _ENDS for path in Path(folder).glob(f"*.{end}"))
        sizes = [(path.name, path.stat().st_size) for path in files if path.is_file()]
    parameters = 0 if spec is None else spec.attention_parameters() + spec.routed_parameters()
    size = sum(size for _, size in sizes) or parameters * _ELEMENT.get("" if spec is None else spec.dtype, 2)
    digest = hashlib.sha256(repr((spec, sizes)).encode()).hexdigest()
    return ModelCard(size, digest, parameters, spec)


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
    how = None if card.spec is None else card.spec.quantization
    return {
        "parent_model": "",
        "format": "gguf" if how is not None and how.gguf else "safetensors",
        "family": card.family,
        "families": [card.family],
        "parameter_size": card.parameter_size,
        "quantization_level": card.quantization,
    }


def _since(served: ServedModel) -> str:
    return datetime.fromtimestamp(served.created, UTC).isoformat()
