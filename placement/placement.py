"""A placement: on which nodes each expert's replicas stand, and what share of the expert's rows each replica takes.

A value: frozen, versioned by `epoch`, printable, comparable, and read from and written to plain JSON, the file that
`afserve place --json` prints. It does not know how it was computed, nor any tensors.
"""

import json
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from afserve.errors import ConfigError
from afserve.placement.placement_text import FREE, SHARE_TOLERANCE, LayerPlacement, read_placement

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Tables = tuple[Ints, Floats]

__all__ = ["FREE", "Diff", "Fill", "LayerPlacement", "Placement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """One slot that must get the weights of `expert`. Integers are given by name, so that none takes another's place.

    `replaced` is the expert whose weights are overwritten (FREE: none). `local`: the node holds `expert` in another
    slot already.
    """

    layer: int
    node: int
    slot: int
    expert: int
    replaced: int = FREE
    local: bool = False


@dataclass(frozen=True, slots=True)
class Diff:
    """What leads from one placement to another: slots to fill first, slots that are free afterwards."""

    fills: tuple[Fill, ...]
    frees: tuple[tuple[int, int, int], ...]

    @property
    def moves(self) -> int:
        """Experts that travel: fills from outside the node."""
        return sum(not fill.local for fill in self.fills)


@dataclass(frozen=True, slots=True)
class Placement:
    """`layers[l]` is the l-th MoE layer (counted over MoE layers only). `experts` is per layer."""

    epoch: int
    nodes: int
    experts: int
    layers: tuple[LayerPlacement, ...]
    _slot_LNS: Ints = field(init=False, repr=False, compare=False)
    _share_LNS: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tables = _even(self.layers)
        if tables is None or not _all_sound(*tables, self.nodes, self.experts):
            for number, layer in enumerate(self.layers):  # ragged, or wrong: say what and where
                _check_layer(number, layer, self.nodes, self.experts)
            tables = _padded(self.layers, self.nodes)
        for name, table in zip(("_slot_LNS", "_share_LNS"), tables, strict=True):
            table.flags.writeable = False
            object.__setattr__(self, name, table)

    @classmethod
    def contiguous(
        cls, *, layers: int, experts: int, nodes: int, slots_per_node: int | None = None, epoch: int = 0
    ) -> "Placement":
        """Experts in order, as evenly as they divide, one replica each; the remaining slots stay free."""
        counts = [experts // nodes + (node < experts % nodes) for node in range(nodes)]
        width = max(counts) if slots_per_node is None else slots_per_node
        if max(counts) > width:
            raise ConfigError(
                f"{experts} experts on {nodes} expert nodes need {max(counts)} slots per node, not {width}"
            )
        slots, start = [], 0
        for count in counts:
            slots.append(tuple(range(start, start + count)) + (FREE,) * (width - count))
            start += count
        share = tuple(tuple(0.0 if e == FREE else 1.0 for e in row) for row in slots)
        layer = LayerPlacement(tuple(slots), share)
        return cls(epoch, nodes, experts, (layer,) * layers)

    def with_epoch(self, epoch: int) -> "Placement":
        """The same layers, which were checked already."""
        other = copy(self)
        object.__setattr__(other, "epoch", epoch)
        return other

    def with_nodes(self, nodes: int) -> "Placement":
        """The same with further nodes that hold nothing; `nodes` is at least as many as there are."""
        if nodes == self.nodes:
            return self
        more = ((),) * (nodes - self.nodes)
        layers = tuple(replace(y, slots=y.slots + more, share=y.share + more) for y in self.layers)
        return replace(self, nodes=nodes, layers=layers)

    def slots_per_node(self) -> int:
        """The widest node's slots, over all layers."""
        return int(self._slot_LNS.shape[2])

    def most_held(self) -> int:
        """The most experts of one layer that stand on one node."""
        return int((self._slot_LNS != FREE).sum(2).max(initial=0))

    def held(self, node: int) -> Iterator[tuple[int, int, int]]:
        """(layer, slot, expert) of everything that `node` holds; nothing where the placement does not know it yet."""
        for number, layer in enumerate(self.layers if node < self.nodes else ()):
            for slot, expert in enumerate(layer.slots[node]):
                if expert != FREE:
                    yield number, slot, expert

    def check_shape(self, *, layers: int, experts: int, nodes: int | None = None) -> None:
        """Raises ConfigError where this placement is of another model or another number of nodes."""
        if (len(self.layers), self.experts) != (layers, experts):
            raise ConfigError(
                f"the placement is of another model: {len(self.layers)} MoE layers of {self.experts} experts, "
                f"here are {layers} of {experts}"
            )
        if nodes is not None and self.nodes != nodes:
            raise ConfigError(f"the placement is for {self.nodes} expert nodes, here are {nodes}")

    def diff(self, new: "Placement") -> Diff:
        """What must be filled, and what may be freed, to go from here to `new`."""
        new.check_shape(layers=len(self.layers), experts=self.experts, nodes=self.nodes)
        fills, frees = [], []
        for number, (old_layer, new_layer) in enumerate(zip(self.layers, new.layers, strict=True)):
            for node, (old, row) in enumerate(zip(old_layer.slots, new_layer.slots, strict=True)):
                if old == row:
                    continue
                held = frozenset(old)
                for slot, expert in enumerate(row):
                    was = old[slot] if slot < len(old) else FREE
                    if expert not in (FREE, was):
                        fills.append(
                            Fill(
                                layer=number,
                                node=node,
                                slot=slot,
                                expert=expert,
                                replaced=was,
                                local=expert in held,
                            )
                        )
                left = frozenset(row)
                frees += [(number, node, s) for s, e in enumerate(old) if e != FREE and e not in left]
        return Diff(tuple(fills), tuple(frees))

    def slot_array(self) -> Ints:
        """slot_LNS, padded with FREE to the widest node. Nobody may write into it."""
        return self._slot_LNS

    def share_array(self) -> Floats:
        """share_LNS, parallel to `slot_array`. Nobody may write into it."""
        return self._share_LNS

    def __str__(self) -> str:
        width = self.slots_per_node()
        size = f"{len(self.layers)} layers of {self.experts} experts on {self.nodes} nodes"
        rows = [f"placement epoch {self.epoch}: {size}, up to {width} slots a node"]
        for number, layer in enumerate(self.layers):
            held = sum(e != FREE for row in layer.slots for e in row)
            known = f", max {layer.max_load:.6g}, bound {layer.lower_bound:.6g}" if layer.max_load else ""
            rows.append(f"  layer {number}: {held} replicas{known}")
        return "\n".join(rows)

    def to_json(self) -> str:
        layers = [
            {"slots": y.slots, "share": y.share, "max_load": y.max_load, "lower_bound": y.lower_bound}
            for y in self.layers
        ]
        return json.dumps(
            {"nodes": self.nodes, "experts": self.experts, "epoch": self.epoch, "layers": layers}
        )

    @classmethod
    def from_json(cls, text: str) -> "Placement":
        """Raises ConfigError, naming the place in the file, on anything that is not a valid placement."""
        return cls(*read_placement(text))


def _even(layers: Sequence[LayerPlacement]) -> Tables | None:
    """(slot_LNS, share_LNS) of equally wide nodes that hold whole numbers; None for all others."""
    try:
        slot_LNS = np.array([layer.slots for layer in layers])
        share_LNS = np.array([layer.share for layer in layers], dtype=np.float64)
    except (ValueError, TypeError):
        return None
    return (slot_LNS, share_LNS) if slot_LNS.dtype == np.int64 and slot_LNS.ndim == 3 else None


def _padded(layers: Sequence[LayerPlacement], nodes: int) -> Tables:
    """(slot_LNS, share_LNS) of nodes that have been checked, each as wide as the widest."""
    width = max((len(row) for layer in layers for row in layer.slots), default=0)
    slot_LNS = np.full((len(layers), nodes, width), FREE, dtype=np.int64)
    share_LNS = np.zeros((len(layers), nodes, width))
    for number, layer in enumerate(layers):
        for node, (row, shares) in enumerate(zip(layer.slots, layer.share, strict=True)):
            slot_LNS[number, node, : len(row)], share_LNS[number, node, : len(row)] = row, shares
    return slot_LNS, share_LNS


def _all_sound(slot_LNS: Ints, share_LNS: Floats, nodes: int, experts: int) -> bool:
    """The checks of `_check_layer` for equally wide nodes, all layers at once. False also where it cannot tell."""
    shape = slot_LNS.shape
    if shape != share_LNS.shape or shape[1] != nodes or not slot_LNS.size:
        return False
    if not (slot_LNS.min() >= FREE and slot_LNS.max() < experts <= nodes * shape[2]):
        return False
    ordered = np.sort(slot_LNS, axis=2)
    twice = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] != FREE)
    fair = (share_LNS >= 0.0) & (share_LNS <= 1.0 + SHARE_TOLERANCE)
    if twice.any() or not fair.all():
        return False
    place = np.where(slot_LNS == FREE, experts, slot_LNS) + (experts + 1) * np.arange(shape[0])[:, None, None]
    total = np.bincount(place.ravel(), weights=share_LNS.ravel(), minlength=shape[0] * (experts + 1))
    held = total.reshape(shape[0], experts + 1)[:, :experts]
    return bool((np.abs(held - 1.0) <= SHARE_TOLERANCE).all())


