"""The offline door: `LLM` starts its own nodes on this machine, generates, and stops them again.

The same processes and the same engine as `afserve up`, without HTTP. Its event loop runs in a thread of its own,
so it can be used from any program, notebooks included.
"""

import asyncio
import json
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from afserve.config import EngineSettings, ModelSource
from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import AfserveError, ConfigError
from afserve.launch.plan.ray_settings import RaySettings
from afserve.launch.plan.wishes import RunSettings, UpFlags, Wishes
from afserve.launch.sites.choose import choose_site
from afserve.server.http.settings import Listening, ServerSettings
from afserve.server.replies.completion import Completion
from afserve.settings import build, check, keywords, settings_of

if TYPE_CHECKING:
    from afserve.launch.plan.topology import Topology
    from afserve.launch.run.local_run import LocalRun
    from afserve.launch.run.offline import OfflineRun
    from afserve.tokens.tokenizer import Tokenizer

T = TypeVar("T")
_LOSSES = {"on_loss", "silence", "expert_copies", "redundant_experts", "spare_slots", "most_attention"}
_PHASES = {"prefill", "decode"}
_OF_WISHES = _LOSSES | _PHASES | {"numa"}
_BY_NAME = _OF_WISHES | {one.name for one in settings_of(EngineSettings)}
Prompt = str | Sequence[int]


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
        **settings: bool | float | str | Mapping[str, object] | None,
    ) -> None:
        for name in settings:
            if name not in _BY_NAME:
                raise ConfigError(f"{name} is not one of {', '.join(sorted(_BY_NAME))}", param=name)
        losses = {name: settings.pop(name) for name in _OF_WISHES & settings.keys()}
        sizes = {"kv_tokens": kv_tokens, "max_model_len": max_model_len, "threads": threads}
        counts = {"attention": attention, "experts": experts, "micro_batches": str(micro_batches)}
        if isinstance(config := settings.get("speculative_config"), Mapping):
            settings["speculative_config"] = _as_json(config)
        engine = build(EngineSettings, settings)
        wishes = build(Wishes, {**counts, **sizes, **losses, "colocated": colocated, "engine": engine})
        check(wishes)
        run = RunSettings(
            model=str(model),
            rebalance=None if rebalance is None else str(rebalance),
            certs=None if certs is None else Path(certs),
            insecure_nodes=insecure_nodes,
        )
        source = ModelSource("", run.model, dtype, load_format, layers)
        on_ray = ray if isinstance(ray, RaySettings) else RaySettings(ray=ray)
        self._asked = UpFlags(run, source, wishes, Listening(), ServerSettings(), on_ray)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve_loop, name="afserve", daemon=True)
        self._site = choose_site(run, on_ray)
        self._run: OfflineRun | None = None

    def __enter__(self) -> "LLM":
        return self.start()

    def __exit__(self, *_: object) -> None:
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
    def topology(self) -> "Topology":
        return self._running().run.topology

    @property
    def tokenizer(self) -> "Tokenizer":
        return self._running().tokenizer

    @property
    def run(self) -> "LocalRun":
        """The run below, for measurements: its nodes' processes and statistics."""
        return self._running().run

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Continuations of texts or of lists of token ids, prompt by prompt, `params.n` for each."""
        return self.call(self._running().generate(_listed(prompts), params or SamplingParams()))

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
        self._site.start()  # it imports torch, and this process what the run needs
        from afserve.launch.run.offline import OfflineRun

        self._run = OfflineRun(self._asked, self._site)
        await self._run.start()

    async def _stop(self) -> None:
        if self._run is not None:
            await self._run.stop()
        self._site.stop()

    # ---- in the caller's thread

    def _serve_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def _running(self) -> "OfflineRun":
        if self._run is None or not self._thread.is_alive():
            raise ConfigError("this LLM is not started; use `with LLM(...) as llm:` or call start()")
        return self._run


def _as_json(config: Mapping[str, object]) -> str:
    try:
        return json.dumps(dict(config))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"speculative_config: {error}", param="speculative_config") from error


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or several: a text, or a list of token ids, is one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
