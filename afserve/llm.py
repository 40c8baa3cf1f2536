"""The offline door: `LLM` starts its own nodes on this machine, generates, and stops them again.

The same processes and the same engine as `afserve up`, without HTTP. Its event loop runs in a thread of its own,
so it can be used from any program, notebooks included.
"""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from afserve.config import EngineSettings, ModelSource
from afserve.engine.request import FinishReason, GenerationRequest, SamplingParams, TokenEvent, TokenLogprob
from afserve.errors import AfserveError, ConfigError
from afserve.families.table import load_spec
from afserve.launch.gpus import Gpus, check_device, probe_gpus
from afserve.launch.hosts import HostAssignment
from afserve.launch.launcher import Launcher
from afserve.launch.local_run import LocalRun
from afserve.launch.machine import this_machine
from afserve.launch.models import FoundModel, find_model
from afserve.launch.processes import NodeProcesses
from afserve.launch.ray_launcher import RayLauncher
from afserve.launch.ray_run import set_aside
from afserve.launch.ray_settings import RaySettings
from afserve.launch.rebalance import balance_rules
from afserve.launch.topology import Topology, choose
from afserve.launch.transports import choose_transport
from afserve.launch.wishes import Wishes
from afserve.server.choice import ChoiceDecoder, Piece
from afserve.settings import build, check, keywords, settings_of
from afserve.spec import ModelSpec
from afserve.tls import check_exposed
from afserve.tokenizer import Tokenizer

T = TypeVar("T")
_LOSSES = {"on_loss", "silence", "expert_copies", "redundant_experts", "spare_slots", "most_attention"}
_PHASES = {"prefill", "decode"}
_OF_WISHES = _LOSSES | _PHASES
_BY_NAME = _OF_WISHES | {one.name for one in settings_of(EngineSettings)}
Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """One generated continuation; `index` counts the n of one prompt.

    With the finish_reason "error" the model's numbers failed for it, `error` says where; other continuations go on.
    """

    prompt_ids: tuple[int, ...]
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    error: str | None = None


