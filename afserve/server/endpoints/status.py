"""The model and the cluster as the controller sees them: what `afserve status`, `afserve top` and the page read."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from afserve import __version__
from afserve.control.backend import ServedModel
from afserve.server.answers.hosted import Hosted
from afserve.server.endpoints.service import Service
from afserve.server.metrics.nodes import hits, queues


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
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
    }


def anthropic_models(models: Sequence[tuple[ServedModel, str]]) -> dict[str, object]:
    """All of them as one page."""
    ends = {"first_id": models[0][1], "last_id": models[-1][1], "has_more": False}
    return {"data": [anthropic_object(model, name) for model, name in models], **ends}


async def status_object(service: Service, model: Hosted) -> dict[str, object]:
    backend = model.backend
    view = await backend.view()
    return {
        "model": model_object(backend.model, backend.model.name),
        "models": [each.model_name for each in service.models],
        "ready": backend.ready() and not service.answering.draining,
        "version": __version__,
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
        "phases": queues(view.nodes),
        "kv_hits": hits(view.nodes),
        "goodput": model.metrics.goodput.figures(),
        "nodes": [asdict(node) for node in view.nodes],
    }
