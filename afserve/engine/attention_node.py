"""An attention node: owns requests and KV cache, and runs whichever micro-batch can go on.

`step` never blocks for long: where one call computes all layers (`ExchangeRunner`), that waits some milliseconds for
expert nodes. When it has left `stalled` true, `wait` parks until one has answered. It knows no processes and no
sockets: requests come in as values, tokens go out as events.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Generic

import torch

from afserve.clock import Clock, MonotonicClock
from afserve.comm.kv.sharing import SharedPrompt
from afserve.comm.m2n.link_contract import Link
from afserve.comm.m2n.waves import RecoveryStats
from afserve.comm.transport import Dialled
from afserve.config import EngineConfig
from afserve.engine.device_queues import in_queues_apart
from afserve.engine.draft.draft_model import DraftModel
from afserve.engine.draft.drafting import open_drafting
from afserve.engine.draft.followers import open_followers
from afserve.engine.kv.blocks import Hash
from afserve.engine.kv.cache import KvCache
from afserve.engine.kv.groups import KvGroup
from afserve.engine.kv.store import PooledBlocks
from afserve.engine.kv.told import ToldCache
from afserve.engine.micro_batch import MicroBatch
from afserve.engine.node_counts import counted
from afserve.engine.pace import Pace
from afserve.engine.ping_pong import PingPong
from afserve.engine.scheduling.guides import Guides
from afserve.engine.scheduling.request import GenerationRequest, TokenEvent
from afserve.engine.scheduling.routed_experts import check_size, row_bytes_of
from afserve.engine.scheduling.scheduler import Scheduler
from afserve.engine.stats import AttentionStats, KvStats, NearStats, TierStats
from afserve.engine.stats.drafts import NO_DRAFTS
from afserve.engine.step.choose import choose_runners
from afserve.engine.step.load import ExpertLoad
from afserve.engine.step.look_ups import beside_of
from afserve.engine.step.meter import Meter
from afserve.engine.step.picture_rows import PictureRows
from afserve.engine.step.runner import T
from afserve.errors import RequestError
from afserve.member import AttentionPhase
from afserve.models.decoder import AttentionModel
from afserve.placement.expert_memory import ExpertMemoryStats
from afserve.placement.placement import Placement
from afserve.placement.rebalance.stats import RoutedRows
from afserve.tracing.trace import Arrow, Slice, Trace


class AttentionNode(Generic[T]):
    def __init__(
        self,
        model: AttentionModel,
        link: Link[T],
        config: EngineConfig,
        eos_ids: frozenset[int] = frozenset(),
        clock: Clock | None = None,
        trace: Trace | None = None,
        weights: str = "",
        guides: Guides | None = None,
        groups: Sequence[KvGroup] = (),
        draft_model: DraftModel | None = None,
    ) -> None:
        """`weights` names the numbers that were loaded, `groups` are what layers keep (see `KvCache`). No grammar
        without `guides`. `draft_model`: the one that `config` names."""
        spec, self.isa = model.spec, model.ops.isa
        self._link, self._config, self._guides = link, config, guides
        self.kv = KvCache(model, config, weights, groups)
        self.blocks = PooledBlocks(self.kv)
        self.told = ToldCache(self.kv.pool, config.kv_events)
        self.kv.on_forgotten = self.told.gone
        self._pictures = PictureRows(model)
        seeing = spec.encoder, self._pictures.reach
        self._scheduler = Scheduler(config, spec.vocab_size, eos_ids, self.kv.pool, self.told, *seeing)
        self._load = ExpertLoad.of(spec, config.micro_batches, model.ops.device)
        self._meter = Meter(clock or MonotonicClock(), trace)
        runners = choose_runners(model, self.kv, link, self._load, self._meter, config)
        self._drafting, behind = open_drafting(config.drafts(), spec, config.max_model_len)
        if self._drafting is not None:
            self._scheduler.on_drop = self._drafting.forget
        loops = open_followers(
            behind, draft_model, model, self.kv, runners, self._scheduler.blocks, self._load, config, clock
        )
        own = model, self.kv, self._scheduler
        beside = beside_of(model, link, self._meter, self._pictures, len(runners))
        self._micro_batches = [
            MicroBatch(i, *own, runner, self._meter, config, self._load, self._drafting, loop, reads)
            for i, (runner, loop, reads) in enumerate(zip(runners, loops, beside, strict=True))
        ]
        steps = [m.run() for m in self._micro_batches]
        self._turns = PingPong(
            self._micro_batches,
            in_queues_apart(steps, model.places, config.gpu_kernels),
            link,
            self._scheduler,
            self._meter,
            self._load,
            self._drafting,
            Pace(config.micro_batches) if config.adaptive else None,
        )
        self._adopted: int | None = None  # the epoch of the last placement that was adopted while serving
        self.stalled = True
        self.unread = ""  # what to say of tensors that nothing read
        self.expert_error: float | None = None  # relative, of expert weights that were rounded for this node
        self.dense_error: float | None = None  # the same of its other linear maps
        self.expert_memory: Callable[[], ExpertMemoryStats] = ExpertMemoryStats  # of a bank in this process
        self._row_bytes, self._routed_bytes = spec.hidden * model.dtype.itemsize, row_bytes_of(spec)
        self._prompt_tokens = self._generated_tokens = 0

    def submit(self, request: GenerationRequest, shared: SharedPrompt | None = None) -> None:
        """Queue one request. Raises RequestError or OverloadedError; nothing changes then. Other nodes compute parts of
        a `shared` prompt."""
        guide, params = None, request.params
        check_size(request.most_routed, self._routed_bytes)
        if params.grammar:
            if self._guides is None:
                raise RequestError("grammar: this node has no tokenizer to follow one with", param="grammar")
            guide = self._guides.open(params.grammar)
        self._scheduler.submit(request, guide, self._meter.now(), shared)
        self._prompt_tokens += 0 if request.ahead else len(request.prompt_ids)

    def in_phase(self, phase: AttentionPhase) -> None:
        """From the next step on. A decode node's steps have few tokens of prompts, and its messages stay small."""
        most = self._config.step_rows(phase)
        decodes = phase is AttentionPhase.DECODE
        self._scheduler.step_tokens = most
        self._scheduler.prompt_tokens = min(self._config.decode_prompt_tokens, most) if decodes else most
        self._link.limit(most)

    def cancel(self, handle: int) -> None:
        """Drop a request and free its blocks; unknown handles are fine, it may just have finished."""
        self._scheduler.cancel(handle)

    def adopt(self, placement: Placement) -> None:
        """Route later dispatches by `placement`; those under way end as they began."""
        self._link.adopt(placement)
        self._adopted = placement.epoch

    def lose(self, expert: int, why: str) -> None:
        """Wait for an expert node no more: its rows go to replicas, or wait for a new place. May be said again."""
        self._link.lose(expert, why)

    def dial(self, expert: int, address: str, timeout: float) -> Dialled:
        """From any thread: connect to an expert node. Raises RendezvousError within `timeout` seconds."""
        return self._link.dial(expert, address, timeout)

    def attach(self, dialled: Dialled) -> None:
        """Send rows to the expert node that was dialled, which holds what the placement in force says of it."""
        self._link.attach(dialled)

    def detach(self, expert: int) -> None:
        """Leave an expert node that the placement in force does not name."""
        self._link.detach(expert)

    @property
    def present(self) -> frozenset[int]:
        """The expert nodes that rows are sent to."""
        return self._link.present

    def owing(self) -> dict[int, float]:
        """Seconds since the oldest message was sent that an expert node has not answered, by its index."""
        return self._link.owing()

    def recovery(self) -> RecoveryStats:
        """What lost expert nodes have cost this node so far."""
        return self._link.recovery()

    @property
    def settled(self) -> bool:
        """Whether nothing is under way any more that was routed before the last `adopt`."""
        oldest = self._link.oldest_epoch()
        return self._adopted is None or oldest is None or oldest >= self._adopted

    def step(self) -> list[TokenEvent]:
        """Advance every micro-batch that can go on, once; the new tokens. Empty when all are waiting."""
        if torch.is_inference_mode_enabled():
            return self._advance()
        with self.stepping():
            return self._advance()

    @staticmethod
    def stepping() -> AbstractContextManager[object]:
        """For a thread that does nothing but call `step`: it enters inference mode once, not for 10 us at each step."""
        return torch.inference_mode()

    def _advance(self) -> list[TokenEvent]:
        self.stalled = self._turns.advance()
        self.stalled = not self._pictures.advance(self._meter, idle=self.stalled) and self.stalled
        events = self._turns.take_events()
        self._generated_tokens += sum(len(event.token_ids) for event in events)
        return events

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return self._scheduler.busy

    @property
    def held(self) -> bool:
        """Whether only other nodes' part of a prompt can let it go on."""
        return self.stalled and not self.under_way and self._scheduler.shares

    def note_line(self, waiting: int, *, moving: bool = False) -> None:
        """Of requests that are not submitted yet; what is ahead gives way. `moving`: KV blocks wait for a look."""
        self._scheduler.open.others_wait, self._scheduler.open.moving = waiting > 0, moving

    @property
    def rests(self) -> float:
        """Seconds until what nobody waits for may go on, where there is nothing else."""
        return 0.0 if self._scheduler.running else self._scheduler.open.rests(self._meter.now())

    @property
    def under_way(self) -> bool:
        """As of `PingPong`."""
        return self._turns.under_way

    def wait(self, timeout: float) -> None:
        """Park until a reply or a grammar is there, at most `timeout` seconds, or what a device was told before."""
        start = self._meter.now()
        if not self._turns.wait(timeout) and self._guides is not None:
            self._guides.wait(timeout)
        if self.under_way:
            self._meter.slept(start)

    def stats(self, moved: KvStats | None = None, tiers: TierStats | None = None) -> AttentionStats:
        """As `counted`, for the thread that calls `step`; what it returns may go to any other."""
        return counted(
            self._scheduler,
            self._meter,
            self._link.recovery(),
            NearStats(*self.kv.rows_read),
            moved or KvStats(),
            tiers or TierStats(),
            devices=self._config.tensor_parallel,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            steps=self._turns.steps,
            drafts=NO_DRAFTS if self._drafting is None else self._drafting.stats(),
        )

    def usable_names(self, request: GenerationRequest) -> list[Hash]:
        """Names of the KV blocks that this request could find here instead of computing them."""
        return self._scheduler.blocks.usable_names(request)

    def known(self, names: Sequence[Hash]) -> int:
        """How many blocks of this chain are here, from the first on."""
        return len(self.kv.pool.match(names))

    def written_names(self) -> dict[int, list[Hash]]:
        """Names of the KV blocks that each running request has filled, by handle."""
        return self._scheduler.open.written_names()

    def written_names_of(self, handle: int) -> list[Hash]:
        return self._scheduler.open.written_names_of(handle)

    @property
    def queued_tokens(self) -> int:
        """Of prompts, still to be computed here."""
        return self._scheduler.open.queued_tokens

    @property
    def prefill_rate(self) -> float:
        """Tokens of a prompt that are computed per second, as measured; 0 until there was one."""
        return self._meter.prefill_rate

    @property
    def prompt_rate(self) -> float:
        """The same, of steps with many tokens only."""
        return self._meter.prompt_rate

    @property
    def trace(self) -> Trace | None:
        """What is drawn into from now on; None draws nothing."""
        return self._meter.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._meter.trace = trace

    def drawn_open(self) -> list[Slice]:
        """What has begun and is not drawn yet: rows that are with the experts, up to now."""
        return self._meter.open()

    def draw(self, row: str, what: str, seconds: float) -> None:
        """Into the trace, if there is one: what took so long, until now."""
        self._meter.drew(row, what, seconds)

    def draw_arrow(self, row: str, identity: str, step: Arrow) -> None:
        """One end of an arrow between two nodes' traces, "s" or "f", with the same `identity` at both."""
        self._meter.drew_arrow(row, identity, step)

    def has_room(self, names: list[Hash]) -> bool:
        """Whether blocks from elsewhere that are missing of this chain have room now."""
        return self.blocks.has_room(names)

    @property
    def most_room(self) -> int:
        """Blocks of a chain that ever have room."""
        return self.blocks.most_room

    @property
    def layers(self) -> int:
        return len(self.kv.halves)

    @property
    def chunk_tokens(self) -> int:
        """Of a prompt, in one step of a prefill node."""
        return self._config.step_rows(AttentionPhase.PREFILL)

    @property
    def block_bytes(self) -> int:
        """Of one block of the KV cache over all layers."""
        return self.kv.block_bytes

    @property
    def row_bytes(self) -> int:
        """Of what the last layer gives for a token."""
        return self._row_bytes

    def take_routed(self) -> RoutedRows:
        """Rows routed to each expert since the last call; as `stats`, between two steps."""
        return self._load.take()

    def check(self) -> None:
        """Integrity of blocks and queues; for tests."""
        self._scheduler.check(self.blocks.held)
