"""Memory for some of a node's experts: how many of a layer it holds, what a node counts of it, what traffic makes of
it.

No torch. The memory itself is in `models/tier`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from afserve.counters import counter
from afserve.errors import ConfigError
from afserve.spec import ModelSpec

FLAG = "--expert-memory"
_HOT = 0.5  # of expert uses, that a quarter of the experts serve where traffic has a hot set: even traffic gives 0.25
_ENOUGH = 1000  # uses of experts, before anything is said of them
_SERVED = "Uses of experts that memory for a share of a layer's experts would have served."


def least_memory(spec: ModelSpec, expert_bytes: int) -> int:
    """Bytes for the experts that one row chooses in each layer: those have to be there together."""
    return spec.moe_layers * spec.top_k * expert_bytes


def places_within(memory: int, spec: ModelSpec, slots: int, expert_bytes: int) -> int | None:
    """Experts of each layer that are in memory at a time; None where that is all `slots`. Raises ConfigError."""
    places = memory // (spec.moe_layers * expert_bytes)
    if places >= slots:
        return None
    if places < spec.top_k:
        least = least_memory(spec, expert_bytes) / (1 << 30)
        raise ConfigError(
            f"{FLAG}: {memory / (1 << 30):.3g} GiB hold {places} experts in each of {spec.moe_layers} layers, and a "
            f"token needs {spec.top_k} there; give each expert node {least:.3g} GiB or more",
            param="expert_memory",
        )
    return places


@dataclass(frozen=True, slots=True)
class ExpertMemoryStats:
    """Routed experts of a node with --expert-memory; without a capacity all of them are in memory. One use is an expert
    that a call of a layer names."""

    capacity: int = counter(
        0,
        "Experts that memory holds, of all layers.",
        "expert_memory_capacity_experts",
        kind="gauge",
        where="capacity",
    )
    resident: int = counter(0, "In memory now.", "expert_memory_experts", kind="gauge", where="capacity")
    hits: int = counter(
        0, "Uses of experts.", "expert_memory_uses", labels=(("found", "memory"),), where="capacity"
    )
    misses: int = counter(
        0, "Uses of experts.", "expert_memory_uses", labels=(("found", "disk"),), where="capacity"
    )
    in_host: int = counter(
        0, "Uses of experts.", "expert_memory_uses", labels=(("found", "host"),), where="capacity"
    )
    unreadable: int = counter(0, "Those not readable.", "expert_memory_unreadable", where="capacity")
    read_ahead: int = counter(
        0, "Experts read before they were named.", "expert_memory_read_ahead", where="capacity"
    )
    ahead_used: int = counter(
        0, "Those that were named then.", "expert_memory_read_ahead_used", where="capacity"
    )
    bytes_read: int = counter(
        0, "Bytes of tensors read from the checkpoint.", "expert_memory_read_bytes", where="capacity"
    )
    read_seconds: float = counter(
        0.0, "Time in which experts were read.", "expert_memory_read_seconds", where="capacity"
    )
    bytes_copied: int = counter(
        0,
        "Bytes of experts copied from host memory to a GPU.",
        "expert_memory_copied_bytes",
        where="capacity",
    )
    copy_seconds: float = counter(
        0.0, "Time that a GPU took to copy them.", "expert_memory_copy_seconds", where="capacity"
    )
    waited_seconds: float = counter(
        0.0, "Time that calls waited for that.", "expert_memory_wait_seconds", where="capacity"
    )
    served_10: int = counter(
        0, _SERVED, "expert_memory_would_serve", labels=(("share", "0.10"),), where="capacity"
    )
    served_25: int = counter(
        0, _SERVED, "expert_memory_would_serve", labels=(("share", "0.25"),), where="capacity"
    )
    served_50: int = counter(
        0, _SERVED, "expert_memory_would_serve", labels=(("share", "0.50"),), where="capacity"
    )

    @property
    def uses(self) -> int:
        return self.hits + self.misses + self.in_host


def verdict(nodes: Sequence[ExpertMemoryStats]) -> str:
    """Whether traffic has a hot set: the parts of expert uses that memory for 10, 25 and 50 % of the experts serves."""
    uses = sum(node.uses for node in nodes)
    if uses < _ENOUGH:
        return f"whether your traffic has a hot set is not known yet: {uses:,} uses of experts so far"
    served = ((node.served_10, node.served_25, node.served_50) for node in nodes)
    ten, quarter, half = (sum(parts) / uses for parts in zip(*served, strict=True))
    said = "has a hot set" if quarter >= _HOT else "has no hot set"
    parts = f"{ten:.0%}, {quarter:.0%}, {half:.0%}"
    return f"your traffic {said}: memory for 10, 25, 50 % of the experts serves {parts} of their uses"
