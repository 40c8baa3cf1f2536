"""Decides how a model runs on this machine: node counts, micro-batches, threads, KV size. Values in, values out.

What the user fixed is kept; the rest is chosen and every choice says why. Raises DoesNotFitError with what is
needed by role, what there is, and the ways on. Bytes throughout.
"""

from dataclasses import dataclass, field

from afserve.config import MAX_MICRO_BATCHES, EngineConfig, ModelSource, in_range
from afserve.control.values import Run
from afserve.errors import ConfigError, DoesNotFitError
from afserve.launch.machine import Machine
from afserve.placement.plan import Placement
from afserve.spec import BYTES, ModelSpec

GIB = 1 << 30
NODE_OVERHEAD = 256 << 20  # interpreter, torch, buffers: 210 to 240 MiB measured, without weights and KV
_BLOCK = 16
_SPARE = 0.10  # of the free memory, left to everything else on the machine
_KV_SHARE = 0.5  # of what weights leave, unless the user says
_KV_DEFAULT_MAX = 4 * GIB
_SEQUENCES = 256
_KV_SEQUENCES = 64  # of full length, by default; shorter ones leave room for more
_BATCH_TOKENS = 512
_MOST_NODES = 1024


@dataclass(frozen=True, slots=True)
class Share:
    """One host's nodes. What is not `here` is taken to be like this machine, and refuses for itself."""

    attention: int
    experts: int
    here: bool = True

    @property
    def total(self) -> int:
        return self.attention + self.experts


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user fixed; None is for us to choose. `micro_batches` may also be "auto".

    Without `hosts` all nodes are on this machine. `batch` is what an attention node decodes at once.
    """

    attention: int | None = None
    experts: int | None = None
    micro_batches: str = "auto"
    colocated: bool = False
    kv_tokens: int | None = None
    max_model_len: int | None = None
    threads: int | None = None
    device: str = "cpu"
    redundant_experts: int = 0
    rebalance: bool = False
    batch: int | None = None
    hosts: tuple[Share, ...] = ()

    def shares(self, nodes: Share) -> tuple[Share, ...]:
        return self.hosts or (nodes,)


@dataclass(frozen=True, slots=True)
class _Weights:
    """Bytes of one node of each role."""

    attention: int
    expert: int


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one node of a role."""

    weights: int
    kv: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + NODE_OVERHEAD


@dataclass(frozen=True, slots=True)
class Topology:
    """What will run, with the memory of one node by role and the reasons for what was chosen."""

    run: Run
    spec: ModelSpec
    attention: Need
    expert: Need | None
    picked: dict[str, str] = field(default_factory=dict)

    @property
    def kv_tokens(self) -> int:
        return self.run.engine.kv_blocks * self.run.engine.block_size


