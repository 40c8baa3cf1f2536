"""Decides how a model runs on this machine: node counts, micro-batches, threads, KV size. Values in, values out.

It keeps what the user fixed, chooses the rest, and gives a reason for every choice. It raises DoesNotFitError with what
is needed by role and what there is; `ways_on` says what to do then. All sizes are bytes.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from afserve.comm.binding import Binding, seat
from afserve.config import MAX_MICRO_BATCHES, EngineConfig, EngineSettings, ModelSource
from afserve.control.membership.balancing import BalanceRules
from afserve.control.wire.desired import Deployment, shortest_silence
from afserve.errors import ConfigError, DoesNotFitError
from afserve.launch.plan.bits import check_bits
from afserve.launch.plan.cores import micro_batches_of, shares_cores, threads_of
from afserve.launch.plan.counts import counts_of
from afserve.launch.plan.devices import batch_tokens, check_devices, kept_shapes, of_kinds
from afserve.launch.plan.drafting import bytes_beside, decided
from afserve.launch.plan.expert_slots import ExpertSlots, first_placement, spare_for_recovery, without_spare
from afserve.launch.plan.footprint import gib, kept_dtype, kv_element_bytes, needs, role_bytes
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.node_memory import (
    NodeWeights,
    check_host_kv,
    check_processes,
    left_by,
    memory_of,
    node_weights,
    room_of_one,
    smallest,
    with_far_experts,
    with_far_rows,
)
from afserve.launch.plan.numa import dealt, seats_for
from afserve.launch.plan.wishes import Share, Wishes
from afserve.member import MODEL_ROLES, MOST_NODES, NodeId, Role, expert_node
from afserve.placement.kv_blocks import KvRoom, block_size, gpu_block, kv_room
from afserve.placement.node_room import KV_SHARE, NODE_OVERHEAD, kv_bytes
from afserve.settings import in_range
from afserve.spec import ModelSpec

_SPARE_SHARE = 0.25  # of what weights leave: the most that spare expert slots take, unless the user says
_SEQUENCES = 256
_KV_SEQUENCES = 64  # of full length, or as many as run at once; shorter ones leave room for more
_ATTENTION_HEADROOM = 2  # times as many attention nodes as at first: mailboxes nobody writes take no memory
_LEAST_MOST_ATTENTION = 8


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one node of a role: `host` are those of its tier of KV in host memory, where that is the node's own, and
    `kernels` what its attention takes beside weights and caches."""

    weights: int
    kv: int = 0
    host: int = 0
    kernels: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.host + self.kernels + NODE_OVERHEAD


@dataclass(frozen=True, slots=True)
class Topology:
    """What will run, with the memory of one node by role and the reasons for what was chosen.

    `seats` are the NUMA nodes that nodes are bound to; then `expert_hosts` are those, as replicas are to stand apart.
    """

    deployment: Deployment
    spec: ModelSpec
    attention: Need
    expert: Need | None
    picked: dict[str, str] = field(default_factory=dict)
    slots: ExpertSlots = field(default_factory=ExpertSlots)
    copies: int = 1
    expert_hosts: tuple[int, ...] = ()
    seats: tuple[Binding, ...] = ()

    def binding(self, node: NodeId) -> Binding | None:
        """Of a node that starts on this machine; None where it may run anywhere."""
        return self.seats[seat(node, len(self.seats))] if self.seats and node.role in MODEL_ROLES else None

    @property
    def takes(self) -> dict[Role, int]:
        """Bytes of a node by role, without what a GPU's node keeps in its host."""
        expert = {} if self.expert is None else {Role.EXPERT: self.expert.total}
        return {Role.ATTENTION: self.attention.total - self.attention.host} | expert

    def keeping(self, rules: BalanceRules) -> BalanceRules:
        """The same rules for whoever balances, with the copies, hosts and spare slots of this run."""
        return replace(rules, copies=self.copies, spare=self.slots.spare, hosts=self.expert_hosts)

    def with_transport(self, transport: str, reason: str) -> "Topology":
        """The same with rows carried so; a colocated run carries none. Raises ConfigError for what only symm can."""
        if self.deployment.colocated:
            return self
        if self.deployment.engine.device_exchange and transport != "symm":
            raise ConfigError(
                f"--device-exchange: is for GPUs of one host, over --transport symm; here rows go over {transport} "
                f"({reason})"
            )
        picked = {**self.picked, "transport": f"{transport}, {reason}"}
        return replace(self, deployment=replace(self.deployment, transport=transport), picked=picked)

    def verified(self, verify: str) -> "Topology":
        return replace(self, deployment=replace(self.deployment, verify=verify))

    def traced(self, folder: str, *, sent: bool) -> "Topology":
        """The same with every node's part of a trace written there; `sent` by nodes that may be on other hosts."""
        return replace(self, deployment=replace(self.deployment, trace_folder=folder, trace_sent=sent))

    def told(self, level: str, form: str, endpoint: str) -> "Topology":
        """The same with nodes that log so, and send spans to this collector."""
        logging = replace(self.deployment, log_level=level, log_format=form, otlp_endpoint=endpoint)
        return replace(self, deployment=logging)

    @property
    def kv_tokens_of_node(self) -> int:
        engine = self.deployment.engine
        return engine.kv_blocks * engine.block_size


