"""How many rows each expert was sent, by workload class, at one or two bincounts per step.

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
        self._decode = torch.zeros(layers * experts, dtype=torch.int64, device=device)
        self._prefill = torch.zeros_like(self._decode)

    def note(self, micro_batch: int, expert_TK: Tensor) -> None:
        self._noted[micro_batch].append(expert_TK)

    def commit(self, micro_batch: int, decodes: int) -> None:
        """All layers of a step were noted. Its first `decodes` tokens were decoded, the others prefilled."""
        ids_LTK = torch.stack(self._noted[micro_batch]) + self._offset_L1[:, :, None]
        self._noted[micro_batch].clear()
        if decodes:
            self._decode += self._counts(ids_LTK[:, :decodes])
        if decodes < ids_LTK.shape[1]:
            self._prefill += self._counts(ids_LTK[:, decodes:])

    def _counts(self, ids_LTK: Tensor) -> Tensor:
        return torch.bincount(ids_LTK.flatten(), minlength=self._decode.shape[0])

    def totals(self) -> tuple[tuple[int, ...], ...]:
        return self._rows(self._decode + self._prefill)

    def prefilled(self) -> tuple[tuple[int, ...], ...]:
        return self._rows(self._prefill)

    def _rows(self, counts: Tensor) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(row) for row in counts.view(self._shape).tolist())
