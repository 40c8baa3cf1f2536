"""One micro-batch: a complete serving loop written as a coroutine that yields wherever it would wait.

Plan, run the layers, sample, emit, again. It yields a ticket while its rows are at the expert nodes, a fetch while its
tokens are on their way from a device, and None when it has nothing to do; the node runs whichever can go on. Ping-pong
is several taking turns. How layers are computed is its runner's (`step/`). Shapes: H hidden, R rows with logits.
"""

from collections.abc import Generator
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from afserve.config import EngineConfig
from afserve.engine.draft.drafting import Drafting
from afserve.engine.draft.followers import Follower, following
from afserve.engine.draft.prediction import PREDICTION
from afserve.engine.draft.price import RanStep, Verified
from afserve.engine.kv.cache import KvCache
from afserve.engine.sampler import Failure, Sampler, rows_of
from afserve.engine.scheduling.passes import PassTime
from afserve.engine.scheduling.request import Predicted, TokenEvent, TokenLogprob
from afserve.engine.scheduling.scheduler import Scheduler
from afserve.engine.scheduling.step_plan import PROMPT, StepPlan
from afserve.engine.step.host_reader import Fetch, HostReader
from afserve.engine.step.load import ExpertLoad
from afserve.engine.step.look_ups import Beside
from afserve.engine.step.meter import Meter
from afserve.engine.step.routed_rows import note_routed
from afserve.engine.step.runner import StepRun, StepRunner, T
from afserve.engine.step.shared_layers import Abandoned, StatesMoved, tell_others
from afserve.engine.step.step_buffers import StepBuffers
from afserve.engine.step.step_input import StepInput, build_step
from afserve.engine.step_events import leave_queue, run_event, token_events
from afserve.engine.verify import Rows, Run, draw_runs, draw_tokens, logprobs_by_chunk, scored_tokens
from afserve.kernels.devices.opened import device_of
from afserve.models.decoder import AttentionModel
from afserve.tracing.trace import NO_ARGS

Step = Generator[T | Fetch | None, None, None]
Vectors = dict[int, tuple[bytes, ...]]  # `pooled` and `row` of an event, by a chunk's index in the plan
_UNREAD = 0  # the token of who wants a row: somebody else draws it
Accepted = dict[int, tuple[Run, tuple[TokenLogprob, ...]]]  # by a chunk's index in the plan


class _Outcome(NamedTuple):
    """Of a step; all by a chunk's index."""

    accepted: Accepted
    failures: dict[int, str]
    vectors: Vectors
    passes: int = 1  # through all layers

    @property
    def accepted_drafts(self) -> int:
        """Tokens of drafts that were right."""
        return sum(len(run) - 1 for run, _ in self.accepted.values())


class _Seen(NamedTuple):
    """`last` are the chunks that end with a token; `logprobs` are by `ScoredRun.chunk`; `worst` is what
    `StepRunner.worst_mark` was."""

    last: list[int]
    logprobs: dict[int, tuple[TokenLogprob, ...]]
    outcomes: dict[int, Run | Failure]
    worst: int | None