def _check_layer(number: int, layer: LayerPlacement, nodes: int, experts: int) -> None:
    if len(layer.slots) != nodes or len(layer.share) != nodes:
        raise ConfigError(f"placement layer {number}: has {len(layer.slots)} nodes, the placement {nodes}")
    if experts > sum(map(len, layer.slots)):
        raise ConfigError(
            f"placement layer {number}: {experts} experts in {sum(map(len, layer.slots))} slots"
        )
    total = [0.0] * experts
    for node, (row, shares) in enumerate(zip(layer.slots, layer.share, strict=True)):
        _check_node(number, node, row, shares, experts)
        for expert, share in zip(row, shares, strict=True):
            if expert != FREE:
                total[expert] += share
    for expert, share in enumerate(total):
        if not abs(share - 1.0) <= SHARE_TOLERANCE:
            raise ConfigError(
                f"placement layer {number}: shares of expert {expert} sum to {share:.6g}, not 1"
            )


def _check_node(number: int, node: int, row: Sequence[int], shares: Sequence[float], experts: int) -> None:
    where = f"placement layer {number}, node {node}"
    if len(row) != len(shares):
        raise ConfigError(f"{where}: {len(row)} slots but {len(shares)} shares")
    held = [e for e in row if e != FREE]
    if len(set(held)) != len(held):
        raise ConfigError(f"{where}: an expert stands there twice")
    for expert, share in zip(row, shares, strict=True):
        if not FREE <= expert < experts:
            raise ConfigError(f"{where}: expert {expert} is outside [0, {experts})")
        if not 0.0 <= share <= 1.0 + SHARE_TOLERANCE:
            raise ConfigError(f"{where}: share {share} of expert {expert} is outside [0, 1]")
