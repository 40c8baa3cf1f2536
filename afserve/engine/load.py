"""How many rows each expert was sent, counted at one bincount per step so that it costs nothing measurable.

Shapes: T tokens, K top-k, L MoE layers, E experts.
"""

import torch
from torch import Tensor


class ExpertLoad:
    """Totals per MoE layer and expert. Each micro-batch notes its layers in order, then commits."""

    def __init__(self, layers: int, experts: int, micro_batches: int, device: torch.device) -> None:
        self._shape = (layers, experts)
        self._noted: list[list[Tensor]] = [[] for _ in range(micro_batches)]
        self._offset_L1 = torch.arange(layers, device=device)[:, None] * experts
        self._total = torch.zeros(layers * experts, dtype=torch.int64, device=device)

    def note(self, micro_batch: int, expert_TK: Tensor) -> None:
        self._noted[micro_batch].append(expert_TK.view(-1))

    def commit(self, micro_batch: int) -> None:
        """All layers of a step were noted: add them up."""
        ids_LN = torch.stack(self._noted[micro_batch]) + self._offset_L1
        self._total += torch.bincount(ids_LN.view(-1), minlength=self._total.shape[0])
        self._noted[micro_batch].clear()

    def totals(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(row) for row in self._total.view(self._shape).tolist())