class MicroBatch(Generic[T]):
    def __init__(
        self,
        index: int,
        model: AttentionModel,
        kv: KvCache,
        scheduler: Scheduler,
        runner: StepRunner[T],
        meter: Meter,
        config: EngineConfig,
        load: ExpertLoad,
        drafting: Drafting | None = None,
        follower: Follower[T] | None = None,
        beside: Beside[T] | None = None,
    ) -> None:
        """`load` knows which experts tokens chose. Without `drafting` nobody guesses; a `follower` guesses behind each
        step. `beside`: of a model with a table or an encoder."""
        self.index = index
        self._model, self._kv, self._scheduler, self._runner = model, kv, scheduler, runner
        self._meter, self._config, self._load = meter, config, load
        self._drafting, self._follower, self._beside = drafting, follower, beside
        device = device_of(model.ops.device)
        self._buffers, self._reader = StepBuffers(device, config.max_model_len), HostReader(device)
        self._sampler = Sampler(model.ops, self._buffers)
        self._pass_time = PassTime()
        self.events: list[TokenEvent] = []
        self.steps = 0
        self.decode_only = False
        self.paused = False  # between layers, where it can go on at once
        self.ran: RanStep | None = None  # the last step, where its drafts are to be priced
        self.plan: StepPlan | None = None

    def run(self) -> Step[T]:
        """Runs for ever; the node stops resuming it when it closes."""
        while True:
            since = self._meter.now()
            asked = self._drafting is not None and self._drafting.due()
            if self._drafting is not None and asked:
                decoding, room = self._scheduler.decoding(self.index), self._scheduler.step_tokens
                self._drafting.propose(decoding, room, self._meter.now)
                since = self._meter.now()
            follower = following(self._follower)
            self.plan = self._scheduler.plan(self.index, since, self._most_passes(follower, asked=asked))
            if self._scheduler.shared_news:
                tell_others(self._scheduler.shared_news)
            if self.plan is None:
                yield None
                continue
            began = since
            leave_queue(self.plan, began)
            if self.plan.draws:
                yield from self._draw(self.plan)
                self._meter.did(self.index, "sample", since)
                yield None
                continue
            pool = self._scheduler.pool
            awake = follower is not None and follower.drafter.awake
            every_row = follower is not None and follower.reads_rows
            step = build_step(self.plan, pool.block_size, self._buffers, pool.further, every_row=every_row)
            self._meter.did(self.index, "schedule", since)
            if self._beside is not None:
                step = yield from self._beside.added(self.plan, step)
            computed = yield from self._compute(self.plan, step)
            if computed is None:
                continue
            outcome, x_RH = computed
            drafted = self.plan.supposed if self.plan.drafted else 0
            passes = 0.0
            if follower is not None:
                since = self._meter.now()
                yield from follower.follow(self.plan, step, x_RH, _drawn(self.plan, outcome.accepted))
                passes = (self._meter.now() - since) / follower.passes if awake else 0.0
            verified = self._book(self.plan, outcome)
            self.decode_only, self.ran = step.decodes == step.tokens, None
            if self._drafting is not None and not step.ahead:
                seconds = self._meter.now() - began - passes
                if asked or passes:
                    ran = RanStep(step.tokens, drafted, seconds, mixed=not self.decode_only)
                    self.ran = ran._replace(passes=passes, verified=verified)
                else:
                    self._drafting.rest_steps(seconds, outcome.passes)
            if 2 * step.decodes <= step.tokens and step.shared is None and not step.ahead:
                self._meter.prefilled(step.tokens, began)
            if not step.ahead:
                self._scheduler.open.rest_from(self._meter.now())
            self.plan = None
            self.steps += outcome.passes
            yield None

    def _compute(
        self, plan: StepPlan, step: StepInput
    ) -> Generator[T | Fetch | None, None, tuple[_Outcome, Tensor] | None]:
        """What it gave, and the rows of its last layer, none of a step of several passes; None where it ended in the
        middle."""
        try:
            if plan.passes and (decoded := self._decode(plan, step)) is not None:
                return decoded, step.token_T[:0]
            self._pass_time.other_step()
            run: StepRun[T] | None = self._runner.run_step(step)
            while run is not None:
                x_RH = yield from self._in_pauses(run) if step.ahead else run
                since = self._meter.now()
                rows_RH = x_RH if len(x_RH) == len(step.rows) else x_RH[step.row_R]
                seen = yield from self._see(plan, step.ends, rows_RH)
                run = self._runner.settle_step(step)
        except Abandoned as error:
            self._abandon(plan, moved=isinstance(error, StatesMoved))
            return None
        outcome = self._conclude(plan, step.ends, rows_RH, seen, step)
        told = {"drafted": plan.supposed, "accepted": outcome.accepted_drafts} if plan.drafted else NO_ARGS
        self._meter.did(self.index, "sample", since, told)
        return outcome, x_RH

    def _most_passes(self, follower: Follower[T] | None, *, asked: bool) -> int:
        """That the next step may have: who guesses behind a step, or may before the next one, is not passed over."""
        if follower is not None or not (offered := self._runner.most_passes):
            return 0
        before_drafts = offered if self._drafting is None else 1 if asked else 1 + self._drafting.left
        return self._pass_time.most_passes(min(offered, before_drafts))

    def _decode(self, plan: StepPlan, step: StepInput) -> _Outcome | None:
        """None where the step has to be run: what is wrong with a row is told there."""
        since, stops = self._meter.now(), list[list[int]]()
        if plan.passes > 1:
            owners = [chunk.sequence for chunk in plan.chunks]
            stops = [[*one.eos_ids, *one.request.params.stop_token_ids] for one in owners]
        token_PS = self._runner.decode_step(step, plan.passes, stops)
        if not token_PS:
            return None
        self._pass_time.measured(len(token_PS), self._meter.now() - since)
        runs = enumerate(zip(*token_PS, strict=True))
        return _Outcome({index: (run, ()) for index, run in runs}, {}, {}, len(token_PS))

    def _draw(self, plan: StepPlan) -> Step[T]:
        """A step without layers: each sequence brought the row of its last token."""
        model = self._model
        rows = [torch.frombuffer(bytearray(c.sequence.row), dtype=model.dtype) for c in plan.chunks]
        rows_RH = torch.stack(rows).to(model.ops.device)
        ends = list(range(1, len(rows) + 1))
        seen = yield from self._see(plan, ends, rows_RH)
        self._book(plan, self._conclude(plan, ends, rows_RH, seen))
        self.plan, self.decode_only, self.ran = None, False, None
        self.steps += 1

    def _in_pauses(self, run: StepRun[T]) -> StepRun[T]:
        """A step that nobody waits for. Where somebody asks meanwhile, it ends before its next layer: raises
        Abandoned."""
        while True:
            try:
                ticket = next(run)
            except StopIteration as ended:
                x_RH: Tensor = ended.value
                return x_RH
            self.paused = ticket is None
            yield ticket
            self.paused = False
            if ticket is None and self._scheduler.open.gives_way:
                run.throw(Abandoned("somebody asks meanwhile"))

    def _abandon(self, plan: StepPlan, *, moved: bool) -> None:
        """Other nodes' part did not come, or who asks comes first: the step ends before a layer, with nothing on its
        way."""
        for ended in self._scheduler.abandon(plan, moved=moved):
            request = ended.sequence.request
            self.events.append(TokenEvent(request.handle, (), ended.reason, purpose=request.purpose))
        self.plan = None

    def _see(self, plan: StepPlan, ends: list[int], rows_RH: Tensor) -> Generator[Fetch, None, _Seen]:
        """What is drawn from the step's rows, once it is there. `ends` says where each chunk's rows do."""
        last = [index for index, chunk in enumerate(plan.chunks) if chunk.last]
        drawn = [index for index in last if not plan.chunks[index].sequence.request.wants_row]
        first = [ends[index] - 1 - plan.chunks[index].supposed for index in drawn]
        scored = bool(plan.drafted) or any(chunk.sequence.collects_prompt for chunk in plan.chunks)
        read_RH = rows_RH
        if not scored and len(first) < len(rows_RH):
            read_RH, first = rows_of(rows_RH, first), list(range(len(first)))
        logits_RV = self._model.logits(read_RH) if len(read_RH) else read_RH
        asked = {
            index: Rows(plan.chunks[index].sequence, row, plan.chunks[index].supposed)
            for index, row in zip(drawn, first, strict=True)
        }
        mark_1 = None if plan.draws else self._runner.worst_mark()
        draw = draw_runs if plan.drafted else draw_tokens
        outcomes, worst = yield from self._reader.fetch_reads(draw(logits_RV, asked, self._sampler), mark_1)
        told = logprobs_by_chunk(logits_RV, [*scored_tokens(plan, ends, asked, outcomes)], self._buffers)
        logprobs, _ = yield from self._reader.fetch_reads(told, None)
        return _Seen(last, logprobs, outcomes, worst)

    def _conclude(
        self,
        plan: StepPlan,
        ends: list[int],
        rows_RH: Tensor,
        seen: _Seen,
        step: StepInput | None = None,
    ) -> _Outcome:
        """What the step gave; without a `step` no layer was computed."""
        last, logprobs, outcomes, worst = seen
        failures = {} if plan.draws else self._runner.take_failures(worst)
        failures = {i: one.message for i, one in outcomes.items() if isinstance(one, Failure)} | failures
        runs = {i: one for i, one in outcomes.items() if i not in failures and not isinstance(one, Failure)}
        accepted: Accepted = {
            index: (runs.get(index, (_UNREAD,)), logprobs.get(index, ()))
            for index in last
            if index not in failures
        }
        for index, chunk in enumerate(plan.chunks):
            if chunk.kind is PROMPT and chunk.sequence.collects_prompt and index not in failures:
                first = [None] * (chunk.start == 0)  # nothing foretells it
                chunk.sequence.prompt_logprobs += [*first, *logprobs.get(~index, ())]
        if step is not None and plan.drafted:
            step.move_on([len(accepted[index][0]) if index in accepted else 0 for index in plan.drafted])
        return _Outcome(accepted, failures, self._vectors(plan, last, ends, rows_RH))

    def _vectors(self, plan: StepPlan, last: list[int], ends: list[int], rows_RH: Tensor) -> Vectors:
        """Of the prompts that were asked for one."""
        found: Vectors = {}
        for index in last:
            request = plan.chunks[index].sequence.request
            if request.params.pooled or request.wants_row:
                row_H = rows_RH[ends[index] - 1]
                pooled = self._model.pooled(row_H).numpy().astype("<f4") if request.params.pooled else None
                row = row_H.cpu().view(torch.uint8).numpy() if request.wants_row else None
                found[index] = tuple(b"" if one is None else one.tobytes() for one in (pooled, row))
        return found

    def _book(self, plan: StepPlan, outcome: _Outcome) -> Many[Verified]:
        """Ends the step and turns it into events. Gives what was verified of drafts."""
        accepted, failures, vectors, _ = outcome
        before = {index: plan.chunks[index].sequence.output_length for index in accepted}
        verified = self._settle(plan, accepted)
        done = {
            id(f.sequence): f
            for f in self._scheduler.commit(plan, [run for run, _ in accepted.values()], failures)
        }
        chosen_LTK = None if plan.draws else self._load.newest[self.index]
        if chosen_LTK is not None and any(chunk.sequence.wants_routed for chunk in plan.chunks):
            note_routed(plan, failures, chosen_LTK, self._model.spec.choices)
        for index, (run, logprobs) in accepted.items():
            sequence = plan.chunks[index].sequence
            first, kept = before[index], sequence.output_length - before[index]
            ended = done.pop(id(sequence), None)
            if outcome.passes > 1:  # each token as from a step of its own
                self.events += token_events(sequence.request, run[: kept - 1])
                first, run, kept = first + kept - 1, run[kept - 1 :], 1
            event = run_event(sequence, run[:kept], logprobs[:kept], ended, first)
            one = verified.get(index)
            if one is not None and one.drafter == PREDICTION:
                event.predicted = Predicted(min(one.right, kept), one.rows - one.right)
            if index in vectors:
                pooled, row = vectors[index]
                event = replace(event, pooled=pooled, row=row)
            self.events.append(event)
        for ended in done.values():
            handle, purpose = ended.sequence.request.handle, ended.sequence.request.purpose
            self.events.append(TokenEvent(handle, (), ended.reason, error=ended.error, purpose=purpose))
            self._kv.clear(ended.spoiled)
        return tuple(verified.values())

    def _settle(self, plan: StepPlan, accepted: Accepted) -> dict[int, Verified]:
        """Before those that end are forgotten. Gives what was verified, by a chunk's index."""
        found: dict[int, Verified] = {}
        if self._drafting is None or not self._drafting.asked:
            return found
        for index, (run, _) in accepted.items():
            chunk = plan.chunks[index]
            one = self._drafting.settle(chunk.sequence, chunk.supposed, run, self._meter.now())
            if one is not None:
                found[index] = one
        return found


def _drawn(plan: StepPlan, accepted: Accepted) -> dict[int, Run]:
    """The runs that are tokens indeed."""
    unread = {i for i in accepted if plan.chunks[i].sequence.request.wants_row}
    return {index: run for index, (run, _) in accepted.items() if index not in unread}
