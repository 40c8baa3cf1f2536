"""Which experts the next MoE layer will ask for, guessed from the rows of this one.

Rows change little from one layer to the next, so the next layer's router chooses from this layer's rows mostly what it
will choose from its own (Eliseev and Mazur, "Fast inference of mixture-of-experts language models with offloading",
arXiv 2312.17238, section 3.2). How often that was right is measured all the time, and is what decides whether anything
is read by it. Shapes: R rows, E experts, H hidden, K top-k.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from afserve.errors import CheckpointError
from afserve.families.pattern.naming import Naming
from afserve.kernels.ops import Ops
from afserve.models.router import Router, load_router
from afserve.models.weights import TensorSource
from afserve.spec import ModelSpec

log = logging.getLogger("afserve.models")
_MOST_ROWS = 64  # more of them name most experts anyway
_LEAST_RIGHT = 0.5  # of the guesses: below that, reading by them takes the disk from what is asked for
_NEWEST = 0.05  # the weight of one call in the share that was right


class NextExperts:
    """`routers` of all MoE layers; without any it guesses nothing."""

    def __init__(self, routers: Sequence[Router], ops: Ops) -> None:
        self._routers, self._ops = routers, ops
        self._guessed: dict[int, frozenset[int]] = {}  # slots, by layer
        self.right = 1.0  # of what was guessed and was not in memory, lately

    @property
    def is_right(self) -> bool:
        """Often enough to read by it."""
        return self.right >= _LEAST_RIGHT

    def choose(self, layer: int, x_RH: Tensor) -> list[Tensor]:
        """Where the rows are: expert_RK of the layer behind `layer`, or nothing."""
        if layer + 1 >= len(self._routers) or len(x_RH) > _MOST_ROWS:
            return []
        router = self._routers[layer + 1]
        expert_RK, _ = self._ops.route(x_RH, router.gate_EH, router.bias_E, router.rule, router.gate_bias_E)
        return [expert_RK]

    @staticmethod
    def order(chosen: Sequence[Tensor]) -> list[int]:
        """Of what `choose` gave, on the host: those that most rows may want first."""
        if not chosen:
            return []
        expert_N, count_N = chosen[0].unique(return_counts=True)
        order: list[int] = expert_N[count_N.argsort(descending=True, stable=True)].tolist()
        return order

    def guess(self, layer: int, slots: Sequence[int]) -> None:
        """These were guessed for the next call of `layer`, and are not in memory."""
        self._guessed[layer] = frozenset(slots)

    def check(self, layer: int, named: Sequence[int]) -> None:
        """What a call of `layer` names in truth."""
        if guessed := self._guessed.pop(layer, None):
            right = sum(slot in guessed for slot in named) / len(guessed)
            self.right += _NEWEST * (right - self.right)


def load_routers(
    spec: ModelSpec, source: TensorSource, naming: Naming, dtype: torch.dtype, ops: Ops
) -> NextExperts:
    """An expert node's host may have no routers: nothing is guessed then."""
    try:
        routers = [load_router(spec, layer, source, naming, dtype) for layer in spec.moe_layer_ids]
    except CheckpointError as error:
        log.info("experts are not read ahead: %s", error.message)
        routers = []
    return NextExperts(routers, ops)
