"""A placement: where every logical expert's replicas live and what share of its rows each one takes.

A value. Frozen, versioned by `epoch`, printable, diffable, and read from and written to plain JSON. It
knows nothing of how it was computed, nor of tensors.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from afserve.errors import ConfigError

FREE = -1
_SHARE_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """One MoE layer. `slots[n][s]` is the expert in slot s of node n (FREE = empty); `share` is parallel to it."""

    slots: tuple[tuple[int, ...], ...]
    share: tuple[tuple[float, ...], ...]

    def replicas(self, expert: int) -> tuple[tuple[int, int, float], ...]:
        """(node, slot, share) of each replica of `expert`, in node order."""
        return tuple(
            (node, slot, self.share[node][slot])
            for node, row in enumerate(self.slots)
            for slot, held in enumerate(row)
            if held == expert
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """`layers[l]` is the l-th MoE layer (counted over MoE layers only). `experts` is per layer."""

    epoch: int
    nodes: int
    experts: int
    layers: tuple[LayerPlacement, ...]

    def __post_init__(self) -> None:
        for number, layer in enumerate(self.layers):
            _check_layer(number, layer, self.nodes, self.experts)

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
        return replace(self, epoch=epoch)

    def slots_per_node(self) -> int:
        """The widest node's slots, over all layers."""
        return max((len(row) for layer in self.layers for row in layer.slots), default=0)

    def held(self, node: int) -> Iterator[tuple[int, int, int]]:
        """(layer, slot, expert) of everything that `node` holds."""
        for number, layer in enumerate(self.layers):
            for slot, expert in enumerate(layer.slots[node]):
                if expert != FREE:
                    yield number, slot, expert

    def to_json(self) -> str:
        return json.dumps(
            {
                "epoch": self.epoch,
                "nodes": self.nodes,
                "experts": self.experts,
                "layers": [{"slots": layer.slots, "share": layer.share} for layer in self.layers],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Placement":
        """Raises ConfigError, naming the field, on anything that is not a valid placement."""
        try:
            raw = json.loads(text)
            layers = tuple(
                LayerPlacement(
                    tuple(tuple(int(e) for e in row) for row in layer["slots"]),
                    tuple(tuple(float(s) for s in row) for row in layer["share"]),
                )
                for layer in raw["layers"]
            )
            nodes = int(raw["nodes"])
            experts = int(raw.get("experts", 1 + max((e for y in layers for r in y.slots for e in r), default=-1)))
            epoch = int(raw.get("epoch", 0))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a placement file: {type(error).__name__}: {error}") from error
        return cls(epoch, nodes, experts, layers)


def _check_layer(number: int, layer: LayerPlacement, nodes: int, experts: int) -> None:
    if len(layer.slots) != nodes or len(layer.share) != nodes:
        raise ConfigError(f"placement layer {number}: has {len(layer.slots)} nodes, the placement {nodes}")
    total = [0.0] * experts
    for node, (row, shares) in enumerate(zip(layer.slots, layer.share, strict=True)):
        _check_node(number, node, row, shares, experts)
        for expert, share in zip(row, shares, strict=True):
            if expert != FREE:
                total[expert] += share
    for expert, share in enumerate(total):
        if abs(share - 1.0) > _SHARE_TOLERANCE:
            raise ConfigError(f"placement layer {number}: shares of expert {expert} sum to {share:.6g}, not 1")


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
        if not 0.0 <= share <= 1.0 + _SHARE_TOLERANCE:
            raise ConfigError(f"{where}: share {share} of expert {expert} is outside [0, 1]")
