"""A step layer by layer: attention half, dispatch, shared expert, combine. Every other runner gives its bits.

Shapes: T tokens, H hidden, R rows that are read.
"""

from collections.abc import Generator
from typing import Generic

import torch
from torch import Tensor

from afserve.comm.m2n.link_contract import Link
from afserve.engine.kv.cache import KvCache
from afserve.engine.step.load import ExpertLoad
from afserve.engine.step.meter import Meter
from afserve.engine.step.row_taps import RowTaps
from afserve.engine.step.runner import StepRun, T
from afserve.engine.step.shared_layers import Abandoned, SharedLayers
from afserve.engine.step.spoiled import Spoiled
from afserve.engine.step.step_input import StepInput
from afserve.kernels.layer import Half
from afserve.kernels.paged import PagedBatch
from afserve.models.decoder import AttentionModel, DecoderLayer


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
        self._spoiled = Spoiled(most_rows, model.ops.device)
        self.taps = RowTaps(() if model.head is None else model.head.spec.behind)
        self.seen_rows = self.taps.seen_rows

    def run_step(self, step: StepInput) -> StepRun[T]:
        x_TH, spoiled_T = self.begin_step(step)
        shared = None if step.shared is None else SharedLayers(step.shared, self._kv)
        try:
            x_TH = yield from self._run_layers(step, x_TH, spoiled_T, 0, shared)
            if not self._link.held(self.index):
                x_TH = yield from self.run_again(step)
        except Abandoned:
            self._link.held(self.index)
            self.forget_step()
            raise
        self.load.commit(self.index, step.decodes)
        return x_TH

    def run_again(self, step: StepInput) -> StepRun[T]:
        """Keys and values are written once more, alike. What other nodes have part in is planned anew."""
        if step.shared is not None:
            raise Abandoned("a device's exchange failed in the middle")
        self.forget_step()
        x_TH, spoiled_T = self.begin_step(step)
        x_TH = yield from self._run_layers(step, x_TH, spoiled_T, 0, None)
        self._link.held(self.index)
        return x_TH

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

    def take_failures(self) -> dict[int, str]:
        return self._spoiled.failures(self._given_up)

    def begin_step(self, step: StepInput) -> tuple[Tensor, Tensor]:
        """The embedded tokens and the marks of their rows, all fine yet."""
        x_TH = self.model.embed(step.token_T)
        self.taps.note_rows(0, x_TH)
        return x_TH, self._spoiled.of(step.paged.starts)

    def resume_step(
        self, step: StepInput, ticket: T, x_TH: Tensor, spoiled_T: Tensor, layer: int
    ) -> StepRun[T]:
        """A step whose rows of `layer` are at the expert nodes, from there on."""
        ended = self.model.layers[layer]
        sums_TH = yield from self._routed_sums(ended, ticket, None)
        self.model.ops.add_sums(x_TH, sums_TH, spoiled_T, layer)
        ended.finish(x_TH)
        return (yield from self._run_layers(step, x_TH, spoiled_T, layer + 1, None))

    def chain(self) -> None:
        """It runs one layer at a time."""

    def run_predictor(self, x_TH: Tensor, paged: PagedBatch, decodes: int) -> StepRun[T]:
        (layer,), (attend,) = self.model.predicting, self._kv.predicting
        half = attend(x_TH, self.model.ops.bind_batch(paged))
        if half.expert_TK is not None:
            self.load.predicted(half.expert_TK, decodes)
        yield from self._feed_forward(layer, len(self.model.layers), x_TH, half, None)
        self._given_up()
        return x_TH

    def _run_layers(
        self, step: StepInput, x_TH: Tensor, spoiled_T: Tensor, first: int, shared: SharedLayers | None
    ) -> StepRun[T]:
        """Layer by layer from `first` on; what the last layer gives for the rows that are read. Of the others it only
        keeps keys and values. Routed sums are float32. Before each layer it waits for other nodes' part of a `shared`
        prompt, and raises Abandoned where that does not come."""
        model, group_of = self.model, self._kv.group_of
        tables = [model.ops.bind_batch(paged) for paged in (step.paged, *step.further)]
        last = len(model.layers) - 1
        for number in range(first, last + 1):
            layer, attend = model.layers[number], self._kv.halves[number]
            if shared is not None:
                while not shared.come(number):
                    yield None
            normed_TH, expert_TK, weight_TK = attend(x_TH, tables[group_of[number]])
            if shared is not None:
                shared.give(number, lambda: self._spoiled.fine)
            if expert_TK is not None:
                self.load.note(self.index, expert_TK)
            if number == last and not step.all_rows:
                spoiled_T = self._spoiled.only(step.rows, normed_TH, number, self._given_up())
                if not step.rows:
                    return x_TH[:0]
                x_TH, normed_TH = x_TH[step.row_R], normed_TH[step.row_R]
                if expert_TK is not None and weight_TK is not None:
                    expert_TK, weight_TK = expert_TK[step.row_R], weight_TK[step.row_R]
            half = Half(normed_TH, expert_TK, weight_TK)
            yield from self._feed_forward(layer, number, x_TH, half, spoiled_T)
            self.taps.note_rows(number + 1, x_TH)
        return x_TH

    def _feed_forward(
        self, layer: DecoderLayer, number: int, x_TH: Tensor, half: Half, spoiled_T: Tensor | None
    ) -> Generator[T | None, None, None]:
        """What is behind an attention half, into x_TH."""
        normed_TH, expert_TK, weight_TK = half
        if layer.moe_number is None:
            sums_TH = layer.local_ffn(normed_TH, x_TH)
            if sums_TH is None:  # attention alone: its rows are marked where they are spoiled
                sums_TH = torch.zeros_like(x_TH)
        else:
            assert expert_TK is not None and weight_TK is not None, "an MoE layer without a router"
            since = self.meter.now()
            ticket = self._link.dispatch(
                layer.sent(normed_TH), expert_TK, weight_TK, layer=layer.moe_number, micro_batch=self.index
            )
            self.meter.sent(self.index, layer.moe_number, ticket, since)
            local_TH = layer.local_ffn(normed_TH, x_TH)
            if local_TH is not None and not layer.adds_at_once:
                x_TH += local_TH
                local_TH = None
            sums_TH = yield from self._routed_sums(layer, ticket, local_TH)
        self.model.ops.add_sums(x_TH, sums_TH, spoiled_T, number)
        layer.finish(x_TH)

    def _routed_sums(
        self, layer: DecoderLayer, ticket: T, shared_TH: Tensor | None
    ) -> Generator[T | None, None, Tensor]:
        """Those of a layer, once they are there, with those of a shared expert that waited for them."""
        while not self._link.ready(ticket):
            yield ticket
        self.meter.back(self.index)
        return layer.whole_sum(self._link.combine(ticket), shared_TH)

    def _given_up(self) -> dict[int, str]:
        """Why expert nodes gave no sum for rows of this step."""
        return self._link.take_given_up(self.index)
