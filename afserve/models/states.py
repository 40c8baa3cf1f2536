"""What attention halves with a state of fixed size share, in the place of keys and values: delta nets, convolutions.

Shapes: T tokens, H hidden, N blocks of B states, S sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from afserve.kernels.cache import StateShape
from afserve.kernels.layer import Half
from afserve.kernels.ops import Ops
from afserve.kernels.paged import PagedBatch
from afserve.models.router import Router


class StateHalf(Protocol):
    def run(self, x_TH: Tensor, cache_NBE: Tensor, batch: PagedBatch) -> Half:
        """As `BoundHalf`, over the states of one cache."""


@dataclass(frozen=True, slots=True)
class BoundStates:
    half: StateHalf
    cache_NBE: Tensor

    @property
    def bound(self) -> None:
        return None

    def __call__(self, x_TH: Tensor, batch: PagedBatch) -> Half:
        return self.half.run(x_TH, self.cache_NBE, batch)


def joined_half(ops: Ops, normed_TH: Tensor, router: Router | None) -> Half:
    if router is None:
        return Half(normed_TH, None, None)
    routed = ops.route(normed_TH, router.gate_EH, router.bias_E, router.rule, router.gate_bias_E)
    return Half(normed_TH, *routed)


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
