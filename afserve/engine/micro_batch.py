"""One micro-batch: a complete serving loop written as a coroutine that yields wherever it would wait.

Plan, run the layers, sample, emit, again. It yields a ticket while its rows are at the expert nodes, and None
when it has nothing to do; the attention node runs whichever micro-batch can go on. Ping-pong is what happens
when several take turns. Shapes: T tokens, H hidden, R rows with logits.
"""

from collections.abc import Generator
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from afserve.comm.m2n.exchanges import ExchangingLink
from afserve.comm.m2n.link import Link
from afserve.config import EngineConfig
from afserve.engine.batch import Batch, build
from afserve.engine.kv.cache import KvCache
from afserve.engine.load import ExpertLoad
from afserve.engine.meter import Meter
from afserve.engine.sampler import Failure, logprobs_of, rows_of, sample
from afserve.engine.scheduling.request import TokenEvent, TokenLogprob
from afserve.engine.scheduling.scheduler import Scheduler
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.scheduling.step_plan import PROMPT, Finished, StepPlan
from afserve.engine.shared_layers import Abandoned, SharedLayers, tell_others
from afserve.engine.spoiled import Spoiled
from afserve.kernels.stack import Stack, Stopped
from afserve.models.decoder import AttentionModel

T = TypeVar("T")
Step = Generator[T | None, None, None]
Run = tuple[int, ...]  # tokens of one sequence, one after the other
Vectors = dict[int, tuple[bytes, ...]]  # `pooled` and `row` of an event, by a chunk's index in the plan
_UNREAD = 0  # the token of who wants a row: somebody else draws it
Accepted = dict[int, tuple[Run, tuple[TokenLogprob, ...]]]  # by a chunk's index in the plan


