"""A decode step as one launch: what all its layers launch is recorded once for each size, and replayed.

The first step of a size is computed launch by launch over the same memory, so that every kernel is compiled and loaded;
the second is recorded. A step that fits no size, and every step of a model or a device that cannot be recorded, goes
layer by layer. Over expert nodes the exchange of a `DeviceLink` is a part of what is recorded. Shapes: T rows.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from torch import Tensor

from afserve.comm.m2n.link_contract import Link
from afserve.engine.step.layer_runner import LayerRunner
from afserve.engine.step.padded_step import NotRecordable, PaddedStep, StepSize
from afserve.engine.step.runner import StepRun, T
from afserve.engine.step.shared_layers import StatesMoved
from afserve.engine.step.step_input import StepInput
from afserve.kernels.cache import StateShape
from afserve.kernels.devices.device import Device

MOST_ROWS = 256
MOST_SIZES = 48  # of one micro-batch; each holds memory of its own

log = logging.getLogger("afserve.engine")


@dataclass(slots=True)
class _Computed:
    """What a step gave, in memory that the next one of its size writes over: rows, and the experts that they chose,
    where there are any."""

    x_TH: Tensor
    expert_LTK: Tensor | None


@dataclass(slots=True)
class _Size:
    """`way`: over what the recorded launches go (`Link.prepare`)."""

    padded: PaddedStep
    way: object = None
    replay: Callable[[], None] | None = None
    computed: _Computed | None = None


class GraphRunner(Generic[T]):
    def __init__(self, layers: LayerRunner[T], link: Link[T], device: Device, most_rows: int) -> None:
        """`most_rows` of a message to expert nodes."""
        self._layers, self._link, self._device = layers, link, device
        self._most_rows = min(MOST_ROWS, most_rows)
        self._sizes: dict[StepSize, _Size] = {}
        self.seen_rows, self.settle_step = layers.seen_rows, layers.settle_step
        self.worst_mark, self.take_failures = layers.worst_mark, layers.take_failures
        self.run_predictor, self.chain = layers.run_predictor, layers.chain
        self.most_passes, self.decode_step = layers.most_passes, layers.decode_step
        self._has_states = any(isinstance(kept, StateShape) for kept in layers.model.keeps)
        self.why = ""  # nothing is recorded
        self.replayed = 0

    def run_step(self, step: StepInput) -> StepRun[T]:
        size = self._size_of(step)
        way = None if size is None else self._link.prepare(self._layers.index)
        if size is None or way is None:
            return self._layers.run_step(step)
        return self._run(step, size, way)

    def _size_of(self, step: StepInput) -> StepSize | None:
        layers = self._layers
        decodes = step.decodes == step.tokens <= self._most_rows and step.paged.max_query == 1
        whole = step.all_rows and step.shared is None and step.paged.held is None and step.paged.turns is None
        watched = layers.meter.trace is not None or layers.model.head is not None
        if self.why or watched or not (decodes and whole):
            return None
        size = StepSize.of(step, self._most_rows)
        return size if size in self._sizes or len(self._sizes) < MOST_SIZES else None

    def _run(self, step: StepInput, size: StepSize, way: object) -> StepRun[T]:
        layers, known = self._layers, self._sizes.get(size)
        try:
            if known is None:
                computed = self._compute_first(step, size)
            else:
                known.padded.fill(step)
                computed = self._replay(known, way)
        except NotRecordable as error:
            self._give_up(str(error))
            if known is None and self._has_states:
                raise StatesMoved("a step that cannot be recorded was begun") from error
            return (yield from layers.run_step(step))
        layers.keep_rows(step)
        if computed.expert_LTK is not None:
            layers.load.note_layers(layers.index, computed.expert_LTK[:, : step.tokens].clone())
        return computed.x_TH[: step.tokens]

    def _compute_first(self, step: StepInput, size: StepSize) -> _Computed:
        known = self._sizes[size] = _Size(PaddedStep(size, self._device.where))
        known.padded.fill(step)
        try:
            return self._compute(known.padded.step)
        except NotRecordable:
            self._link.held(self._layers.index)  # some layers were launched: the others end what they began
            raise

    def _replay(self, known: _Size, way: object) -> _Computed:
        if known.way is not way or known.replay is None:
            known.way, known.replay, known.computed = way, None, None  # its memory goes before more is taken
            known.replay = self._record(known)
        known.replay()
        self._link.replayed(self._layers.index)
        self.replayed += 1
        assert known.computed is not None
        return known.computed

    def _record(self, known: _Size) -> Callable[[], None]:
        """Raises NotRecordable: nothing was launched then."""

        def launch() -> None:
            known.computed = self._compute(known.padded.step)

        try:
            return self._device.record_launch(launch, self._layers.model.places[1:])
        except RuntimeError as error:  # of the device: a launch that cannot be recorded
            raise NotRecordable(str(error)) from error

    def _compute(self, step: StepInput) -> _Computed:
        """Raises NotRecordable where the host has to wait or to know."""
        layers = self._layers
        for paged in (step.paged, *step.further):
            paged.copies.clear()  # each device copies anew what `fill` wrote
        run = layers.run_layers(step, *layers.begin_step(step))
        try:
            next(run)
        except StopIteration as ended:
            x_TH: Tensor = ended.value
            return _Computed(x_TH, layers.load.take_noted(layers.index))
        run.close()
        raise NotRecordable("the host has to wait for expert nodes")

    def _give_up(self, why: str) -> None:
        self.why = why
        self._sizes.clear()
        self._layers.forget_step()
        log.warning("steps are not recorded as graphs, and go layer by layer: %s", why)
