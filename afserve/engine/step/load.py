"""How many rows chose each expert, by workload class: notes per step, counted some steps later, many at once.

Used by the thread that steps the node and by nobody else: what was counted leaves as a value (`take`). On a device
nothing here waits for it but `take`. Shapes: T tokens, K top-k, L MoE layers, E experts.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from afserve.kernels.devices.opened import device_of
from afserve.placement.rebalance.stats import RoutedRows
from afserve.spec import ModelSpec

KEPT = 32  # steps whose notes may wait
_COUNTED = 16  # steps between two whose distinct experts are counted
_MOST = 4096  # choices of a layer that is counted


class Waiting:
    """Counts of one class since they were last taken. Counting a few ids costs as much as counting a thousand."""

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        self._counted_LE = torch.zeros((layers, experts), dtype=torch.int64, device=device)
        self._steps: list[Tensor] = []

    def add(self, expert_LTK: Tensor) -> None:
        self._steps.append(expert_LTK)
        if len(self._steps) == KEPT:
            self._count()

    def take(self) -> Tensor:
        """On the host, and from now on counted from zero."""
        device_of(self._counted_LE.device).finish()  # notes are of a micro-batch's queue
        self._count()
        taken_LE = self._counted_LE.clone() if self._counted_LE.is_cpu else self._counted_LE.cpu()
        self._counted_LE.zero_()
        return taken_LE

    def _count(self) -> None:
        if self._steps:
            expert_LN = torch.cat(self._steps, 1).flatten(1).long()
            self._counted_LE.scatter_add_(1, expert_LN, torch.ones_like(expert_LN))
        self._steps.clear()


class ExpertLoad:
    """Rows per MoE layer and expert. Each micro-batch notes its layers in order, then commits."""

    def __init__(
        self,
        layers: int,
        experts: int,
        micro_batches: int,
        device: torch.device,
        predictors: int = 0,
        choices: int = 0,
    ) -> None:
        """The last `predictors` of the layers are no part of steps. Of `choices` (0: `experts`) those from `experts` on
        compute nothing: they are noted, and are no rows of experts."""
        self._noted: list[list[Tensor]] = [[] for _ in range(micro_batches)]  # (some layers, T, K) each
        self.newest: list[Tensor | None] = [None] * micro_batches  # of the last step, (L, T, K)
        own = layers - predictors
        self._experts, every = experts, choices or experts
        # of each micro-batch, decoding and prompts
        self._steps = [[Waiting(own, every, device) for _ in range(2)] for _ in range(micro_batches)]
        self._predicted = [
            [Waiting(predictors, every, device) for _ in range(2)] for _ in range(micro_batches)
        ]
        self._commits = 0
        self._touched: dict[int, int] = {}

    @classmethod
    def of(cls, spec: ModelSpec, micro_batches: int, device: torch.device) -> "ExpertLoad":
        own = spec.moe_layers, spec.experts
        return cls(*own, micro_batches, device, spec.routed_predictors, spec.choices)

    def note(self, micro_batch: int, expert_TK: Tensor) -> None:
        """Of the next layer."""
        self._noted[micro_batch].append(expert_TK.unsqueeze(0))

    def note_layers(self, micro_batch: int, expert_LTK: Tensor) -> None:
        """Of the next so many layers."""
        self._noted[micro_batch].append(expert_LTK)

    def take_noted(self, micro_batch: int) -> Tensor | None:
        """What was noted of a step, (L, T, K), for who notes it another way."""
        noted, self._noted[micro_batch] = self._noted[micro_batch], []
        return noted[0] if len(noted) == 1 else torch.cat(noted) if noted else None

    def drop(self, micro_batch: int) -> None:
        """The step ended in the middle; it will be computed again."""
        self._noted[micro_batch] = []

    def commit(self, micro_batch: int, decodes: int) -> None:
        """All layers of a step were noted. Its first `decodes` tokens were no prompt's (`StepPlan.decodes`)."""
        self._commits += 1
        noted_LTK = self.newest[micro_batch] = self.take_noted(micro_batch)
        if noted_LTK is None:
            return
        if decodes == noted_LTK.shape[1] > 0 and self._commits % _COUNTED == 0:
            chosen_TK = noted_LTK[self._commits // _COUNTED % len(noted_LTK)]
            if chosen_TK.is_cpu and chosen_TK.numel() <= _MOST:
                self._touched[micro_batch] = sum(
                    0 <= e < self._experts for e in {*chosen_TK.flatten().tolist()}
                )
        _share(noted_LTK, decodes, *self._steps[micro_batch])

    def predicted(self, micro_batch: int, expert_TK: Tensor, decodes: int) -> None:
        """The layer of multi-token prediction ran for these rows, the first `decodes` of which were no prompt's. One
        without experts has no columns."""
        if expert_TK.shape[1]:
            _share(expert_TK[None], decodes, *self._predicted[micro_batch])

    def touched(self, micro_batch: int) -> int | None:
        """Distinct experts of one layer in its last step, if they were counted: now and then, and on no device."""
        return self._touched.pop(micro_batch, None)

    def take(self) -> RoutedRows:
        """What was committed since the last call, every row in exactly one of them."""
        decode_LE, prefill_LE = (
            torch.cat(
                [_taken([each[kind] for each in waiting]) for waiting in (self._steps, self._predicted)]
            )
            for kind in range(2)
        )
        return RoutedRows(
            *(each[:, : self._experts].contiguous().numpy() for each in (prefill_LE, decode_LE))
        )


def _taken(waiting: Sequence[Waiting]) -> Tensor:
    return reduce(torch.add, (one.take() for one in waiting))


def _share(expert_LTK: Tensor, decodes: int, decode: Waiting, prefill: Waiting) -> None:
    if decodes == expert_LTK.shape[1]:
        decode.add(expert_LTK)
    elif not decodes:
        prefill.add(expert_LTK)
    else:
        decode.add(expert_LTK[:, :decodes])
        prefill.add(expert_LTK[:, decodes:])
