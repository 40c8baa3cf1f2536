"""A step layer by layer: attention half, dispatch, shared expert, combine. Every other runner gives its bits.

A layer's rows may be late: they are with the experts while the next layer's attention half and FFN are computed.
Shapes: T tokens, H hidden, R rows that are read.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from afserve.comm.m2n.link_contract import Link
from afserve.engine.kv.cache import KvCache
from afserve.engine.step.load import ExpertLoad
from afserve.engine.step.meter import Meter
from afserve.engine.step.row_taps import RowTaps
from afserve.engine.step.runner import StepRun, T
from afserve.engine.step.shared_layers import Abandoned, SharedLayers, StatesMoved
from afserve.engine.step.spoiled import Spoiled
from afserve.engine.step.step_input import StepInput
from afserve.kernels.layer import Half
from afserve.kernels.paged import PagedBatch
from afserve.kernels.stack import Stopped
from afserve.models.decoder import AttentionModel, DecoderLayer
from afserve.models.router import Sent


class _Away(NamedTuple, Generic[T]):
    """Rows of layer `number` that are at the experts."""

    number: int
    sent: Sent
    ticket: T


class LayerRunner(Generic[T]):
    """Of micro-batch `index`. A runner that computes several layers at once leaves to it what it cannot."""

    def __init__(
        self,
        index: int,
        model: AttentionModel,
        kv: KvCache,
        link: Link[T],
        load: ExpertLoad,
        meter: Meter,
        most_rows: int,
    ) -> None:
        self.index, self.model, self.load, self.meter = index, model, load, meter
        self._kv, self._link = kv, link
        self.moves_states = any(kind.attention.recurrent for kind in model.spec.kinds)
        self._spoiled = Spoiled(most_rows, model.ops.device)
        self._late: _Away[T] | None = None
        self._given_before: Mapping[int, str] = {}
        self._not_looked_up: Mapping[int, str] = {}
        self.taps = RowTaps(() if model.head is None else model.head.behind)
        self.seen_rows = self.taps.seen_rows

    def run_step(self, step: StepInput) -> StepRun[T]:
        return self._run(step, None if step.shared is None else SharedLayers(step.shared, self._kv))

    def _run(self, step: StepInput, shared: SharedLayers | None) -> StepRun[T]:
        x_TH, spoiled_T = self.begin_step(step)
        try:
            return (yield from self._run_layers(step, x_TH, spoiled_T, 0, shared))
        except Abandoned:
            yield from self._drop_late()
            self._link.held(self.index)
            self.forget_step()
            raise

    def settle_step(self, step: StepInput) -> StepRun[T] | None:
        """Where it runs again, keys and values are written once more, alike; what other nodes have part in, or states
        that have moved on, is planned anew."""
        if self._link.held(self.index, done=True):
            self.load.commit(self.index, step.decodes)
            return None
        self.forget_step()
        if step.shared is not None:
            raise Abandoned("a device's exchange failed in the middle")
        if self.moves_states:
            raise StatesMoved("a device's exchange failed in the middle")
        return self._run(step, None)

    def run_layers(self, step: StepInput, x_TH: Tensor, spoiled_T: Tensor) -> StepRun[T]:
        """A step that was begun and in which no other node has part; it is not committed."""
        return self._run_layers(step, x_TH, spoiled_T, 0, None)

    def keep_rows(self, step: StepInput) -> None:
        """This is what ran, in the first rows of a longer one."""
        self._spoiled.shorten(step.paged.starts)

    def forget_step(self) -> None:
        """It counts for nothing."""
        self.load.drop(self.index)
        self._spoiled.drop()
        self._given_up()

    def worst_mark(self) -> Tensor | None:
        return self._spoiled.worst_layer()

    def take_failures(self, worst: int | None = None) -> dict[int, str]:
        return self._spoiled.failures(self._given_up, worst)

    def begin_step(self, step: StepInput) -> tuple[Tensor, Tensor]:
        """The embedded tokens and the marks of their rows: fine, but for those whose look-up nobody gave."""
        x_TH, self._not_looked_up = self.model.embed(step.token_T, step.looked_up_TX), step.not_looked_up
        if step.placed is not None:
            x_TH.index_copy_(0, step.placed.at_P, step.placed.rows_PH)
        self.taps.note_rows(0, x_TH)
        self._late, spoiled_T = None, self._spoiled.of(step.paged.starts)
        if step.looked_up_TX is not None:  # before keys of layer 0 leave for other nodes
            spoiled_T.masked_fill_(~step.looked_up_TX.sum(-1).isfinite(), 0)
        return x_TH, spoiled_T

    def resume_step(
        self, step: StepInput, ticket: T, x_TH: Tensor, spoiled_T: Tensor, stopped: Stopped
    ) -> StepRun[T]:
        """A step whose rows of a layer are at the expert nodes, from there on."""
        layer = stopped.layer
        ended = self.model.layers[layer]
        own_TH = ended.local_ffn(stopped.normed_TH, x_TH) if ended.adds_at_once else None
        sums_TH = yield from self._routed_sums(ended, ticket, None, own_TH)
        self.model.ops.add_sums(x_TH, sums_TH, spoiled_T, layer)
        ended.finish(x_TH)
        return (yield from self._run_layers(step, x_TH, spoiled_T, layer + 1, None))

    most_passes = 0

    def decode_step(
        self, step: StepInput, passes: int, stops: Sequence[Sequence[int]]
    ) -> Sequence[list[int]]:
        """It runs one layer at a time."""
        return ()

    def chain(self) -> None:
        """The same."""

    def run_predictor(self, x_TH: Tensor, paged: PagedBatch, decodes: int) -> StepRun[T]:
        (layer,), (attend,) = self.model.predicting, self._kv.predicting
        half = attend(x_TH, self.model.ops.bind_batch(paged))
        if half.expert_TK is not None:
            self.load.predicted(self.index, half.expert_TK, decodes)
        yield from self._feed_forward(layer, len(self.model.layers), x_TH, half, None)
        self._given_up()
        return x_TH

    def _run_layers(
        self, step: StepInput, x_TH: Tensor, spoiled_T: Tensor, first: int, shared: SharedLayers | None
    ) -> StepRun[T]:
        """Layer by layer from `first` on; what the last layer gives for the rows that are read. Of the others it only
        keeps keys and values. Routed sums are float32. Before each layer it waits for other nodes' part of a `shared`
        prompt, and raises Abandoned where that does not come; what is computed ahead lets others look in."""
        model, group_of = self.model, self._kv.group_of
        tables = [model.ops.bind_batch(paged) for paged in (step.paged, *step.further)]
        last = len(model.layers) - 1
        for number in range(first, last + 1):
            layer, attend = model.layers[number], self._kv.halves[number]
            if step.ahead and number:
                yield None
            if shared is not None:
                while not shared.come(number):
                    yield None
            half = attend(x_TH, tables[group_of[number]])
            if shared is not None:
                shared.give(number, lambda: self._spoiled.fine)
            if half.expert_TK is not None:
                self.load.note(self.index, half.expert_TK)
            if number == last and not step.all_rows:
                given_up = self._given_up() if self._late is None else self._given_before
                spoiled_T = self._spoiled.only(step.rows, half.normed_TH, number, given_up)
                if not step.rows:
                    return x_TH[:0]
                x_TH, half = x_TH[step.row_R], _only(half, step.row_R)
            if layer.late:
                self._send_late(step, number, half)
            yield from self._feed_forward(layer, number, x_TH, half, spoiled_T)
            if step.placed is not None and number < len(step.placed.deeper):
                x_TH.index_add_(0, step.placed.at_P, step.placed.deeper[number])
            self.taps.note_rows(number + 1, x_TH)
        return x_TH

    def _send_late(self, step: StepInput, number: int, half: Half) -> None:
        """Rows of a layer whose sums are added behind the next one; where that is the last, those that are read. What
        the link says from then on of rows without a sum counts these."""
        if number + 2 == len(self.model.layers) and not step.all_rows:
            if not step.rows:
                return
            half, self._given_before = _only(half, step.row_R), self._given_up()
        self._late = self._send(self.model.layers[number], number, half)

    def _drop_late(self) -> Generator[T | None, None, None]:
        """A step ends in the middle: who comes next finds no rows of it under way."""
        if self._late is not None:
            away, self._late = self._late, None
            yield from self._routed_sums(self.model.layers[away.number], away.ticket, away.sent, None)

    def _feed_forward(
        self, layer: DecoderLayer, number: int, x_TH: Tensor, half: Half, spoiled_T: Tensor | None
    ) -> Generator[T | None, None, None]:
        """What is behind an attention half, into x_TH."""
        add, local = self.model.ops.add_sums, layer.late or layer.moe_number is None
        away = None if local else self._send(layer, number, half)
        fold = None if away is None or not layer.adds_alone(away.sent) else self._link.folding(away.ticket)
        sums_TH = layer.local_ffn(half.normed_TH, x_TH)
        if away is not None and fold is not None:
            yield from self._arrived(away.ticket)
            fold(x_TH, sums_TH, spoiled_T, number)
        else:
            if away is not None:
                if sums_TH is not None and not layer.adds_at_once:
                    x_TH += sums_TH
                    sums_TH = None
                sums_TH = yield from self._routed_sums(layer, away.ticket, away.sent, sums_TH)
            elif sums_TH is None:  # attention alone: its rows are marked where they are spoiled
                sums_TH = torch.zeros_like(x_TH)
            add(x_TH, sums_TH, spoiled_T, number)
        if self._late is not None and not layer.late:
            of, sent, ticket = self._late
            sums_TH = yield from self._routed_sums(self.model.layers[of], ticket, sent, None)
            self._late = None
            add(x_TH, sums_TH, spoiled_T, of)
        layer.finish(x_TH)

    def _send(self, layer: DecoderLayer, number: int, half: Half) -> _Away[T]:
        assert layer.moe_number is not None, "a layer without experts"
        since, sent = self.meter.now(), layer.sent(half)
        ticket = self._link.dispatch(*sent[:3], layer=layer.moe_number, micro_batch=self.index)
        self.meter.sent(self.index, layer.moe_number, ticket, since)
        return _Away(number, sent, ticket)

    def _routed_sums(
        self, layer: DecoderLayer, ticket: T, sent: Sent | None, shared_TH: Tensor | None
    ) -> Generator[T | None, None, Tensor]:
        """Those of a layer, once they are there, with those of a shared expert that waited for them."""
        yield from self._arrived(ticket)
        sum_TX = self._link.combine(ticket)
        return layer.whole_sum(sum_TX if sent is None else sent.whole(sum_TX), shared_TH)

    def _arrived(self, ticket: T) -> Generator[T | None, None, None]:
        while not self._link.ready(ticket):
            yield ticket
        self.meter.back(self.index)

    def _given_up(self) -> dict[int, str]:
        """Why expert nodes gave no sum for rows of this step."""
        not_looked_up, self._not_looked_up = self._not_looked_up, {}
        return {**not_looked_up, **self._link.take_given_up(self.index)}


def _only(half: Half, row_R: Tensor) -> Half:
    normed_TH, *routed = half
    expert_RK, weight_RK = (None if one is None else one[row_R] for one in routed)
    return Half(normed_TH[row_R], expert_RK, weight_RK)