class MicroBatch(Generic[T]):
    def __init__(
        self,
        index: int,
        model: AttentionModel,
        kv: KvCache,
        scheduler: Scheduler,
        link: Link[T],
        load: ExpertLoad,
        meter: Meter,
        config: EngineConfig,
        stack: Stack | None = None,
        away: ExchangingLink[T] | None = None,
    ) -> None:
        """`stack`: all layers over `kv`, where the kernels run them in one call. Its experts are in this process, or
        `away`: on nodes that are reached by exchanges of the link."""
        self.index = index
        self._model, self._kv, self._scheduler, self._link = model, kv, scheduler, link
        self._load, self._meter, self._config = load, meter, config
        self._stack, self._away = stack, away
        self._spoiled = Spoiled(config.most_rows, model.ops.device)
        self.events: list[TokenEvent] = []
        self.steps = 0
        self.decode_only = False
        self.plan: StepPlan | None = None

    def run(self) -> Step[T]:
        """Runs for ever; the node stops resuming it when it closes."""
        while True:
            since = self._meter.now()
            self.plan = self._scheduler.plan(self.index)
            if self._scheduler.shared_news:
                tell_others(self._scheduler.shared_news)
            if self.plan is None:
                yield None
                continue
            began = since
            _left_queue(self.plan, began)
            if self.plan.draws:
                self._draw(self.plan)
                self._meter.did(self.index, "sample", since)
                yield None
                continue
            batch = build(self.plan, self._config.block_size, self._model.ops.device)
            self._meter.did(self.index, "schedule", since)
            shared = self._shared(self.plan)
            try:
                rows_RH = yield from self._computed(batch, shared)
            except Abandoned:
                self._abandon(self.plan)
                continue
            since = self._meter.now()
            self._finish(self.plan, batch.logit_ends, rows_RH)
            self._meter.did(self.index, "sample", since)
            tokens = len(batch.token_T)
            self.decode_only = batch.decodes == tokens
            if 2 * batch.decodes <= tokens and shared is None:
                self._meter.prefilled(tokens, began)
            self.plan = None
            self.steps += 1
            yield None

    def _draw(self, plan: StepPlan) -> None:
        """A step without layers: each sequence brought the row of its last token."""
        model = self._model
        rows = [torch.frombuffer(bytearray(c.sequence.row), dtype=model.dtype) for c in plan.chunks]
        rows_RH = torch.stack(rows).to(model.ops.device)
        self._spoiled.of(rows_RH)
        self._finish(plan, list(range(1, len(rows) + 1)), rows_RH)
        self.plan, self.decode_only = None, False
        self.steps += 1

    def _shared(self, plan: StepPlan) -> SharedLayers | None:
        chunk = plan.shared
        if chunk is None or chunk.sequence.shared is None:
            return None
        return SharedLayers(chunk, chunk.sequence.shared, self._kv, self._config.block_size)

    def _abandon(self, plan: StepPlan) -> None:
        """Other nodes' part did not come: the step ends before a layer, with nothing on its way."""
        self._load.drop(self.index)
        self._spoiled.drop()
        self._given_up()
        for ended in self._scheduler.abandon(plan):
            request = ended.sequence.request
            self.events.append(TokenEvent(request.handle, (), ended.reason, purpose=request.purpose))
        self.plan = None

    def _computed(self, batch: Batch, shared: SharedLayers | None) -> Generator[T | None, None, Tensor]:
        """What the last layer gives for the rows that are read, R of them. Where all are, in one call if there can be
        one: a trace wants to see every layer, and while that call waits for expert nodes no other micro-batch runs."""
        x_TH, spoiled_T = self._model.embed(batch.token_T), self._spoiled.of(batch.token_T)
        exchange, once = None, self._stack is not None and batch.all_logits and self._meter.trace is None
        once = once and shared is None
        if once and self._away is not None:
            exchange = self._away.exchange(self.index) if self._scheduler.runs_alone(self.index) else None
            once = exchange is not None
        if not once:
            rows_RH = yield from self._layers(batch, x_TH, spoiled_T, 0, shared)
        else:
            rows_RH = yield from self._stacked(batch, x_TH, spoiled_T, exchange)
        self._load.commit(self.index, batch.decodes)
        return rows_RH

    def _stacked(
        self, batch: Batch, x_TH: Tensor, spoiled_T: Tensor, exchange: object | None
    ) -> Generator[T | None, None, Tensor]:
        """What `_layers` gives for a step all of whose rows are read, in one call: the same bits. Where expert nodes
        keep it waiting, it ends in the middle of a layer, and `_layers` goes on."""
        model, stopped, chosen_LTK = self._model, None, None
        assert self._stack is not None, "no stack was made"
        try:
            done = model.ops.run_stack(self._stack, x_TH, batch.paged, spoiled_T, exchange)
            stopped, chosen_LTK = done.stopped, done.expert_LTK
        finally:
            ticket = self._settled(stopped, chosen_LTK)
        for expert_TK in done.expert_LTK:
            self._load.note(self.index, expert_TK)
        self._meter.computed(len(done.expert_LTK) - (stopped is not None), done.ffn_seconds, done.waited)
        if stopped is None or ticket is None:
            return x_TH
        moe_number = model.layers[stopped.layer].moe_number
        assert moe_number is not None, "stopped where nothing was sent"
        self._meter.sent(self.index, moe_number, ticket, self._meter.now())
        yield from self._combined(ticket, x_TH, spoiled_T, stopped.layer)
        return (yield from self._layers(batch, x_TH, spoiled_T, stopped.layer + 1))

    def _settled(self, stopped: Stopped | None, chosen_LTK: Tensor | None) -> T | None:
        """The ticket of what an exchange has sent and not got back, if it was used and there is such a thing."""
        if self._away is None:
            return None
        if stopped is None or chosen_LTK is None:
            return self._away.settle(self.index)
        given = stopped.normed_TH, chosen_LTK[-1], stopped.weight_TK
        return self._away.settle(self.index, len(chosen_LTK) - 1, given)

    def _layers(
        self, batch: Batch, x_TH: Tensor, spoiled_T: Tensor, first: int, shared: SharedLayers | None = None
    ) -> Generator[T | None, None, Tensor]:
        """Dispatch, run the shared expert meanwhile, combine, layer by layer from `first` on; what the last layer gives
        for the rows that are read, R of them. Of the others it only keeps keys and values. Routed sums are float32.
        Before each layer it waits for other nodes' part of a `shared` prompt, and raises Abandoned where that does not
        come."""
        model, paged = self._model, self._model.ops.bind_batch(batch.paged)
        last = len(model.layers) - 1
        for number in range(first, last + 1):
            layer, attend = model.layers[number], self._kv.halves[number]
            if shared is not None:
                while not shared.come(number):
                    yield None
            normed_TH, expert_TK, weight_TK = attend(x_TH, paged)
            if shared is not None:
                shared.give(number, lambda: self._spoiled.fine)
            local_TH: Tensor | None
            if expert_TK is not None:
                self._load.note(self.index, expert_TK)
            if number == last and not batch.all_logits:
                spoiled_T = self._spoiled.only(batch.logit_rows, normed_TH, number, self._given_up())
                if not batch.logit_rows:
                    return x_TH[:0]
                x_TH, normed_TH = x_TH[batch.logit_row_R], normed_TH[batch.logit_row_R]
                if expert_TK is not None and weight_TK is not None:
                    expert_TK, weight_TK = expert_TK[batch.logit_row_R], weight_TK[batch.logit_row_R]
            if layer.moe_number is None:
                local_TH = layer.local_ffn(normed_TH)
                assert local_TH is not None, "a dense layer without an FFN"
                model.ops.add_sums(x_TH, local_TH, spoiled_T, number)
                continue
            assert expert_TK is not None and weight_TK is not None, "an MoE layer without a router"
            since = self._meter.now()
            ticket = self._link.dispatch(
                normed_TH, expert_TK, weight_TK, layer=layer.moe_number, micro_batch=self.index
            )
            self._meter.sent(self.index, layer.moe_number, ticket, since)
            local_TH = layer.local_ffn(normed_TH)
            if local_TH is not None:
                x_TH += local_TH
            yield from self._combined(ticket, x_TH, spoiled_T, number)
        return x_TH

    def _combined(
        self, ticket: T, x_TH: Tensor, spoiled_T: Tensor, number: int
    ) -> Generator[T | None, None, None]:
        """Adds the routed sums of a layer, once they are there."""
        while not self._link.ready(ticket):
            yield ticket
        self._meter.back(self.index)
        self._model.ops.add_sums(x_TH, self._link.combine(ticket), spoiled_T, number)

    def _finish(self, plan: StepPlan, ends: list[int], rows_RH: Tensor) -> None:
        """Sample, book the step, and turn it into events. `ends` says where each chunk's rows do."""
        last = [index for index, chunk in enumerate(plan.chunks) if chunk.last]
        drawn = [index for index in last if not plan.chunks[index].sequence.request.wants_row]
        chosen = [ends[index] - 1 for index in drawn]
        scored = any(chunk.sequence.collects_prompt for chunk in plan.chunks)
        read_RH = rows_RH if scored or len(chosen) == len(rows_RH) else rows_of(rows_RH, chosen)
        logits_RV = self._model.logits(read_RH) if len(read_RH) else read_RH
        failures = self._spoiled.failures(plan, self._given_up)
        chosen_RV = logits_RV if len(chosen) == len(logits_RV) else rows_of(logits_RV, chosen)
        sequences = [plan.chunks[index].sequence for index in drawn]
        outcomes = sample(chosen_RV, sequences, self._model.ops) if sequences else []
        accepted: Accepted = {index: ((_UNREAD,), ()) for index in last if index not in failures}
        for at, (index, outcome) in enumerate(zip(drawn, outcomes, strict=True)):
            if isinstance(outcome, Failure):
                failures.setdefault(index, outcome.message)
                accepted.pop(index, None)
            elif index not in failures:
                accepted[index] = (outcome,), _logprobs(sequences[at], outcome, chosen_RV, at)
        for index, chunk in enumerate(plan.chunks):
            if chunk.kind is PROMPT and chunk.sequence.collects_prompt and index not in failures:
                end = ends[index]
                self._collect_prompt(chunk.sequence, chunk.start, logits_RV[end - chunk.count : end])
        self._book(plan, accepted, failures, self._vectors(plan, last, ends, rows_RH))

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

    def _given_up(self) -> dict[int, str]:
        """Why expert nodes gave no sum for rows of this step."""
        return self._link.take_given_up(self.index)

    def _book(self, plan: StepPlan, accepted: Accepted, failures: dict[int, str], vectors: Vectors) -> None:
        """`failures` are by a chunk's index as well."""
        before = {index: plan.chunks[index].sequence.output_length for index in accepted}
        done = {
            id(f.sequence): f
            for f in self._scheduler.commit(plan, [run for run, _ in accepted.values()], failures)
        }
        for index, (run, logprobs) in accepted.items():
            sequence = plan.chunks[index].sequence
            kept = sequence.output_length - before[index]
            ended = done.pop(id(sequence), None)
            event = _event(sequence, run[:kept], logprobs[:kept], ended, before[index])
            if index in vectors:
                pooled, row = vectors[index]
                event = replace(event, pooled=pooled, row=row)
            self.events.append(event)
        for ended in done.values():
            handle, purpose = ended.sequence.request.handle, ended.sequence.request.purpose
            self.events.append(TokenEvent(handle, (), ended.reason, error=ended.error, purpose=purpose))
            self._kv.clear(ended.spoiled)

    def _collect_prompt(self, sequence: Sequence, start: int, logits_QV: Tensor) -> None:
        """Row i of the chunk foretells token start + i + 1 of the prompt; the last one's is not the prompt's."""
        if start == 0:
            sequence.prompt_logprobs.append(None)
        following = sequence.tokens[start + 1 : min(start + 1 + len(logits_QV), sequence.prompt_length)]
        count = sequence.request.params.prompt_logprobs or 0
        sequence.prompt_logprobs += logprobs_of(logits_QV, following, count)


