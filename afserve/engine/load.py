"""How many rows each expert was sent, by workload class: notes per step, counted some steps later, many at once.

Shapes: T tokens, K top-k, L MoE layers, E experts.
"""

import torch
from torch import Tensor

KEPT = 32  # steps whose notes may wait


class Waiting:
    """Counts of one class. A bincount of a few ids costs as much as one of a thousand."""

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        self._experts = experts
        self._counted_LE = torch.zeros((layers, experts), dtype=torch.int64, device=device)
        self._steps: list[list[Tensor]] = []

    def add(self, step: list[Tensor]) -> None:
        """One tensor of expert ids per layer."""
        self._steps.append(step)
        if len(self._steps) == KEPT:
            self.counts()

    def counts(self) -> Tensor:
        for layer, ids in enumerate(zip(*self._steps, strict=True)):
            joined = torch.cat([expert_TK.flatten() for expert_TK in ids])
            self._counted_LE[layer] += torch.bincount(joined, minlength=self._experts)
        self._steps.clear()
        return self._counted_LE


class ExpertLoad:
    """Totals per MoE layer and expert. Each micro-batch notes its layers in order, then commits."""

    def __init__(self, layers: int, experts: int, micro_batches: int, device: torch.device) -> None:
        self._noted: list[list[Tensor]] = [[] for _ in range(micro_batches)]
        self._decode = Waiting(layers, experts, device)
        self._prefill = Waiting(layers, experts, device)

    def note(self, micro_batch: int, expert_TK: Tensor) -> None:
        self._noted[micro_batch].append(expert_TK)

    def commit(self, micro_batch: int, decodes: int) -> None:
        """All layers of a step were noted. Its first `decodes` tokens were decoded, the others prefilled."""
        noted, self._noted[micro_batch] = self._noted[micro_batch], []
        tokens = noted[0].shape[0] if noted else 0
        if decodes == tokens:
            self._decode.add(noted)
        elif not decodes:
            self._prefill.add(noted)
        else:
            self._decode.add([expert_TK[:decodes] for expert_TK in noted])
            self._prefill.add([expert_TK[decodes:] for expert_TK in noted])

    def totals(self) -> tuple[tuple[int, ...], ...]:
        return self._rows(self._decode.counts() + self._prefill.counts())

    def prefilled(self) -> tuple[tuple[int, ...], ...]:
        return self._rows(self._prefill.counts())

    @staticmethod
    def _rows(counts: Tensor) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(row) for row in counts.tolist())
