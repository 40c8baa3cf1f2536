"""What attention halves with a state of fixed size share, in the place of keys and values: all but how rows are mixed.

Shapes: T tokens, H hidden, N blocks of B states, S sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from afserve.kernels.cache import LayerCache, StateShape
from afserve.kernels.delta import DeltaLayer, DeltaRows
from afserve.kernels.layer import BoundStates, FusedStates, Half, MixerParts
from afserve.kernels.ops import Ops
from afserve.kernels.paged import PagedBatch
from afserve.models.halves import BoundHalf, LayerTensors, state_layer
from afserve.models.router import Router
from afserve.spec import ModelSpec


class Mixer(Protocol):
    """What a layer adds to the residual stream, and what it keeps for that."""

    state: StateShape

    @property
    def parts(self) -> MixerParts:
        """For kernels that do it and what stands around it in one call."""

    def __call__(self, x_TH: Tensor, cache_NBE: Tensor, batch: PagedBatch) -> Tensor:
        """(T, H) of normalised rows; states in the cache are read and written."""


class StateHalf:
    """A mixer between the norms of its layer."""

    def __init__(
        self, spec: ModelSpec, tensors: LayerTensors, ops: Ops, router: Router | None, mixer: Mixer
    ) -> None:
        self._ops, self._router, self._eps, self._mixer = ops, router, spec.eps, mixer
        self.keeps = mixer.state
        self._input_norm, self._post_norm = norms = tensors.norms(spec)
        self._fused = ops.prepare_states(state_layer(mixer.parts, norms, router, spec.eps))

    def bind(self, cache: LayerCache) -> BoundHalf:
        (cache_NBE,) = cache
        return BoundStateHalf(self, cache_NBE, None if self._fused is None else self._fused.bind(cache_NBE))

    def run(self, x_TH: Tensor, cache_NBE: Tensor, bound: BoundStates | None, batch: PagedBatch) -> Half:
        """As `BoundHalf`, over the states of one cache."""
        ops, router = self._ops, self._router
        if bound is not None and self._fused is not None:
            if batch.held is None:
                return self._fused.run_half(x_TH, bound, batch)
            return self._run_held(self._fused, x_TH, cache_NBE, batch)
        mixed_TH = self._mixer(ops.rms_norm(x_TH, self._input_norm, self._eps), cache_NBE, batch)
        normed_TH = ops.add_rms_norm(x_TH, mixed_TH, self._post_norm, self._eps)
        if router is None:
            return Half(normed_TH, None, None)
        routed = ops.route(normed_TH, router.gate_EH, router.bias_E, router.rule, router.gate_bias_E)
        return Half(normed_TH, *routed)

    def _run_held(self, fused: FusedStates, x_TH: Tensor, cache_NBE: Tensor, batch: PagedBatch) -> Half:
        """In parts, with the same bits: what is held moves states of its own."""
        begun, delta = fused.begin_half(x_TH), self._mixer.parts.delta

        def computed(row_R: Tensor | None, states_NBE: Tensor, part: PagedBatch) -> Tensor:
            rows = begun.rows
            if isinstance(rows, Tensor):
                return fused.convolve(rows if row_R is None else rows[row_R], states_NBE, part)
            assert delta is not None, "rows of a rule"
            return self._ops.delta(rows if row_R is None else rows.of(row_R), delta, states_NBE, part)

        read = over_states(computed, self.keeps, cache_NBE, batch)
        return fused.end_half(x_TH, read.flatten(1), begun.gate_TD)


@dataclass(frozen=True, slots=True)
class BoundStateHalf:
    half: StateHalf
    cache_NBE: Tensor
    bound: BoundStates | None

    def __call__(self, x_TH: Tensor, batch: PagedBatch) -> Half:
        return self.half.run(x_TH, self.cache_NBE, self.bound, batch)


def moved_states(
    ops: Ops, rows: DeltaRows, layer: DeltaLayer, cache_NBE: Tensor, batch: PagedBatch
) -> Tensor:
    """(T, V, D): what all rows read of the states that they move."""

    def computed(row_R: Tensor | None, states_NBE: Tensor, part: PagedBatch) -> Tensor:
        return ops.delta(rows if row_R is None else rows.of(row_R), layer, states_NBE, part)

    return over_states(computed, StateShape(layer.shape.numbers), cache_NBE, batch)


def over_states(
    computed: Callable[[Tensor | None, Tensor, PagedBatch], Tensor],
    states: StateShape,
    cache_NBE: Tensor,
    batch: PagedBatch,
) -> Tensor:
    """What `computed` makes of all rows (None), with the same bits where some sequences are held: those compute these
    of their rows over copies of their states, which stay where they are in the cache until it is known how many rows
    count, and move on by those."""
    held = batch.held
    if held is None:
        return computed(None, cache_NBE, batch)
    parts, device = held.split(batch), cache_NBE.device
    kept_R, aside = parts.held.row_R, parts.aside
    before_S1 = parts.before_S[:, None] // cache_NBE.shape[1]
    block_S = parts.held.batch.block_table_SB.gather(1, before_S1)[:, 0]
    size = aside.max_context
    aside_SBE = torch.empty((aside.sequences, size, states.width(size, torch.float32)), device=device)
    states.of_blocks(aside_SBE).copy_(states.of_blocks(cache_NBE)[block_S])
    found = computed(kept_R, aside_SBE, aside)
    out = torch.empty((batch.tokens, *found.shape[1:]), device=device)
    out[kept_R] = found
    if parts.others is not None:
        row_R = parts.others.row_R
        out[row_R] = computed(row_R, cache_NBE, parts.others.batch)
    held.wait(lambda counted: computed(kept_R[counted.row_R], cache_NBE, counted.batch))
    return out
