"""The model and the cluster as the controller sees them: what `afserve status`, `afserve top` and the page read."""

from dataclasses import asdict

from afserve import __version__
from afserve.control.backend import ServedModel
from afserve.server.hosted import Hosted
from afserve.server.kv_moves import queues
from afserve.server.kv_tiers import hits
from afserve.server.service import Service


def model_object(model: ServedModel, name: str) -> dict[str, object]:
    """By one of its names."""
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "afserve",
        "max_model_len": model.max_model_len,
    }


async def status_object(service: Service, model: Hosted) -> dict[str, object]:
    backend = model.backend
    view = await backend.view()
    return {
        "model": model_object(backend.model, backend.model.name),
        "models": [each.name for each in service.models],
        "ready": backend.ready() and not service.inflight.draining,
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
