"""What nodes take of a host's memory, and what they leave there for KV caches. All sizes are bytes.

Of nodes on GPUs it is the GPU's memory, which `topology` then takes for the machine's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from afserve.config import ModelSource
from afserve.errors import ConfigError, DoesNotFitError
from afserve.families.near_rows import check_near_rows
from afserve.kernels.devices import scratch
from afserve.launch.plan.devices import attention_bytes
from afserve.launch.plan.drafting import numbers_beside
from afserve.launch.plan.footprint import (
    element_bytes,
    gib,
    kept_dtype,
    kernel_bytes,
    kv_element_bytes,
    role_bytes,
    usable,
)
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.wishes import Share, Wishes
from afserve.placement import node_room
from afserve.placement.expert_memory import FLAG, places_within
from afserve.placement.kv_blocks import KvRoom
from afserve.placement.node_room import NODE_OVERHEAD
from afserve.settings import flag_of
from afserve.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class NodeWeights:
    """Of one node of each role; `host` of an attention node's tier in host memory, where weights lie there too, and
    `kernels` of what its attention takes beside weights and caches. `far`, of a node with experts on a GPU: what it has
    in the host's memory of all of them."""

    attention: int
    expert: int
    host: int = 0
    kernels: int = 0
    far: int = 0


def node_weights(
    spec: ModelSpec, source: ModelSource, wishes: Wishes, nodes: Share, slots: int
) -> NodeWeights:
    """Of one attention node and of the fullest expert node; of experts no more than --expert-memory."""
    kept = kept_dtype(spec, source, wishes)
    own, routed = attention_bytes(spec, source, wishes, kept), role_bytes(spec, source, kept)[1]
    own += numbers_beside(wishes.engine.drafts()) * element_bytes(source, spec)
    most = wishes.engine.expert_memory_bytes or routed * slots
    host = wishes.engine.kv_host_bytes if "cpu" in wishes.attention_on else 0
    beside = host, kernel_bytes(spec, source, wishes)
    if not nodes.experts:
        return NodeWeights(own + min(most, routed), 0, *beside)
    return NodeWeights(own, min(most, slots * routed // spec.experts), *beside)


def with_far_experts(
    weights: NodeWeights,
    spec: ModelSpec,
    source: ModelSource,
    wishes: Wishes,
    nodes: Share,
    slots: int,
    host: Machine,
    picked: dict[str, str],
) -> NodeWeights:
    """What --expert-memory means: on GPUs all experts lie in the host as it is, if they have room there, else on the
    disk. Raises ConfigError."""
    asked = wishes.engine.expert_memory_bytes
    if not asked:
        return weights
    routed = role_bytes(spec, source, kept_dtype(spec, source, wishes))[1]
    places = places_within(asked, spec, slots, max(1, routed // (spec.moe_layers * spec.experts)))
    if places is None:
        picked["expert memory"] = f"all {slots} experts of each layer fit"
        return weights
    on_gpu = wishes.experts_on != "cpu"
    if on_gpu and nodes.experts:
        weights = replace(weights, expert=weights.expert + scratch.PASSES)
    elif on_gpu:
        weights = replace(weights, attention=weights.attention + scratch.PASSES)
    for name in ("step_graphs", "device_exchange"):
        if getattr(wishes.engine, name):
            told = (
                f"with {FLAG} a host has a part in every layer; leave out one, or give memory for all experts"
            )
            raise ConfigError(f"{flag_of(name)}: {told}", param=name)
    far = replace(weights, far=slots * routed // spec.experts)
    taken, shares = _of_host(wishes, far, wishes.engine.kv_host_bytes), wishes.hosts or (nodes,)
    if on_gpu and (
        unknown := [s.place for s in shares if s.place and not s.memory and (s.experts or not nodes.experts)]
    ):
        raise ConfigError(
            f"{FLAG}: experts lie in the memory of their host, and nobody says how much {unknown[0]} has; write "
            "host_memory_gb = N for it in the cluster file, 10^9 bytes",
            param="expert_memory",
        )
    in_host = on_gpu and all(left_by(host, share, taken) >= 0 for share in shares)
    others = (
        f"all lie in {gib(far.far)} of the host" if in_host else "the others are read when they are needed"
    )
    picked["expert memory"] = f"{places} of {slots} experts of each layer at a time, {others}"
    return far if in_host else weights


def memory_of(machine: Machine, share: Share) -> Machine:
    """This machine, or one with what is said of where these nodes are."""
    if not share.memory:
        return machine
    size, place = share.memory, share.place or machine.limited_by
    return replace(
        machine, memory=size, memory_total=size if share.place else machine.memory_total, limited_by=place
    )


def smallest(machine: Machine, wishes: Wishes) -> Machine:
    """The least memory that nodes are to have: of a cluster file's hosts, or of the GPUs here."""
    if wishes.memories:
        return min((memory_of(machine, share) for share in wishes.memories), key=lambda found: found.memory)
    if wishes.gpus is None:
        return machine
    free, total = min(wishes.gpus.free), min(wishes.gpus.total)
    return replace(machine, memory=free, memory_total=total, limited_by="GPU memory")


def left_by(machine: Machine, share: Share, weights: NodeWeights) -> int:
    """What nodes leave on a host for KV caches. Below zero where they do not fit."""
    host = 0 if share.device == "cuda" else weights.host
    taken = share.attention * (weights.attention + host + weights.kernels) + share.experts * weights.expert
    return int(node_room.left_by(float(memory_of(machine, share).memory), taken, share.total))


def room_of_one(machine: Machine, share: Share, weights: NodeWeights) -> int:
    """Of one attention node."""
    return left_by(machine, share, weights) // share.attention


def check_processes(machine: Machine, shares: tuple[Share, ...]) -> None:
    """Raises DoesNotFitError where this machine's nodes are too many, whatever the model is."""
    most = usable(machine) // NODE_OVERHEAD
    nodes = max((share.total for share in shares if share.here), default=0)
    if nodes > max(2, most):
        raise DoesNotFitError(
            f"{nodes} nodes on this machine: each takes {gib(NODE_OVERHEAD)} for its process alone, and "
            f"{gib(machine.memory)} are free; at most {most} fit"
        )


def check_host_kv(wishes: Wishes, nodes: Share, host: Machine, weights: NodeWeights, kv: int) -> None:
    """Whether the tiers of KV in host memory (--kv-host) fit beside everything else. `host` as it is, also where nodes
    run on its GPUs; `kv` is the least that each node's KV cache takes. Nodes of other hosts see for themselves. Raises
    DoesNotFitError, which says how much fits."""
    asked = wishes.engine.kv_host_bytes
    for share, most in _host_rooms(wishes, nodes, host, weights, kv) if asked else ():
        if asked > most:
            many = (
                f"each of {share.attention} attention nodes" if share.attention > 1 else "the attention node"
            )
            raise DoesNotFitError(
                f"--kv-host {wishes.engine.kv_host}: {gib(asked)} for {many} of a host with {gib(host.memory)} free; "
                + (f"at most {most >> 20}MiB fit" if most >> 20 else "nothing fits beside what else is there")
            )


def with_far_rows(
    room: KvRoom,
    spec: ModelSpec,
    source: ModelSource,
    wishes: Wishes,
    nodes: Share,
    host: Machine,
    weights: NodeWeights,
    picked: dict[str, str],
) -> KvRoom:
    """Of nodes that keep some rows of each layer near (--kv-near-rows): on GPUs the others lie in the host as it is,
    and no more tokens are kept than have room there; CPUs have one memory for both. Raises ConfigError."""
    if not wishes.engine.kv_near_rows:
        return room
    check_near_rows(spec, wishes.engine)
    row = spec.far_bytes_per_token(kv_element_bytes(source, spec, wishes.engine.kv_dtype))
    whole = room.whole + 4 * spec.far_layers * room.block  # where each row is near
    near, kept = wishes.engine.kv_near_rows * row, whole // room.block - row
    picked["kv-near-rows"] = (
        f"{wishes.engine.kv_near_rows:,} rows of each layer near, {near / (1 << 20):,.1f} MiB; "
        f"a token takes {kept:,} bytes beside, and {row:,} in the host"
    )
    if wishes.engine.device == "cpu":
        return replace(room, whole=whole, fixed=near)
    far, taken = row * room.block, wishes.engine.kv_host_bytes
    left = min((most for _, most in _host_rooms(wishes, nodes, host, weights, 0)), default=None)
    most = room.most_blocks if left is None else max(0, left - taken) // far
    return replace(room, whole=whole - far, fixed=near, most_blocks=most)


def _host_rooms(
    wishes: Wishes, nodes: Share, host: Machine, weights: NodeWeights, kv: int
) -> Iterator[tuple[Share, int]]:
    """What this host has for each attention node of a share of nodes, beside everything else."""
    own = kv if wishes.engine.device == "cpu" else 0
    for share in wishes.hosts or (nodes,):
        if share.here and share.attention:
            yield share, max(0, left_by(host, share, _of_host(wishes, weights, own))) // share.attention


def _of_host(wishes: Wishes, weights: NodeWeights, kv: int) -> NodeWeights:
    """What nodes take of the host's own memory, KV of an attention node among it."""
    kv += weights.attention if wishes.engine.device == "cpu" else 0 if weights.expert else weights.far
    return NodeWeights(kv, weights.expert if wishes.experts_on == "cpu" else weights.far)
