"""A step as one native call, with the experts in this process or, over exchanges of the link, on nodes of their own.

Which steps go so is decided here, for each by itself; the others go layer by layer. Shapes: T tokens, H hidden, L MoE
layers, K top-k.
"""

from collections.abc import Sequence
from typing import Generic, NamedTuple

from torch import Tensor

from afserve.comm.m2n.exchanges import ExchangingLink
from afserve.engine.step.layer_runner import LayerRunner
from afserve.engine.step.meter import Meter
from afserve.engine.step.runner import StepRun, T
from afserve.engine.step.shared_layers import StatesMoved
from afserve.engine.step.spoiled import FINE
from afserve.engine.step.step_input import StepInput
from afserve.kernels.paged import PagedBatch
from afserve.kernels.stack import DraftChain, Exchange, Stack, Stacked, Stopped

MOST_PASSES = 16  # a few tokens are enough to hide what is around a step


class LayerRange(NamedTuple):
    """The layers from `first` up to `end`, which read the first `groups` block tables."""

    stack: Stack
    first: int
    end: int
    groups: int


class StackRunner(Generic[T]):
    """Over the experts of this process."""

    def __init__(
        self,
        parts: Sequence[LayerRange],
        predictor: Stack | None,
        layers: LayerRunner[T],
        block_sizes: Sequence[int],
    ) -> None:
        """`parts` are all layers, one call each. `predictor`: the layer of multi-token prediction, if there is one that
        fits a call. `block_sizes` by KV group."""
        self._decoder = layers.model.step_decoder(parts[0].stack) if len(parts) == 1 else None
        self._block_sizes = block_sizes[: parts[0].groups]
        self._parts, self._predictor, self._layers = parts, predictor, layers
        self._chain = None if predictor is None else layers.model.chain(predictor)
        self.seen_rows, self.settle_step = layers.seen_rows, layers.settle_step
        self.worst_mark, self.take_failures = layers.worst_mark, layers.take_failures

    def chain(self) -> DraftChain | None:
        return self._chain if self._layers.meter.trace is None else None

    @property
    def most_passes(self) -> int:
        return 0 if self._decoder is None or self._layers.meter.trace is not None else MOST_PASSES

    def decode_step(
        self, step: StepInput, passes: int, stops: Sequence[Sequence[int]]
    ) -> Sequence[list[int]]:
        layers = self._layers
        if self._decoder is None or not _whole(step, layers):
            return ()
        groups = (step.paged, *step.further)[: len(self._block_sizes)]
        done = self._decoder.decode_tokens(step.token_T, groups, self._block_sizes, passes, stops)
        if done.spoiled and layers.moves_states:
            raise StatesMoved("a row was not finite")
        for expert_LSK in done.expert_PLSK:
            if len(expert_LSK):
                layers.load.note_layers(layers.index, expert_LSK)
            layers.load.commit(layers.index, step.decodes)
        layers.meter.computed(done.expert_PLSK.shape[0] * done.expert_PLSK.shape[1], done.ffn_seconds, 0.0)
        found: list[list[int]] = done.token_PS.tolist()
        return found

    def run_step(self, step: StepInput) -> StepRun[T]:
        if _whole(step, self._layers):
            return self._run_stack(step)
        return self._layers.run_step(step)

    def run_predictor(self, x_TH: Tensor, paged: PagedBatch, decodes: int) -> StepRun[T]:
        layers = self._layers
        if self._predictor is None or layers.meter.trace is not None:
            return (yield from layers.run_predictor(x_TH, paged, decodes))
        done = layers.model.ops.run_stack(self._predictor, x_TH, (paged,), None, None)
        for expert_TK in done.expert_LTK:
            layers.load.predicted(layers.index, expert_TK, decodes)
        layers.meter.computed(len(done.expert_LTK), done.ffn_seconds, done.waited)
        return x_TH

    def _run_stack(self, step: StepInput) -> StepRun[T]:
        layers = self._layers
        x_TH, spoiled_T = layers.begin_step(step)
        groups = step.paged, *step.further
        for part in self._parts:
            fine_T = spoiled_T == FINE if part.first else None
            done = layers.model.ops.run_stack(part.stack, x_TH, groups[: part.groups], spoiled_T, None)
            note_stacked(done, layers)
            layers.taps.note_rows(part.end, x_TH)
            if fine_T is not None:
                spoiled_T += part.first * (fine_T & (spoiled_T != FINE))
        yield from ()  # nobody is waited for
        return x_TH


