"""Messages of one layer, or parts of them, as one call of an expert bank. It knows no clock and no port.

Shapes: R rows, H hidden size, K top-k.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from afserve.comm.m2n.bank import Bank
from afserve.comm.m2n.port import Arrival

Part = tuple[Arrival, Tensor, slice]
"""A message, its answer, and which of its rows."""


def forward(bank: Bank, layer: int, parts: Sequence[Part]) -> None:
    """Fill those rows of the answers."""
    if len(parts) == 1:
        (only, reply_RH, part) = parts[0]
        bank.forward(layer, only.x_RH[part], only.slot_RK[part], only.weight_RK[part], reply_RH[part])
        return
    x_RH = torch.cat([arrival.x_RH[part] for arrival, _, part in parts])
    slot_RK = torch.cat([arrival.slot_RK[part] for arrival, _, part in parts])
    weight_RK = torch.cat([arrival.weight_RK[part] for arrival, _, part in parts])
    out_RH = torch.empty(x_RH.shape, dtype=parts[0][1].dtype, device=x_RH.device)
    bank.forward(layer, x_RH, slot_RK, weight_RK, out_RH)
    replies = [reply_RH[part] for _, reply_RH, part in parts]
    for reply_RH, part_RH in zip(replies, out_RH.split([len(reply) for reply in replies]), strict=True):
        reply_RH.copy_(part_RH)


def tensors(parts: Sequence[Part]) -> list[Tensor]:
    """All that `forward` reads and writes of others."""
    held = ((message.x_RH, message.slot_RK, message.weight_RK, reply_RH) for message, reply_RH, _ in parts)
    return [tensor for four in held for tensor in four]
