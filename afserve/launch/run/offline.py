"""What `LLM` does in its event loop: starts nodes here or on Ray, and turns requests into continuations.

Apart from `afserve.doors.llm`, which starts the fork server before it imports this file: the two processes then import
torch and the controller at the same time.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

from afserve.config import ModelSource
from afserve.drafts import DraftChoice
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams, TokenEvent
from afserve.engine.scheduling.routed_experts import joined
from afserve.errors import ConfigError
from afserve.launch.plan.drafting import planned_spec
from afserve.launch.plan.gpus import check_device
from afserve.launch.plan.hosts import HostAssignment
from afserve.launch.plan.models import FoundModel
from afserve.launch.plan.topology import Topology, choose
from afserve.launch.plan.transports import check_kv_transport, choose_transport
from afserve.launch.plan.wishes import UpFlags
from afserve.launch.run.local_run import LocalRun
from afserve.launch.run.planned_run import balance_rules
from afserve.launch.sites.site import Site
from afserve.launch.sites.survey import Survey
from afserve.server.replies.choice import ChoiceDecoder, TextPiece
from afserve.server.replies.completion import Completion
from afserve.spec import ModelSpec
from afserve.tokens.tokenizer import Tokenizer


class OfflineRun:
    """Nodes that serve, from `start()` to `stop()`. `site` is started before and may be importing torch still."""

    def __init__(self, asked: UpFlags, site: Site) -> None:
        self._asked = asked
        self._site = site
        self._run: LocalRun | None = None
        self._tokenizer: Tokenizer | None = None

    @property
    def run(self) -> LocalRun:
        assert self._run is not None, "start() first"
        return self._run

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._tokenizer is not None, "start() first"
        return self._tokenizer

    async def start(self) -> None:
        """Returns when every node serves. Whether it does or raises, `stop` ends what was started."""
        asked = self._asked
        check_device(asked.wishes.engine.device)
        balance = balance_rules(asked.run.rebalance, asked.wishes.redundant_experts)
        asked = replace(asked, wishes=replace(asked.wishes, rebalance=balance.act))
        survey = await asyncio.to_thread(self._site.survey, asked)
        found = survey.found
        if asked.source.load_format == "safetensors":
            found.warn_of_tokenizer()
        topology, assignment = _planned(survey)
        self._run = LocalRun(
            topology,
            found,
            found.name,
            self._site,
            topology.keeping(balance),
            assignment,
            on_loss=asked.wishes.on_loss,
            certs=asked.run.certs,
        )
        await self._run.start()
        self._tokenizer = await asyncio.to_thread(Tokenizer.from_folder, found.tokenizer)
        await self._run.wait_ready()

    async def stop(self) -> None:
        if self._run is not None:
            await self._run.stop()
        self._site.stop()

    async def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams
    ) -> list[Completion]:
        """Prompt by prompt, `params.n` of each."""
        requests = self._requests_of(prompts, params)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(index, request)) for index, request in requests]
        return [task.result() for task in tasks]

    async def _one(self, index: int, request: GenerationRequest) -> Completion:
        decoder = ChoiceDecoder(self.tokenizer, request.params, request.prompt_ids)
        events: list[TokenEvent] = []
        pieces: list[TextPiece] = []
        async with aclosing(self.run.frontend.open(request).events()) as arriving:
            async for event in arriving:
                events.append(event)
                if event.finish_reason == "error":
                    break
                pieces.append(decoder.decode_event(event))
                if pieces[-1].finish_reason is not None:
                    break
        ended: TextPiece | TokenEvent = events[-1] if events[-1].error else pieces[-1]
        taken = [e.token_ids[: piece.tokens] for e, piece in zip(events, pieces, strict=False)]
        return Completion(
            request.prompt_ids,
            index,
            "".join(piece.text for piece in pieces),
            tuple(token for tokens in taken for token in tokens),
            ended.finish_reason,  # type: ignore[arg-type]
            events[0].cached_tokens,
            tuple(entry for piece in pieces for entry in piece.logprobs),
            events[0].prompt_logprobs,
            events[-1].error,
            joined(piece.routed for piece in pieces if piece.routed is not None),
        )

    def _requests_of(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams
    ) -> list[tuple[int, GenerationRequest]]:
        requests: list[tuple[int, GenerationRequest]] = []
        for prompt in prompts:
            ids = tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
            for index, one in enumerate(params.choices()):
                requests.append((index, GenerationRequest(len(requests), ids, one)))
        return requests


def _planned(survey: Survey) -> tuple[Topology, HostAssignment]:
    source = replace(survey.flags.source, path=str(survey.found.folder), name=survey.found.name)
    wishes, gpus = survey.flags.wishes, survey.gpus
    if wishes.engine.device != "cpu" and not wishes.hosts:
        wishes = replace(wishes, gpus=gpus.chosen(wishes.engine.device))
    topology = choose(_spec(source, survey.found, wishes.engine.drafts()), source, survey.machine, wishes)
    assignment = survey.assigned or HostAssignment.all_here(topology.deployment, gpus)
    hosted, certified = survey.devices or assignment.hosted, survey.flags.run.certs is not None
    check_kv_transport(wishes.engine.kv_transport, hosted, certified=certified)
    choice = choose_transport("auto", hosted, gpus, certified=certified)
    return topology.with_transport(choice.kind, choice.reason), assignment


def _spec(source: ModelSource, found: FoundModel, draft: DraftChoice) -> ModelSpec:
    if source.load_format != "dummy" and not found.weights:
        raise ConfigError(
            f"{found.name}: there are no weights here; add load_format='dummy', or pass a checkpoint folder"
        )
    return planned_spec(source, draft)
