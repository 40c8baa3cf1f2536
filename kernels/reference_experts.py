"""The weighted sums of experts' FFNs in plain PyTorch: slot by slot on a CPU, choice by choice on other devices.

Both add to `total_RH`, float32. Shapes: R rows, H hidden, K top-k.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from afserve.kernels.packed import PackedExperts

GATHERED = 256 << 20  # bytes of weights that experts off the CPU copy at a time


def sums_by_slot(
    x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, experts: PackedExperts, total_RH: Tensor
) -> None:
    """Adds every expert's part, one slot after the other with all of its rows."""
    assert experts.gate_up_EJH is not None and experts.down_EHI is not None
    for slot in torch.unique(slot_RK).tolist():
        if slot < 0:
            continue
        row, choice = torch.where(slot_RK == slot)
        place = experts.place_of(slot)
        up_bias_J = None if experts.gate_up_bias_EJ is None else experts.gate_up_bias_EJ[slot]
        down_bias_H = None if experts.down_bias_EH is None else experts.down_bias_EH[slot]
        gate, up = F.linear(x_RH[row], experts.gate_up_EJH[place], up_bias_J).chunk(2, dim=-1)
        y = F.linear(experts.gating.join(gate, up), experts.down_EHI[place], down_bias_H).float()
        part = y * weight_RK[row, choice].float()[:, None]
        total_RH.index_add_(0, row, part.to(x_RH.dtype).float())


def sums_by_choice(
    x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, experts: PackedExperts, total_RH: Tensor
) -> None:
    """The same without a shape that depends on the slots: every row fetches the weights of its k-th expert. It reads
    them once per row, so it is for devices that a read of the slots would stop, and where nothing faster runs."""
    assert experts.gate_up_EJH is not None and experts.down_EHI is not None
    held = 3 * experts.hidden * experts.inner * experts.gate_up_EJH.element_size()
    step = max(1, GATHERED // max(1, held))
    for k in range(slot_RK.shape[1]):
        for first in range(0, x_RH.shape[0], step):
            rows = slice(first, first + step)
            slot = slot_RK[rows, k].long()
            safe = slot.clamp(min=0)
            both = torch.bmm(experts.gate_up_EJH[safe], x_RH[rows].unsqueeze(2)).squeeze(2)
            if experts.gate_up_bias_EJ is not None:
                both = both + experts.gate_up_bias_EJ[safe]
            joined = experts.gating.join(*both.chunk(2, dim=-1))
            y = torch.bmm(experts.down_EHI[safe], joined.unsqueeze(2)).squeeze(2).float()
            if experts.down_bias_EH is not None:
                y = y + experts.down_bias_EH[safe].float()
            part = (y * weight_RK[rows, k].float()[:, None]).to(x_RH.dtype).float()
            total_RH[rows] += part.masked_fill((slot < 0)[:, None], 0.0)