def choose(spec: ModelSpec, source: ModelSource, machine: Machine, wishes: Wishes) -> Topology:
    """Everything that `afserve up` starts."""
    picked: dict[str, str] = {}
    seats = seats_for(machine, wishes, picked)
    nodes, host = counts_of(spec, machine, wishes, len(seats), picked), machine
    seats = dealt(seats, nodes, wishes, picked)
    if seats:
        wishes = replace(
            wishes, expert_hosts=tuple(seat(expert_node(n), len(seats)) for n in range(nodes.experts))
        )
    _check_colocated(wishes, nodes)
    check_bits(spec, source, wishes)
    check_devices(spec, wishes, nodes, picked)
    wishes = of_kinds(spec, wishes, picked)
    if wishes.gpus is not None and not wishes.memories:
        machine = smallest(machine, wishes)  # each GPU is shared as a host would be
        if nodes.total > (gpus := len(wishes.gpus)):
            picked["devices"] = f"{nodes.total} nodes on {gpus} GPU{'s' * (gpus > 1)}, which they share"
    micro_batches = micro_batches_of(wishes, nodes, picked)
    threads = threads_of(machine, wishes, nodes, seats, picked)
    shares = not seats and shares_cores(machine, wishes, nodes, threads, picked)
    slots = _slots(spec, source, machine, wishes, nodes, picked)
    weights = node_weights(spec, source, wishes, nodes, slots.total)
    held = slots.total if nodes.experts else spec.experts
    weights = with_far_experts(weights, spec, source, wishes, nodes, held, host, picked)
    room = with_far_rows(_room(spec, source, wishes), spec, source, wishes, nodes, host, weights, picked)
    block = room.block
    least = wishes.kv_tokens or int(max(block, wishes.max_model_len or 0) / KV_SHARE)
    check_host_kv(wishes, nodes, host, weights, room.bytes_of(least))
    kv_tokens, longest = _kv(spec, source, machine, wishes, nodes, weights, room, picked)
    own = {"block_size": block, "share_cores": shares, "draft": decided(wishes.engine, spec, picked)}
    own["max_batch_tokens"] = batch_tokens(wishes, micro_batches, picked)
    engine = EngineConfig(
        max_model_len=longest,
        kv_blocks=kv_tokens // block,
        window_blocks=room.window_blocks(kv_tokens // block),
        max_sequences=wishes.batch or _SEQUENCES,
        micro_batches=micro_batches or MAX_MICRO_BATCHES,
        adaptive=micro_batches is None,
        threads=threads,
        numa_nodes=max(1, len(seats)),
        experts_in_host=weights.far > 0,
        **(asdict(wishes.engine) | own),
    )
    placement = first_placement(spec.moe_layers, spec.experts, nodes.experts, slots, wishes)
    _only_of_phases(wishes, picked)
    counts = {Role.ATTENTION: nodes.attention, Role.EXPERT: nodes.experts, Role.GATEWAY: wishes.gateways}
    deployment = Deployment(
        source,
        engine,
        counts,
        spec.fingerprint(),
        placement,
        silence=_silence(wishes, counts, picked),
        most_attention=_most_attention(wishes, nodes),
        phases=wishes.phases,
    )
    expert = Need(weights.expert) if nodes.experts else None
    need = Need(weights.attention, room.bytes_of(kv_tokens), weights.host, weights.kernels)
    copies, hosts = wishes.expert_copies, wishes.expert_hosts
    return Topology(deployment, spec, need, expert, picked, slots, copies, hosts, seats)


def _only_of_phases(wishes: Wishes, picked: dict[str, str]) -> None:
    """Says what a value does not change before a node has a phase, as nodes may be given one while they serve."""
    usual = EngineSettings()
    for name in ("prefill_tokens", "decode_prompt_tokens"):
        value = getattr(wishes.engine, name)
        if value != getattr(usual, name) and not wishes.phases:
            phase = "prefill" if name == "prefill_tokens" else "decode"
            picked[name.replace("_", "-")] = (
                f"{value}, of no node yet: for nodes of phase {phase}, as from --{phase} or `afserve scale --phase`"
            )


def _silence(wishes: Wishes, counts: Mapping[Role, int], picked: dict[str, str]) -> float:
    nodes = sum(counts.values())
    shortest = shortest_silence(nodes)
    if shortest <= wishes.silence:
        return wishes.silence
    picked["silence"] = f"{shortest:.1f} s, for the heartbeats of {nodes:,} nodes"
    return shortest


def _most_attention(wishes: Wishes, nodes: Share) -> int:
    """Mailboxes in a GPU's memory take their bytes at once, so there are no more than are asked for."""
    if wishes.most_attention is not None:
        in_range("--most-attention", wishes.most_attention, nodes.attention, MOST_NODES)
        return wishes.most_attention
    if wishes.engine.device != "cpu":
        return nodes.attention
    return min(MOST_NODES, max(_LEAST_MOST_ATTENTION, _ATTENTION_HEADROOM * nodes.attention))


def _check_colocated(wishes: Wishes, nodes: Share) -> None:
    """What is asked of expert nodes that are not there."""
    if wishes.engine.wire_dtype == "fp8" and not nodes.experts:
        raise ConfigError("--wire-dtype fp8: a colocated run sends no rows; drop it, or give --experts")
    if wishes.engine.prompt_share != EngineSettings().prompt_share and not nodes.experts:
        raise ConfigError(
            "--prompt-share: expert nodes share their time so, a colocated run has none; drop it, or give --experts"
        )


def _room(spec: ModelSpec, source: ModelSource, wishes: Wishes) -> KvRoom:
    """What KV takes on an attention node."""
    element, sequences = kv_element_bytes(source, spec, wishes.engine.kv_dtype), wishes.batch or _SEQUENCES
    step = max(sequences, batch_tokens(wishes, 1, {}), wishes.engine.prefill_tokens)
    step += wishes.engine.decode_prompt_tokens
    beside = bytes_beside(wishes.engine.drafts(), spec, element)
    asked = wishes.engine.block_size or gpu_block(spec, wishes.attention_on)
    block = block_size(spec, element, asked, wishes.kv_tokens)
    return kv_room(spec, element, block, sequences, step, beside, kept_shapes(spec, wishes))


def _slots(
    spec: ModelSpec,
    source: ModelSource,
    machine: Machine,
    wishes: Wishes,
    nodes: Share,
    picked: dict[str, str],
) -> ExpertSlots:
    """Physical slots of an expert node per layer: for placements, one to move through, and spare ones."""
    slots = without_spare(spec.experts, nodes.experts, wishes)
    affordable = _affordable(spec, source, machine, wishes, nodes, slots) if nodes.experts else 0
    slots = replace(slots, spare=spare_for_recovery(spec.experts, nodes.experts, slots, wishes, affordable))
    if slots.moving:
        picked["expert slots"] = f"{slots.used} per node and layer, and one to move through"
    if slots.spare and wishes.spare_slots is None:
        picked["spare slots"] = f"{slots.spare} per node and layer, for the experts of a lost node"
    return slots


def _affordable(
    spec: ModelSpec, source: ModelSource, machine: Machine, wishes: Wishes, nodes: Share, slots: ExpertSlots
) -> int:
    """Slots of every expert node that a part of the memory holds which weights, and KV of a fixed size, leave."""
    weights = node_weights(spec, source, wishes, nodes, slots.total)
    one = role_bytes(spec, source, kept_dtype(spec, source, wishes))[1] // spec.experts
    kv = _room(spec, source, wishes).bytes_of(wishes.kv_tokens or 0)
    free = [
        (left_by(machine, share, weights) - share.attention * kv) / share.experts
        for share in wishes.memory_shares(nodes)
        if share.experts
    ]
    return max(0, int(min(free) * _SPARE_SHARE / one))


def _kv(
    spec: ModelSpec,
    source: ModelSource,
    machine: Machine,
    wishes: Wishes,
    nodes: Share,
    weights: NodeWeights,
    kv: KvRoom,
    picked: dict[str, str],
) -> tuple[int, int]:
    """(KV tokens of one attention node, in whole blocks; longest sequence)."""
    block = kv.block
    if spec.state_bytes() and wishes.engine.block_size is None:
        picked["block-size"] = f"{block}, since each block holds {gib(spec.state_bytes())} of states"
    shares = wishes.memory_shares(nodes)
    room, tight = min(
        (int(kv_bytes(float(room_of_one(machine, share, weights)), own=wishes.owns(share))), number)
        for number, share in enumerate(shares)
        if share.attention
    )
    longest = spec.max_position if wishes.max_model_len is None else wishes.max_model_len
    in_range("--max-model-len", longest, 2, spec.max_position)
    tokens = wishes.kv_tokens
    if tokens is None:
        tokens = min(kv.tokens_in(room), max(block, max(_KV_SEQUENCES, wishes.batch or 0) * longest))
        free = gib(memory_of(machine, shares[tight]).memory)
        picked["kv-tokens"] = f"{tokens} per attention node, {gib(kv.bytes_of(tokens))} of {free} free"
    if tokens < block and wishes.kv_tokens is not None:
        raise ConfigError(f"--kv-tokens: {tokens} is less than a block of {block} tokens")
    tokens = tokens // block * block
    used = kv.bytes_of(max(0, tokens))
    known = [share for share in shares if share.here or share.place] or shares
    fullest = min(known, key=lambda share: left_by(machine, share, weights) - share.attention * used)
    there = memory_of(machine, fullest)
    full = (fullest.here or fullest.place) and left_by(machine, fullest, weights) < fullest.attention * used
    full = full or tokens // block > kv.most_blocks
    left = min((room_of_one(machine, s, weights) for s in known if s.attention), default=used)
    most = kv.tokens_in(left)
    if full and wishes.kv_tokens is not None and block <= most:
        raise DoesNotFitError(
            f"--kv-tokens {wishes.kv_tokens}: {gib(used)} on each attention node, where weights leave {gib(left)} of "
            f"the {gib(there.memory)} that are free; at most {most} fit"
        )
    if tokens < block or full:
        check_processes(machine, shares)
        where = f"on {fullest.place}" if fullest.place else "on this machine"
        needed = needs(spec, source, there, wishes)
        raise DoesNotFitError(f"{source.name} does not fit {where}.\n{needed}", param="model")
    if wishes.max_model_len is None and longest > tokens:
        longest = tokens
        picked["max-model-len"] = (
            f"{longest}, all of one node's KV cache; the model allows {spec.max_position}"
        )
    if apart := kv.window_blocks(tokens // block):
        few, seen = len(spec.windowed_layers), spec.widest_window
        picked["windows"] = f"{few} layers that see {seen} tokens keep {apart * block} of these"
    if longest > tokens:
        raise ConfigError(
            f"--kv-tokens: {wishes.kv_tokens or tokens} is less than one sequence of --max-model-len {longest}"
        )
    return tokens, longest
