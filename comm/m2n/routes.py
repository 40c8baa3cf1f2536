"""From experts to slots: index tables of one placement, and the rule that chooses among an expert's replicas.

The choice depends on the row alone. A hash of the row's first 16 bytes is a number u in [0, 1); of each of its experts
the row takes the replica whose interval of the cumulated shares holds u. Example: an expert has two replicas with
shares 0.7 and 0.3; a row with u = 0.65 takes the first and one with u = 0.9 the second. So a row is treated alike in
any batch, shares are met on average, and experts that are replicated on the same nodes send a row to the same one of
them.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from afserve.comm.m2n.near import Near
from afserve.comm.transport import HOST, NO_SLOT
from afserve.errors import ConfigError
from afserve.placement.placement import FREE, LayerPlacement, Placement

_KEY_BYTES = 16
_MIX = (0x2545F4914F6CDD1D, 0x1B873593CC9E2D51, 0x4CF5AD432745937F)  # odd; any would do
_BITS = 24
_NEVER = 2.0


@dataclass(frozen=True, slots=True)
class LayerRoutes:
    """Slots are global: node * slots + slot. The last row stands for expert -1, a choice that does not count.

    P replicas at most. `below_EP` are the upper ends of the intervals of all but the last replica (one if P is 1).
    `handle` is the native library's form of the same, over the same memory. No row goes to the nodes in `absent`;
    `homeless_E` marks experts that stand on no other node, and is None where there are none.
    """

    slot_EP: Tensor
    below_EP: Tensor
    nodes: int
    slots: int
    handle: object | None = None
    absent: frozenset[int] = frozenset()
    homeless_E: Tensor | None = None

    def to(self, device: torch.device) -> "LayerRoutes":
        if device.type == "cpu":
            return self
        homeless_E = None if self.homeless_E is None else self.homeless_E.to(device)
        return replace(
            self, slot_EP=self.slot_EP.to(device), below_EP=self.below_EP.to(device), homeless_E=homeless_E
        )

    def choose(self, x_TH: Tensor, expert_TK: Tensor) -> Tensor:
        """Global slots, int32, shaped like expert_TK."""
        index_TK = expert_TK.long()
        if self.slot_EP.shape[1] == 1:
            return self.slot_EP[:, 0][index_TK]
        replica_TK = (row_number(x_TH)[:, None, None] >= self.below_EP[index_TK]).sum(-1)
        return self.slot_EP[index_TK, replica_TK]

    def owners(self, x_TH: Tensor, expert_TK: Tensor) -> Tensor:
        """The node that each choice goes to, -1 where it goes to none."""
        return torch.div(self.choose(x_TH, expert_TK), self.slots, rounding_mode="floor")

    def homeless(self, expert_TK: Tensor) -> Tensor | None:
        """Of these choices, those whose expert stands on no node that is there; None if all have a home."""
        if self.homeless_E is None:
            return None
        homeless_TK = self.homeless_E[expert_TK.long()]
        return homeless_TK if bool(homeless_TK.any()) else None


class RouteTable:
    """All layers of one placement, for nodes of `slots` slots each. The tables lie on `device`, as the router's ids do.

    `native` is the native library's module, of use in host memory only. No row goes to the nodes in `without`: replicas
    elsewhere take over their rows, in proportion to their shares. Rows prefer replicas that are `near`.
    """

    def __init__(
        self,
        placement: Placement,
        slots: int,
        native: Any | None = None,
        device: torch.device = HOST,
        without: frozenset[int] = frozenset(),
        near: Near | None = None,
    ) -> None:
        if placement.slots_per_node() > slots:
            raise ConfigError(
                f"placement needs {placement.slots_per_node()} slots per expert node, they have {slots}"
            )
        self.epoch = placement.epoch
        self.nodes = placement.nodes
        seen: dict[LayerPlacement, LayerRoutes] = {}
        for layer in placement.layers:
            if layer not in seen:
                host_native = native if device.type == "cpu" else None
                there = _remaining(layer, without) if without else layer
                there = there if near is None else near.shares(there)
                tables = _tables(there, placement.experts, slots, host_native, without)
                seen[layer] = tables.to(device)
        self.layers = tuple(seen[layer] for layer in placement.layers)

    def of(self, number: int) -> LayerRoutes:
        """Of the layer that a message names. Behind all of the placement's is that of look-ups, whose slices stand
        where the experts of the first one do."""
        return self.layers[number if number < len(self.layers) else 0]


def row_number(x_TH: Tensor) -> Tensor:
    """u_T in [0, 1), float32, from the first 16 bytes of each row."""
    columns = _KEY_BYTES // x_TH.element_size()
    key_TC = x_TH[:, :columns]
    if key_TC.shape[1] < columns:
        key_TC = functional.pad(key_TC, (0, columns - key_TC.shape[1]))
    word_T2 = key_TC.clone(memory_format=torch.contiguous_format).view(torch.int64)
    mixed_T = word_T2[:, 0] * _MIX[0] + word_T2[:, 1] * _MIX[1]
    mixed_T = (mixed_T ^ (mixed_T >> 29)) * _MIX[2]
    return ((mixed_T >> (64 - _BITS)) & ((1 << _BITS) - 1)).float() / (1 << _BITS)


def _remaining(layer: LayerPlacement, without: frozenset[int]) -> LayerPlacement:
    """The layer with nothing on the nodes in `without`; shares of what is left of an expert sum to 1 again.

    A replica that took no rows takes them where no other one is left.
    """
    left: dict[int, list[float]] = {}
    for node, (row, shares) in enumerate(zip(layer.slots, layer.share, strict=True)):
        for expert, share in zip(row, shares, strict=True):
            if expert != FREE and node not in without:
                left.setdefault(expert, []).append(share)

    def scaled(expert: int, share: float) -> float:
        total = sum(left[expert])
        return share / total if total > 0 else 1.0 / len(left[expert])

    rows = list(enumerate(zip(layer.slots, layer.share, strict=True)))
    return LayerPlacement(
        tuple(() if node in without else row for node, (row, _) in rows),
        tuple(
            ()
            if node in without
            else tuple(0.0 if e == FREE else scaled(e, old) for e, old in zip(row, shares, strict=True))
            for node, (row, shares) in rows
        ),
    )


def _tables(
    layer: LayerPlacement, experts: int, slots: int, native: Any | None, absent: frozenset[int] = frozenset()
) -> LayerRoutes:
    """Plain lists first: an attention node waits for this when it adopts a placement."""
    slot_E: list[list[int]] = [[] for _ in range(experts + 1)]
    below_E: list[list[float]] = [[] for _ in range(experts + 1)]
    for node, (row, shares) in enumerate(zip(layer.slots, layer.share, strict=True)):
        for slot, (expert, share) in enumerate(zip(row, shares, strict=True)):
            if expert != FREE and share > 0:
                slot_E[expert].append(node * slots + slot)
                below_E[expert].append((below_E[expert] or [0.0])[-1] + share)
    homeless = [not found for found in slot_E[:experts]]
    width = max(1, *map(len, slot_E))
    for found, below in zip(slot_E, below_E, strict=True):
        last = found[-1] if found else NO_SLOT
        found += [last] * (width - len(found))
        below[-1:] = [_NEVER] * (max(width - 1, 1) - max(len(below) - 1, 0))
    slot_EP = torch.tensor(slot_E, dtype=torch.int32)
    below_EP = torch.tensor(below_E, dtype=torch.float32)
    handle = None
    if native is not None:
        addresses = slot_EP.data_ptr(), below_EP.data_ptr()
        handle = native.Routes(*addresses, experts, width, len(layer.slots), slots)
    homeless_E = torch.tensor([*homeless, False]) if any(homeless) else None
    return LayerRoutes(slot_EP, below_EP, len(layer.slots), slots, handle, absent, homeless_E)
