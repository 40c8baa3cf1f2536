"""How many rows chose each expert, by workload class: notes per step, counted some steps later, many at once.

Used by the thread that steps the node and by nobody else: what was counted leaves as a value (`take`). On a device
nothing here waits for it but `take`. Shapes: T tokens, K top-k, L MoE layers, E experts.
"""

import torch
from torch import Tensor

from afserve.placement.rebalance.stats import RoutedRows

KEPT = 32  # steps whose notes may wait
_COUNTED = 16  # steps between two whose distinct experts are counted
_NONE = -1  # no expert
_MOST = 4096  # choices of a layer that is counted


class Waiting:
    """Counts of one class since they were last taken. Counting a few ids costs as much as counting a thousand."""

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        self._counted_LE = torch.zeros((layers, experts), dtype=torch.int64, device=device)
        self._steps: list[list[Tensor]] = []

    def add(self, step: list[Tensor]) -> None:
        """One tensor of expert ids per layer."""
        self._steps.append(step)
        if len(self._steps) == KEPT:
            self._count()

    def take(self) -> Tensor:
        """On the host, and from now on counted from zero."""
        self._count()
        taken_LE = self._counted_LE.clone() if self._counted_LE.is_cpu else self._counted_LE.cpu()
        self._counted_LE.zero_()
        return taken_LE

    def _count(self) -> None:
        for layer, ids in enumerate(zip(*self._steps, strict=True)):
            expert_N = torch.cat([expert_TK.flatten() for expert_TK in ids]).long()
            self._counted_LE[layer].scatter_add_(0, expert_N, torch.ones_like(expert_N))
        self._steps.clear()


class ExpertLoad:
    """Rows per MoE layer and expert. Each micro-batch notes its layers in order, then commits."""

    def __init__(
        self, layers: int, experts: int, micro_batches: int, device: torch.device, predictors: int = 0
    ) -> None:
        """The last `predictors` of the layers are no part of steps."""
        self._noted: list[list[Tensor]] = [[] for _ in range(micro_batches)]
        self.newest: list[list[Tensor]] = [[]] * micro_batches  # of the last step, layer by layer
        own = layers - predictors
        self._decode, self._prefill = (Waiting(own, experts, device) for _ in range(2))
        self._predicted = [Waiting(predictors, experts, device) for _ in range(2)]  # decoding, prompts
        self._commits = 0
        self._touched: dict[int, int] = {}

    def note(self, micro_batch: int, expert_TK: Tensor) -> None:
        self._noted[micro_batch].append(expert_TK)

    def take_noted(self, micro_batch: int) -> list[Tensor]:
        """What was noted of a step, for who notes it another way."""
        noted, self._noted[micro_batch] = self._noted[micro_batch], []
        return noted

    def drop(self, micro_batch: int) -> None:
        """The step ended in the middle; it will be computed again."""
        self._noted[micro_batch] = []

    def commit(self, micro_batch: int, decodes: int) -> None:
        """All layers of a step were noted. Its first `decodes` tokens were no prompt's (`StepPlan.decodes`)."""
        noted, self._noted[micro_batch] = self._noted[micro_batch], []
        self.newest[micro_batch] = noted
        tokens = noted[0].shape[0] if noted else 0
        self._commits += 1
        if decodes == tokens > 0 and self._commits % _COUNTED == 0:
            chosen_TK = noted[self._commits // _COUNTED % len(noted)]
            if chosen_TK.is_cpu and chosen_TK.numel() <= _MOST:
                self._touched[micro_batch] = len({*chosen_TK.flatten().tolist()} - {_NONE})
        _share(noted, decodes, self._decode, self._prefill)

    def predicted(self, expert_TK: Tensor, decodes: int) -> None:
        """The layer of multi-token prediction ran for these rows, the first `decodes` of which were no prompt's."""
        _share([expert_TK], decodes, *self._predicted)

    def touched(self, micro_batch: int) -> int | None:
        """Distinct experts of one layer in its last step, if they were counted: now and then, and on no device."""
        return self._touched.pop(micro_batch, None)

    def take(self) -> RoutedRows:
        """What was committed since the last call, every row in exactly one of them."""
        decode, prefill = self._predicted
        return RoutedRows(
            torch.cat((self._prefill.take(), prefill.take())).numpy(),
            torch.cat((self._decode.take(), decode.take())).numpy(),
        )


def _share(noted: list[Tensor], decodes: int, decode: Waiting, prefill: Waiting) -> None:
    tokens = noted[0].shape[0] if noted else 0
    if decodes == tokens:
        decode.add(noted)
    elif not decodes:
        prefill.add(noted)
    else:
        decode.add([expert_TK[:decodes] for expert_TK in noted])
        prefill.add([expert_TK[decodes:] for expert_TK in noted])
