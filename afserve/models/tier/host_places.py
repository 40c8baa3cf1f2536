"""The places of a bank whose kernels know which of them has a slot's weights: a CPU's.

What `TieredBank` and `ExpertMemory` ask is what `device_places.py` has, too. Shapes: R rows, K top-k, H hidden.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from afserve.models.experts import ExpertBank


class PassRows(NamedTuple):
    """Rows, slots, weights and sums of a call that is made in several passes, each of which adds its own."""

    x_RH: Tensor
    slot_RK: Tensor
    weight_RK: Tensor
    sum_RH: Tensor


class Copied(NamedTuple):
    """From the host's memory to a device, and the seconds that the device took."""

    bytes: int = 0
    seconds: float = 0.0


class HostPlaces:
    from_disk = True  # what has no place is read from the checkpoint
    waits = False  # `on_host` waits for kernels: what else is asked for goes with it
    copied = Copied()

    def __init__(self, bank: ExpertBank) -> None:
        self.bank = bank

    def put(self, layer: int, slot: int, place: int | None) -> None:
        """As `ExpertBank.put`."""
        self.bank.put(layer, slot, place)

    def fill(self, layer: int, slot: int, expert: int, *, again: bool = False) -> None:
        """As `ExpertBank.fill`, of a slot that was put somewhere. Several threads may."""
        self.bank.fill(layer, slot, expert, again=again)

    def on_host(self, *tensors: Tensor) -> Sequence[Tensor]:
        """What the host has to know of a call: valid until the next."""
        return tensors

    def forward(
        self, layer: int, x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, out_RH: Tensor, add: bool = False
    ) -> None:
        """As `ExpertBank.forward`, of slots that are filled and lie on the host."""
        self.bank.forward(layer, x_RH, slot_RK, weight_RK, out_RH, add)

    def in_passes(
        self, x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, out_RH: Tensor, add: bool
    ) -> Iterator[PassRows]:
        """Calls whose passes are made before the next one is asked for. Kernels add parts by slot, and so do passes,
        the lower slots first."""
        sum_RH = out_RH.float() if add else torch.zeros(x_RH.shape, dtype=torch.float32)
        yield PassRows(x_RH, slot_RK, weight_RK, sum_RH)
        out_RH.copy_(sum_RH)