def choose(spec: ModelSpec, source: ModelSource, machine: Machine, wishes: Wishes) -> Topology:
    """Everything that `afserve up` starts."""
    picked: dict[str, str] = {}
    nodes = _counts(spec, machine, wishes, picked)
    micro_batches = _micro_batches(wishes, nodes, picked)
    threads = _threads(machine, wishes, nodes, picked)
    slots = _slots(spec, wishes, nodes, picked)
    weights = _weights(spec, source, nodes, slots)
    kv_tokens, longest = _kv(spec, source, machine, wishes, nodes, weights, picked)
    engine = EngineConfig(
        max_model_len=longest,
        kv_blocks=kv_tokens // _BLOCK,
        block_size=_BLOCK,
        max_sequences=wishes.batch or _SEQUENCES,
        max_batch_tokens=max(_BATCH_TOKENS, -(-(wishes.batch or 0) // (micro_batches or 1))),
        micro_batches=micro_batches or MAX_MICRO_BATCHES,
        adaptive=micro_batches is None,
        threads=threads,
        device=wishes.device,
    )
    placement = Placement.contiguous(
        layers=spec.moe_layers, experts=spec.experts, nodes=max(1, nodes.experts), slots_per_node=slots
    )
    run = Run(source, engine, nodes.attention, nodes.experts, spec.fingerprint(), placement.to_json())
    kv = kv_tokens * spec.kv_bytes_per_token(_element(source, spec))
    expert = Need(weights.expert) if nodes.experts else None
    return Topology(run, spec, Need(weights.attention, kv), expert, picked)


def _counts(spec: ModelSpec, machine: Machine, wishes: Wishes, picked: dict[str, str]) -> Share:
    if wishes.colocated and wishes.experts:
        raise ConfigError(
            "--colocated: the experts are in the attention nodes then; drop --experts", param="experts"
        )
    for key, value in (("attention", wishes.attention), ("experts", wishes.experts)):
        if value is not None:
            in_range(f"--{key}", value, 1, _MOST_NODES)
    attention = wishes.attention or max(1, min(machine.cores // 8, 4))
    if wishes.attention is None:
        picked["attention"] = f"{attention}, one per 8 of {_cores(machine)}"
    if wishes.colocated:
        return Share(attention, 0)
    experts = wishes.experts or max(1, min(machine.cores // 4, spec.experts, 8))
    if wishes.experts is None:
        picked["experts"] = f"{experts}, one per 4 of {_cores(machine)}"
    if experts > spec.experts:
        raise ConfigError(
            f"--experts: {experts} nodes, but the model has {spec.experts} experts", param="experts"
        )
    return Share(attention, experts)


def _micro_batches(wishes: Wishes, nodes: Share, picked: dict[str, str]) -> int | None:
    """None leaves it to each attention node, which measures."""
    text = wishes.micro_batches
    if text != "auto":
        if not text.isdigit():
            raise ConfigError(
                f"--micro-batches: {text!r} is neither a number nor auto", param="micro_batches"
            )
        in_range("--micro-batches", int(text), 1, MAX_MICRO_BATCHES)
        return int(text)
    if not nodes.experts:
        picked["micro-batches"] = "1, nothing to overlap in one process"
        return 1
    picked["micro-batches"] = f"1 to {MAX_MICRO_BATCHES}, by measured speed"
    return None


def _threads(machine: Machine, wishes: Wishes, nodes: Share, picked: dict[str, str]) -> int:
    if wishes.threads is not None:
        in_range("--threads", wishes.threads, 1, 1024)
        return wishes.threads
    most = max(share.total for share in wishes.shares(nodes))
    threads = max(1, machine.cores // most)
    picked["threads"] = f"{threads} per node, {_cores(machine)} for {most} node{'s' * (most > 1)}"
    return threads


def _element(source: ModelSource, spec: ModelSpec) -> int:
    """Bytes of one number once loaded; FP8 is computed in 16 bits."""
    return max(2, BYTES[spec.dtype if source.dtype == "auto" else source.dtype])


def _slots(spec: ModelSpec, wishes: Wishes, nodes: Share, picked: dict[str, str]) -> int:
    """Physical slots of an expert node per layer: experts, redundant ones, and one spare if placements may change."""
    redundant = wishes.redundant_experts
    in_range("--redundant-experts", redundant, 0, spec.experts * max(0, nodes.experts - 1))
    if wishes.rebalance and not nodes.experts:
        raise ConfigError("--rebalance: a colocated run has no expert nodes to balance", param="rebalance")
    used = -(-(spec.experts + redundant) // max(1, nodes.experts))
    if not wishes.rebalance:
        return used
    picked["expert slots"] = f"{used} per node and layer, and one spare to move through"
    return used + 1


def _weights(spec: ModelSpec, source: ModelSource, nodes: Share, slots: int) -> _Weights:
    """Of one attention node and of the fullest expert node."""
    own, routed = _role_bytes(spec, source)
    if not nodes.experts:
        return _Weights(own + routed, 0)
    return _Weights(own, slots * routed // spec.experts)


def _kv(
    spec: ModelSpec,
    source: ModelSource,
    machine: Machine,
    wishes: Wishes,
    nodes: Share,
    weights: _Weights,
    picked: dict[str, str],
) -> tuple[int, int]:
    """(KV tokens of one attention node, in whole blocks; longest sequence)."""
    per_token = spec.kv_bytes_per_token(_element(source, spec))
    shares = wishes.shares(nodes)
    room = min(_room(machine, share, weights) for share in shares if share.attention)
    longest = spec.max_position if wishes.max_model_len is None else wishes.max_model_len
    in_range("--max-model-len", longest, 2, spec.max_position)
    tokens = wishes.kv_tokens
    if tokens is None:
        most = min(int(room * _KV_SHARE), _KV_DEFAULT_MAX) // per_token
        tokens = min(most, _KV_SEQUENCES * longest)
        picked["kv-tokens"] = (
            f"{tokens} per attention node, {gib(tokens * per_token)} of {gib(machine.memory)} free"
        )
    tokens = tokens // _BLOCK * _BLOCK
    used = max(0, tokens) * per_token
    full = any(s.here and s.attention * used > _free(machine, s, weights) for s in shares)
    if tokens < _BLOCK or full:
        raise DoesNotFitError(f"{source.name} does not fit on this machine.\n{needs(spec, source, machine)}")
    if wishes.max_model_len is None and longest > tokens:
        longest = tokens
        picked["max-model-len"] = (
            f"{longest}, all of one node's KV cache; the model allows {spec.max_position}"
        )
    if longest > tokens:
        raise ConfigError(f"--kv-tokens: {tokens} is less than one sequence of --max-model-len {longest}")
    return tokens, longest


def _free(machine: Machine, share: Share, weights: _Weights) -> int:
    """Bytes that weights and processes leave on a host, for KV caches. Below zero where they do not fit."""
    taken = share.attention * weights.attention + share.experts * weights.expert
    return usable(machine) - taken - share.total * NODE_OVERHEAD


def _room(machine: Machine, share: Share, weights: _Weights) -> int:
    """Of one attention node."""
    return _free(machine, share, weights) // share.attention


def needs(spec: ModelSpec, source: ModelSource, machine: Machine) -> str:
    """What a model needs by role, what there is, and the three ways on."""
    own, routed = _role_bytes(spec, source)
    kv = spec.kv_bytes_per_token(_element(source, spec)) * 1000
    machines = -(-routed // max(1, usable(machine) - NODE_OVERHEAD))
    limited = f" ({machine.limited_by})" if machine.limited_by else ""
    return f"""\
  weights   {gib(own)} on each attention node, {gib(routed)} over all expert nodes ({spec.moe_layers} MoE layers)
  KV cache  {gib(kv)} per 1,000 tokens, on attention nodes
  here      {gib(machine.memory)} free of {gib(machine.memory_total)}{limited}
            (the experts alone would fill {machines:,} such machine{"s" * (machines > 1)})
Three ways on:
  afserve up     the bundled nano, the same architecture at a size that fits anywhere
  afserve up --model {source.name} --load-format dummy --layers N     {_cut_hint(spec, source, machine)}
  afserve plan --model {source.name}     what to buy, how to split it, what it costs"""


def _cut_hint(spec: ModelSpec, source: ModelSource, machine: Machine) -> str:
    """How many layers of it would fit here, with one node of each role."""
    least = spec.moe_layer_ids[0] + 1
    room = usable(machine) - 2 * NODE_OVERHEAD
    fits = [n for n in range(least, spec.layers + 1) if sum(_role_bytes(spec.cut(n), source)) < room]
    if fits:
        return f"random weights; N = {least} to {fits[-1]} fits here"
    return f"random weights; its first {least} layers need {gib(sum(_role_bytes(spec.cut(least), source)))}"


def _role_bytes(spec: ModelSpec, source: ModelSource) -> tuple[int, int]:
    """Weights of one attention node and of all expert nodes together."""
    size = _element(source, spec)
    return spec.attention_parameters() * size, spec.routed_parameters() * size


def usable(machine: Machine) -> int:
    return int(machine.memory * (1 - _SPARE))


def gib(size: float) -> str:
    """Three significant digits, never an exponent."""
    value = size / GIB
    return f"{value:,.0f} GiB" if value >= 100 else f"{value:.3g} GiB"


def _cores(machine: Machine) -> str:
    return f"{machine.cores} core{'s' * (machine.cores > 1)}"