def _left_queue(plan: StepPlan, now: float) -> None:
    """For those whose first step this is. Prompts stand at the end."""
    for chunk in reversed(plan.chunks):
        if chunk.kind is not PROMPT:
            return
        if chunk.sequence.planned is None:
            chunk.sequence.planned = now


def _logprobs(sequence: Sequence, token: int, logits_RV: Tensor, row: int) -> tuple[TokenLogprob, ...]:
    """Of a token that this row gave, where they were asked for."""
    count = sequence.request.params.logprobs
    return () if count is None else tuple(logprobs_of(logits_RV[row : row + 1], (token,), count))


def _event(
    sequence: Sequence,
    run: Run,
    logprobs: tuple[TokenLogprob, ...],
    done: Finished | None,
    before: int,
) -> TokenEvent:
    """`before` tokens of the answer were there before this run."""
    first = before == len(sequence.request.generated)
    queued = sequence.planned - sequence.arrived if first and sequence.planned is not None else 0.0
    return TokenEvent(
        handle=sequence.request.handle,
        token_ids=run,
        finish_reason=done.reason if done else None,
        stop_token_id=done.stop_token_id if done else None,
        logprobs=logprobs,
        prompt_logprobs=() if before else tuple(sequence.prompt_logprobs),
        cached_tokens=sequence.cached_tokens if first else 0,
        queued=queued,
        purpose=sequence.request.purpose,
    )
