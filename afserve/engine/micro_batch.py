"""One micro-batch: a complete serving loop written as a coroutine that yields wherever it would wait.

Plan, run the layers, sample, emit, again. It yields a ticket while its rows are at the expert nodes, and None
when it has nothing to do; the attention node runs whichever micro-batch can go on. Ping-pong is what happens
when several take turns. Shapes: T tokens, H hidden, R rows with logits.
"""

from collections.abc import Generator
from typing import Generic, TypeVar

from torch import Tensor

from afserve.comm.m2n import Link
from afserve.config import EngineConfig
from afserve.engine.batch import Batch, build
from afserve.engine.load import ExpertLoad
from afserve.engine.meter import Meter
from afserve.engine.request import TokenEvent, TokenLogprob
from afserve.engine.sampler import logprobs_of, sample
from afserve.engine.scheduler import Finished, Scheduler, StepPlan
from afserve.engine.sequence import Sequence
from afserve.models.attention import LayerCache
from afserve.models.decoder import AttentionModel

T = TypeVar("T")
Step = Generator[T | None, None, None]


class MicroBatch(Generic[T]):
    def __init__(
        self,
        index: int,
        model: AttentionModel,
        cache: list[LayerCache],
        scheduler: Scheduler,
        link: Link[T],
        load: ExpertLoad,
        meter: Meter,
        config: EngineConfig,
    ) -> None:
        self.index = index
        self._model, self._cache, self._scheduler, self._link = model, cache, scheduler, link
        self._load, self._meter, self._config = load, meter, config
        self.events: list[TokenEvent] = []
        self.steps = 0
        self.decode_only = False
        self.plan: StepPlan | None = None

    def run(self) -> Step[T]:
        """Runs for ever; the node stops resuming it when it closes."""
        while True:
            self.plan = self._scheduler.plan(self.index)
            if self.plan is None:
                yield None
                continue
            batch = build(self.plan, self._config.block_size, self._model.ops.device)
            x_TH = yield from self._layers(batch)
            rows_RH = x_TH if batch.all_logits else x_TH[batch.logit_row_R]
            self._finish(self.plan, self._model.logits(rows_RH))
            self.decode_only = all(chunk.count == 1 for chunk in self.plan.chunks)
            self.plan = None
            self.steps += 1
            yield None

    def _layers(self, batch: Batch) -> Generator[T | None, None, Tensor]:
        """Dispatch, run the shared expert meanwhile, combine, layer by layer. The routed sum is float32."""
        x_TH = self._model.embed(batch.token_T)
        for layer, cache in zip(self._model.layers, self._cache, strict=True):
            normed_TH, expert_TK, weight_TK = layer.attend(x_TH, cache, batch.paged)
            ticket: T | None = None
            if layer.moe_number is not None:
                assert expert_TK is not None and weight_TK is not None, "an MoE layer without a router"
                self._load.note(self.index, expert_TK)
                ticket = self._link.dispatch(
                    normed_TH, expert_TK, weight_TK, layer=layer.moe_number, micro_batch=self.index
                )
                self._meter.sent(self.index, layer.moe_number, ticket)
            local_TH = layer.local_ffn(normed_TH)
            if local_TH is not None:
                x_TH += local_TH
            if ticket is not None:
                while not self._link.ready(ticket):
                    yield ticket
                self._meter.back(self.index)
                self._model.ops.add_sums(x_TH, self._link.combine(ticket))
        self._load.commit(self.index, batch.decodes)
        return x_TH

    def _finish(self, plan: StepPlan, logits_RV: Tensor) -> None:
        """Sample, book the step, and turn it into events."""
        sampled_from: list[int] = []
        sequences: list[Sequence] = []
        row = 0
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.collects_prompt:
                self._collect_prompt(sequence, chunk.start, logits_RV[row : row + chunk.count])
                row += chunk.count
            elif chunk.last:
                row += 1
            if chunk.last:
                sampled_from.append(row - 1)
                sequences.append(sequence)
        chosen_RV = logits_RV if len(sampled_from) == row else logits_RV[sampled_from]
        tokens = sample(chosen_RV, sequences, self._model.ops) if sequences else []
        logprobs = [
            _logprobs(s, t, chosen_RV[i]) for i, (s, t) in enumerate(zip(sequences, tokens, strict=True))
        ]
        first = {id(s) for s in sequences if s.output_length == 0}
        finished = {id(f.sequence): f for f in self._scheduler.commit(plan, tokens)}
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            done = finished.pop(id(sequence), None)
            self.events.append(_event(sequence, token, logprob, done, first=id(sequence) in first))
        for done in finished.values():
            self.events.append(TokenEvent(done.sequence.request.request_id, (), done.reason))

    def _collect_prompt(self, sequence: Sequence, start: int, logits_QV: Tensor) -> None:
        count = sequence.request.params.prompt_logprobs or 0
        if start == 0:
            sequence.prompt_logprobs.append(None)
        for offset, row_V in enumerate(logits_QV):
            following = start + offset + 1
            if following < sequence.prompt_length:
                sequence.prompt_logprobs.append(logprobs_of(row_V, sequence.tokens[following], count))


def _logprobs(sequence: Sequence, token: int, row_V: Tensor) -> tuple[TokenLogprob, ...]:
    count = sequence.request.params.logprobs
    return () if count is None else (logprobs_of(row_V, token, count),)


def _event(
    sequence: Sequence, token: int, logprobs: tuple[TokenLogprob, ...], done: Finished | None, *, first: bool
) -> TokenEvent:
    cancelled = done is not None and done.reason == "cancelled"
    return TokenEvent(
        request_id=sequence.request.request_id,
        token_ids=() if cancelled else (token,),
        finish_reason=done.reason if done else None,
        stop_token_id=done.stop_token_id if done else None,
        logprobs=logprobs,
        prompt_logprobs=tuple(sequence.prompt_logprobs) if first else (),
        cached_tokens=sequence.cached_tokens if first else 0,
    )