class ExchangeRunner(Generic[T]):
    """Over expert nodes that this micro-batch's rows go to without Python between two layers. No other micro-batch runs
    meanwhile, so only a step that is `alone` goes so."""

    def __init__(self, stack: Stack, link: ExchangingLink[T], layers: LayerRunner[T]) -> None:
        self._stack, self._link, self._layers = stack, link, layers
        self.seen_rows, self.settle_step = layers.seen_rows, layers.settle_step
        self.worst_mark, self.take_failures = layers.worst_mark, layers.take_failures
        self.run_predictor = layers.run_predictor
        self.most_passes, self.decode_step = layers.most_passes, layers.decode_step
        self._moe_layers = sum(layer.moe_number is not None for layer in layers.model.layers)

    def run_step(self, step: StepInput) -> StepRun[T]:
        if step.alone and _whole(step, self._layers):
            exchange = self._link.exchange(self._layers.index, self._moe_layers)
            if exchange is not None:
                return self._run_exchange(step, exchange)
        return self._layers.run_step(step)

    def chain(self) -> None:
        """Between its passes rows are at expert nodes."""

    def _run_exchange(self, step: StepInput, exchange: Exchange) -> StepRun[T]:
        """Where expert nodes keep the call waiting, it ends in the middle of a layer, and the step goes on layer by
        layer."""
        layers, stopped, chosen_LTK = self._layers, None, None
        x_TH, spoiled_T = layers.begin_step(step)
        try:
            done = layers.model.ops.run_stack(
                self._stack, x_TH, (step.paged, *step.further), spoiled_T, exchange
            )
            stopped, chosen_LTK = done.stopped, done.expert_LTK
        finally:
            ticket = self._settle(stopped, chosen_LTK)
        note_stacked(done, layers)
        if stopped is not None and ticket is not None:
            moe_number = layers.model.layers[stopped.layer].moe_number
            assert moe_number is not None, "stopped where nothing was sent"
            layers.meter.sent(layers.index, moe_number, ticket, layers.meter.now())
            x_TH = yield from layers.resume_step(step, ticket, x_TH, spoiled_T, stopped)
        return x_TH

    def _settle(self, stopped: Stopped | None, chosen_LTK: Tensor | None) -> T | None:
        """The ticket of what the exchange has sent and not got back, if there is such a thing."""
        if stopped is None or chosen_LTK is None:
            return self._link.settle(self._layers.index)
        given = stopped.normed_TH, chosen_LTK[-1], stopped.weight_TK
        return self._link.settle(self._layers.index, len(chosen_LTK) - 1, given)


def fits_one_call(step: StepInput, meter: Meter) -> bool:
    """All rows are read and turn by their positions, no other node has a part in it, somebody waits for it, and no
    trace wants every layer."""
    plain = step.all_rows and step.paged.turns is None
    return plain and step.shared is None and meter.trace is None and not step.ahead


def _whole(step: StepInput, layers: LayerRunner[T]) -> bool:
    """The same, and no state is held that the call would move."""
    held = step.paged.held is not None and layers.moves_states
    return not held and fits_one_call(step, layers.meter)


def note_stacked(done: Stacked, layers: LayerRunner[T]) -> None:
    """What the layers of one call chose, and how long their experts took."""
    count = done.expert_LTK.shape[0]
    if count:
        layers.load.note_layers(layers.index, done.expert_LTK)
    layers.meter.computed(count - (done.stopped is not None), done.ffn_seconds, done.waited)
