"""Rows of a look-up table for a step: asked for as soon as the step is planned, from the ids of its tokens alone.

A look-up is a dispatch of a layer behind all MoE layers (`models/tables/bank.py`), so replicas, lost nodes and epochs
are the link's business here as there. While a chunk of a prompt is computed, rows of the next one are on their way in
boxes of their own. The next step asks for what it lacks, and then takes from them what its tokens need, whatever its
chunks have become; one that needs none of them does not wait for them.

Shapes: T tokens of a step, N heads of the table, K choices of a message, X numbers of a row that travels.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from afserve.comm.m2n.link_contract import Link
from afserve.engine.scheduling.step_plan import PROMPT, StepPlan
from afserve.engine.step.meter import Meter
from afserve.engine.step.picture_rows import PictureRows
from afserve.engine.step.runner import StepRun, T
from afserve.engine.step.step_input import StepInput
from afserve.families.reading.ngrams import Ids, row_numbers
from afserve.models.decoder import AttentionModel

_Text = tuple[Sequence[int], int]
_ELSEWHERE = -1
Reasons = Mapping[int, str]  # by row


class _Ahead(NamedTuple, Generic[T]):
    """Which row of the dispatch has a token's, by their numbers."""

    place: dict[bytes, int]
    ticket: T


class LookUps(Generic[T]):
    """Of micro-batch `index`; what it asks for ahead goes as micro-batch `beside`. To `meter` it is a dispatch, from
    when somebody waits for it."""

    def __init__(self, index: int, beside: int, model: AttentionModel, link: Link[T], meter: Meter) -> None:
        assert model.spec.table is not None, "a model without a table"
        self._index, self._beside, self._model, self._link, self._meter = index, beside, model, link, meter
        self._spec, self._table = model.spec, model.spec.table
        self._ahead: _Ahead[T] | None = None

    def added(self, plan: StepPlan, step: StepInput) -> Generator[T | None, None, StepInput]:
        """The step with what `rows_of` gives."""
        rows_TX, why = yield from self.rows_of(plan, step.token_T)
        return replace(step, looked_up_TX=rows_TX, not_looked_up=why)

    def rows_of(self, plan: StepPlan, token_T: Tensor) -> Generator[T | None, None, tuple[Tensor, Reasons]]:
        """Float32, (T, X). Rows that nobody gave are NaN: why is told by token of those that were asked ahead, and by
        the link of the others."""
        number_TN = row_numbers(self._table, _texts(plan, self._table.order - 1))
        x_TX, early = self._words(token_T), {} if self._ahead is None else self._ahead.place
        place_T = torch.tensor([early.get(row.tobytes(), _ELSEWHERE) for row in number_TN])
        whole_TX = yield from self._sums(x_TX, number_TN, place_T < 0)
        known_T, why_T = (place_T >= 0).nonzero()[:, 0], dict[int, str]()
        if self._ahead is not None and (len(known_T) or self._link.ready(self._ahead.ticket)):
            early_AX, why_A = yield from self._take_ahead(self._ahead.ticket)
            whole_TX[known_T.to(x_TX.device)] = early_AX[place_T[known_T].to(x_TX.device)]
            lost_T = (place_T >= 0) & ~whole_TX[:, 0].isfinite().cpu()
            # Who was not answered in time is not asked again: nobody waits for two deadlines.
            why_T = {at: why_A[place] for at, place in enumerate(place_T.tolist()) if place in why_A}
            lost_T[torch.tensor([*why_T], dtype=torch.int64)] = False
            if bool(lost_T.any()):
                whole_TX[lost_T.to(x_TX.device)] = 0.0
                whole_TX += yield from self._sums(x_TX, number_TN, lost_T)
        if self._ahead is None:
            self._ask_ahead(plan)
        return whole_TX, why_T

    def _sums(self, x_TX: Tensor, number_TN: Ids, wanted_T: Tensor) -> StepRun[T]:
        """Rows of the tokens that are wanted; zeros of the others."""
        whole_TX = torch.zeros(x_TX.shape, dtype=torch.float32, device=x_TX.device)
        if bool(wanted_T.any()):
            for slice_TK, inside_TK in self._choices(number_TN, wanted_T):
                since = self._meter.now()
                ticket = self._dispatch(self._index, x_TX, slice_TK, inside_TK)
                whole_TX += yield from self._come(ticket, since)
        return whole_TX

    def _come(self, ticket: T, since: float) -> StepRun[T]:
        self._meter.sent(self._index, self._spec.look_up_layer, ticket, since)
        while not self._link.ready(ticket):
            yield ticket
        self._meter.back(self._index)
        return self._link.combine(ticket)

    def _take_ahead(self, ticket: T) -> Generator[T | None, None, tuple[Tensor, Reasons]]:
        """What was asked for ahead, and why rows of it are missing."""
        early_AX = yield from self._come(ticket, self._meter.now())
        self._ahead = None
        return early_AX, self._link.take_given_up(self._beside)

    def _ask_ahead(self, plan: StepPlan) -> None:
        """For as much of the prompts as this step has itself; what follows in a shared one may be another node's. Where
        experts are in this process nothing is gained."""
        if not self._link.present or self._table.heads > self._spec.top_k:
            return
        back, texts, ids = self._table.order - 1, list[_Text](), list[int]()
        for chunk in plan.chunks:
            tokens, first = chunk.sequence.tokens, chunk.start + chunk.count
            coming = tokens[first : first + chunk.count]
            if chunk.kind is PROMPT and coming and chunk.sequence.shared is None:
                texts.append((tokens[max(0, first - back) : first] + coming, len(coming)))
                ids += coming
        if texts:
            number_TN = row_numbers(self._table, texts)
            ((slice_TK, inside_TK),) = self._choices(number_TN, torch.tensor([True]))
            x_TX = self._words(torch.tensor(ids, device=self._model.ops.device))
            ticket = self._dispatch(self._beside, x_TX, slice_TK, inside_TK)
            self._ahead = _Ahead({row.tobytes(): at for at, row in enumerate(number_TN)}, ticket)

    def _words(self, token_T: Tensor) -> Tensor:
        """They only say which of several replicas a row goes to."""
        return self._model.words(token_T)[:, : self._spec.expert_width].contiguous()

    def _dispatch(self, micro_batch: int, x_TX: Tensor, slice_TK: Tensor, inside_TK: Tensor) -> T:
        given = x_TX, slice_TK.to(x_TX.device), inside_TK.to(x_TX.device)
        return self._link.dispatch(*given, layer=self._spec.look_up_layer, micro_batch=micro_batch)

    def _choices(self, number_TN: Ids, wanted_T: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Slices and rows within them, as many heads as a message has choices at a time; none of tokens that are not
        wanted."""
        numbers_TN, size = torch.from_numpy(number_TN), self._table.slice_rows(self._spec.experts)
        slice_TN = torch.div(numbers_TN, size, rounding_mode="floor")
        inside_TN = (numbers_TN - slice_TN * size).float()
        slice_TN.masked_fill_(~wanted_T[:, None], -1)
        most, spare = self._spec.top_k, -self._table.heads % self._spec.top_k
        slices = functional.pad(slice_TN, (0, spare), value=-1).split(most, 1)
        insides = functional.pad(inside_TN, (0, spare)).split(most, 1)
        return [(one.contiguous(), two.contiguous()) for one, two in zip(slices, insides, strict=True)]


Beside = LookUps[T] | PictureRows
"""What a step reads beside the embeddings of its tokens."""


def beside_of(
    model: AttentionModel, link: Link[T], meter: Meter, pictures: PictureRows, micro_batches: int
) -> Sequence[Beside[T] | None]:
    """One for each micro-batch, of a model with a table or an encoder of `pictures`."""
    if model.encoder is not None:
        return [pictures] * micro_batches
    if model.spec.table is None:
        return [None] * micro_batches
    return [LookUps(index, micro_batches + index, model, link, meter) for index in range(micro_batches)]


def _texts(plan: StepPlan, back: int) -> list[_Text]:
    """Of each chunk its tokens and drafts, behind the `back` tokens before them."""
    texts = list[_Text]()
    for chunk in plan.chunks:
        known = chunk.sequence.tokens[max(0, chunk.start - back) : chunk.start + chunk.count]
        texts.append(
            (known + chunk.sequence.draft[: chunk.supposed] if chunk.supposed else known, chunk.count)
        )
    return texts
