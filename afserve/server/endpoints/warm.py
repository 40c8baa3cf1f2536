"""POST /v1/cache/warm: a prompt that will come is computed now, and what it leaves in the cache is kept for a while."""

import json

from afserve.engine.scheduling.request import TokenEvent
from afserve.server.answers.generation import Task
from afserve.server.answers.hosted import Hosted
from afserve.server.bodies.prepared import Prepared
from afserve.server.endpoints.prompts import PromptsEndpoint
from afserve.server.endpoints.service import Service
from afserve.server.text.kinds import BodyKind


class WarmEndpoint(PromptsEndpoint[int]):
    """Of each prompt the tokens that were in the cache already."""

    reason = "warmed"

    def __init__(self, service: Service) -> None:
        super().__init__(service, BodyKind.WARM)

    def take_event(self, event: TokenEvent, task: Task) -> int | None:
        return event.cached_tokens if event.finish_reason is not None else None

    def computed(self, model: Hosted, asked: Prepared) -> None:
        if asked.scheduling.retain > 0 and not asked.tiles:  # which nobody keeps to compute them again
            for keeper in model.keeping_warm:
                keeper.warmed(asked)

    def draw_body(self, task: Task, results: list[int], seconds: float) -> bytes:
        said = {
            "object": "cache.warm",
            "model": task.asked.model,
            "usage": {"prompt_tokens": task.prompt_tokens, "cached_tokens": sum(results)},
            "retain": task.asked.scheduling.retain,
            "seconds": round(seconds, 6),
        }
        return json.dumps(said).encode()