class LLM:
    """`with LLM("nano", attention=2, experts=3, micro_batches=2) as llm: llm.generate([...], params)`.

    What is not given is picked for the machine, as in `afserve up`, whose flags have the same names. `colocated` keeps
    the experts in the attention nodes. `settings` stands for those of the engine and those of losses and copies
    (`on_loss`, `silence`, `expert_copies`, `redundant_experts`, `spare_slots`, `most_attention`), each a keyword of its
    own. With `prefill` and `decode` that many attention nodes compute prompts and the others decode. A node that dies
    is made up for, or ends the run with on_loss="end", and then PeerLost is raised. `ray` starts the nodes on a Ray
    cluster: "auto", an address, or `RaySettings` that say what each node takes of it. Nodes beyond this machine need
    `certs`, a folder that every host has, or `insecure_nodes` for plain text. Raises ConfigError, CheckpointError or
    DoesNotFitError when it cannot start.
    """

    @keywords(Wishes, EngineSettings, only=_BY_NAME)
    def __init__(
        self,
        model: str | Path = "nano",
        *,
        attention: int | None = None,
        experts: int | None = None,
        micro_batches: int | str = "auto",
        colocated: bool = False,
        kv_tokens: int | None = None,
        max_model_len: int | None = None,
        threads: int | None = None,
        dtype: str = "auto",
        load_format: str = "safetensors",
        layers: int | None = None,
        rebalance: str | float | None = None,
        ray: str | RaySettings | None = None,
        certs: str | Path | None = None,
        insecure_nodes: bool = False,
        **settings: bool | float | str | None,
    ) -> None:
        self._model = str(model)
        self._source = ModelSource("", self._model, dtype, load_format, layers)
        for name in settings:
            if name not in _BY_NAME:
                raise ConfigError(f"{name} is not one of {', '.join(sorted(_BY_NAME))}", param=name)
        losses = {name: settings.pop(name) for name in _OF_WISHES & settings.keys()}
        sizes = {"kv_tokens": kv_tokens, "max_model_len": max_model_len, "threads": threads}
        counts = {"attention": attention, "experts": experts, "micro_batches": str(micro_batches)}
        engine = build(EngineSettings, settings)
        self._wishes = build(Wishes, {**counts, **sizes, **losses, "colocated": colocated, "engine": engine})
        check(self._wishes)
        self._rebalance = None if rebalance is None else str(rebalance)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve_loop, name="afserve", daemon=True)
        self._ray = ray if isinstance(ray, RaySettings) else RaySettings(ray=ray)
        self._certs = None if certs is None else Path(certs)
        self._insecure = insecure_nodes
        self._processes = NodeProcesses(warm=self._ray.ray is None)
        self._launcher: Launcher = self._processes
        self._run: LocalRun | None = None
        self._tokenizer: Tokenizer | None = None

    def __enter__(self) -> "LLM":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> "LLM":
        """Returns when every node serves."""
        self._thread.start()
        try:
            self.call(self._start())
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Stops every node. May be called again."""
        if self._thread.is_alive():
            self.call(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    @property
    def topology(self) -> Topology:
        return self._running().topology

    @property
    def tokenizer(self) -> Tokenizer:
        self._running()
        assert self._tokenizer is not None
        return self._tokenizer

    @property
    def run(self) -> LocalRun:
        """The run below, for measurements: its nodes' processes and statistics."""
        return self._running()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Continuations of texts or of lists of token ids, prompt by prompt, `params.n` for each."""
        self._running()
        requests = self._requests_of(_listed(prompts), params or SamplingParams())
        return self.call(self._generate(requests))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop's thread. One failed request is raised as itself, not as a group."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseExceptionGroup as group:
            raise next((e for e in group.exceptions if isinstance(e, AfserveError)), group) from None
        except KeyboardInterrupt:
            future.cancel()
            raise

    # ---- in the loop's thread

    async def _start(self) -> None:
        self._processes.start()
        found = find_model(self._model, self._processes.folder)
        source = replace(self._source, path=str(found.folder), name=found.name)
        check_device(self._wishes.engine.device)
        balance = balance_rules(self._rebalance, self._wishes.redundant_experts)
        self._wishes = replace(self._wishes, rebalance=balance.act)
        if self._ray.ray is None:
            topology, assignment = await self._choose_here(source, found)
        else:
            topology, assignment = await asyncio.to_thread(self._choose_on_ray, source, found)
        self._run = LocalRun(
            topology,
            found,
            found.name,
            self._launcher,
            topology.keeping(balance),
            assignment,
            on_loss=self._wishes.on_loss,
            certs=self._certs,
        )
        await self._run.start()
        self._tokenizer = await asyncio.to_thread(Tokenizer.from_folder, found.tokenizer)
        await self._run.wait_ready()

    async def _choose_here(self, source: ModelSource, found: FoundModel) -> tuple[Topology, HostAssignment]:
        wishes, gpus = self._wishes, Gpus()
        if wishes.engine.device != "cpu":
            gpus = await asyncio.to_thread(probe_gpus)
            wishes = replace(wishes, gpus=gpus.chosen(wishes.engine.device))
        topology = choose(_spec(source, found), source, this_machine(), wishes)
        assignment = HostAssignment.all_here(topology.deployment, gpus)
        choice = choose_transport("auto", assignment.hosted, gpus)
        return topology.over(choice.kind, choice.reason), assignment

    def _choose_on_ray(self, source: ModelSource, found: FoundModel) -> tuple[Topology, HostAssignment]:
        self._launcher = launcher = RayLauncher(self._processes, insecure=self._insecure)
        launcher.start()
        plan = set_aside(launcher, self._ray, self._wishes, found, None)
        check_exposed("nodes on Ray", plan.assignment.listen, self._certs, self._insecure)
        topology = choose(_spec(source, found), source, plan.machine, plan.wishes)
        certified = self._certs is not None
        choice = choose_transport("auto", plan.devices, plan.gpus, certified=certified)
        return topology.over(choice.kind, choice.reason), plan.assignment

    async def _stop(self) -> None:
        if self._run is not None:
            await self._run.stop()
        self._launcher.stop()

    async def _generate(self, requests: Sequence[tuple[int, GenerationRequest]]) -> list[Completion]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(index, request)) for index, request in requests]
        return [task.result() for task in tasks]

    async def _one(self, index: int, request: GenerationRequest) -> Completion:
        decoder = ChoiceDecoder(self.tokenizer, request.params)
        events: list[TokenEvent] = []
        pieces: list[Piece] = []
        async with aclosing(self._running().frontend.generate(request)) as arriving:
            async for event in arriving:
                events.append(event)
                if event.finish_reason == "error":
                    break
                pieces.append(decoder.feed(event))
                if pieces[-1].finish_reason is not None:
                    break
        ended: Piece | TokenEvent = events[-1] if events[-1].error else pieces[-1]
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
        )

    # ---- in the caller's thread

    def _serve_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def _running(self) -> LocalRun:
        if self._run is None or not self._thread.is_alive():
            raise ConfigError("this LLM is not started; use `with LLM(...) as llm:` or call start()")
        return self._run

    def _requests_of(
        self, prompts: Sequence[Prompt], params: SamplingParams
    ) -> list[tuple[int, GenerationRequest]]:
        requests: list[tuple[int, GenerationRequest]] = []
        for prompt in prompts:
            ids = tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
            for index, one in enumerate(params.choices()):
                requests.append((index, GenerationRequest(len(requests), ids, one)))
        return requests


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or several: a text, or a list of token ids, is one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _spec(source: ModelSource, found: FoundModel) -> ModelSpec:
    spec = load_spec(found.folder)
    if source.load_format != "dummy" and not found.weights:
        raise ConfigError(
            f"{found.name}: there are no weights here; add load_format='dummy', or pass a checkpoint folder"
        )
    return spec if source.layers is None else spec.cut(source.layers)
