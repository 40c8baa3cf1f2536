"""From a model source and a configuration to a working attention node or expert bank.

The only place of the engine that reads checkpoint folders. Each role asks only for its own tensors.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from afserve.comm.m2n.bank import LocalBankLink, LocalTicket, NoBank
from afserve.comm.m2n.link_contract import Link
from afserve.comm.transport import Layout, WireType
from afserve.config import EngineConfig, ModelSource
from afserve.digest_cache import DigestCache, user_folder
from afserve.drafts import NO_DRAFTS, DraftChoice
from afserve.engine.attention_node import AttentionNode
from afserve.engine.draft.draft_model import DraftModel
from afserve.engine.kv.groups import KvGroup, groups_of
from afserve.engine.scheduling.guides import Guides
from afserve.engine.step.runner import T
from afserve.engine.warm import compiled_first, warm_attention
from afserve.errors import ConfigError
from afserve.families.device_shares import check_split
from afserve.families.drafters.dense import draft_model_naming, draft_model_spec
from afserve.families.near_rows import check_near_rows
from afserve.families.table import naming_of, served_spec
from afserve.grammars.grammar import Compiler
from afserve.kernels.devices.device import Device
from afserve.kernels.devices.opened import device_of
from afserve.kernels.ops import Ops, open_ops
from afserve.models.decoder import AttentionModel
from afserve.models.devices.several import Devices, Joint
from afserve.models.drafters.opened import open_draft_head
from afserve.models.experts import ExpertBank
from afserve.models.gguf.checkpoint import GgufCheckpoint
from afserve.models.identity import identify, weights_of
from afserve.models.layers_beyond import check_no_more_layers
from afserve.models.tables.bank import TabledBank
from afserve.models.tables.rows import TableRows
from afserve.models.tier.ahead import load_routers
from afserve.models.tier.bank import TieredBank
from afserve.models.tier.device_places import DevicePlaces
from afserve.models.tier.host_copies import HostCopies
from afserve.models.tier.host_places import HostPlaces
from afserve.models.unread import told_unread
from afserve.models.vision.encoder import load_encoder
from afserve.models.weights import Checkpoint, DummyCheckpoint, StoredTensors, TensorSource
from afserve.spec import ModelSpec
from afserve.tokens.tokenizer import eos_ids
from afserve.tracing.trace import Trace

Progress = Callable[[float], None]
Held = Iterable[tuple[int, int, int]]
AnyBank = ExpertBank | TieredBank | TabledBank
_WIRE = {torch.float32: WireType.FLOAT32, torch.bfloat16: WireType.BFLOAT16, torch.float16: WireType.FLOAT16}


def silent(done: float) -> None:
    """A progress callback that shows nothing."""


def spec_of(source: ModelSource, draft: DraftChoice = NO_DRAFTS) -> ModelSpec:
    """What nodes load that are told to `draft` so; all of a run are told alike."""
    return served_spec(source, draft)


def dtype_of(source: ModelSource, spec: ModelSpec) -> torch.dtype:
    """What the engine computes in. FP8 checkpoints are computed in bfloat16."""
    name = spec.dtype if source.dtype == "auto" else source.dtype
    return {"float32": torch.float32, "float16": torch.float16}.get(name, torch.bfloat16)


def tensors_of(
    source: ModelSource, spec: ModelSpec, device: torch.device, *, past_cache: bool = False
) -> TensorSource:
    """Raises CheckpointError. `past_cache`: what is read is not kept by the system."""
    if source.load_format == "dummy":
        in_blocks = spec.coverage if spec.in_fp8_blocks else None
        return DummyCheckpoint(source.seed, device=device, in_blocks=in_blocks)
    folder, naming = Path(source.path), naming_of(spec)
    made: StoredTensors
    if spec.quantization is not None and spec.quantization.gguf:
        made = GgufCheckpoint(folder, spec, naming, device, past_cache)
    else:
        made = Checkpoint(folder, spec.fp8_block, device, spec.quantization, spec.coverage, past_cache)
    check_no_more_layers(folder, made.names, spec.layers, naming)
    return made


def layout_for(source: ModelSource, spec: ModelSpec, config: EngineConfig, slots: int) -> Layout:
    """What attention and expert nodes allocate mailboxes for. Rows travel as `wire_dtype` says.

    Partial sums travel in float32, unrounded: tokens do not depend on the placement. Raises ConfigError where the model
    cannot do what `config` asks for.
    """
    fp8, exchange = config.wire_dtype == "fp8", 0
    if config.device_exchange:
        if spec.table is not None:
            raise ConfigError(
                "device_exchange: this model looks rows of a table up, which a host does; leave --device-exchange out",
                param="device_exchange",
            )
        exchange = spec.moe_layers - spec.routed_predictors
    return Layout(
        hidden=spec.expert_width,
        top_k=spec.top_k,
        max_rows=config.most_rows,
        micro_batches=config.micro_batches * (1 if spec.table is None else 2),  # some for rows ahead
        layers=spec.asked_layers,
        slots=slots,
        dispatch_wire=WireType.FLOAT8 if fp8 else _WIRE[dtype_of(source, spec)],
        combine_wire=WireType.FLOAT32,
        exchange=exchange,
    )


def build_attention_node(
    source: ModelSource,
    config: EngineConfig,
    link: Link[T],
    progress: Progress = silent,
    ops: Ops | None = None,
    trace: Trace | None = None,
    weights: str = "",
    groups: Sequence[KvGroup] = (),
    expert_error: float | None = None,
    devices: Devices | None = None,
    warm: bool = False,
) -> AttentionNode[T]:
    """Reads attention, router, shared-expert, embedding and head tensors. Raises CheckpointError.

    `weights` names the numbers of the whole checkpoint, as all nodes of a run agreed on them; without it the node names
    those that it reads itself, by samples. `groups` are those of the layers' KV, if not what `config` says.
    `expert_error`: relative, of expert weights that were rounded for this node. `devices`: the node's, if not what
    `config` says. `warm`: all kernels are launched once, so that a device has compiled them.
    """
    spec = spec_of(source, config.drafts())
    ops = ops or open_ops(config.device, config.threads, config.gpu_kernels, config.isa)
    check_near_rows(spec, config)
    tensors, naming, drafts = tensors_of(source, spec, ops.device), naming_of(spec), config.drafts()
    if devices is None and config.tensor_parallel > 1:
        devices = open_devices(source, spec, config, ops)
    model = AttentionModel(
        spec,
        tensors,
        naming,
        ops,
        dtype_of(source, spec),
        config.max_model_len,
        progress,
        config.dense_dtype,
        config.lm_head,
        None if devices is None else devices.loading(split_head=not drafts.head),
    )
    if drafts.head:
        model.head = open_draft_head(drafts, model)
    if spec.encoder is not None:
        model.encoder = load_encoder(spec.encoder, spec.hidden, tensors.tensor, model.dtype, ops.device)
    weights = weights or attention_weights(source)
    eos = eos_ids(source.path)
    guides = Guides(Compiler(source.path, spec.vocab_size, eos))
    node = AttentionNode(
        model,
        link,
        config,
        frozenset(eos),
        trace=trace,
        weights=weights,
        guides=guides,
        groups=groups or groups_of(spec, len(model.keeps), config),
        draft_model=build_draft_model(drafts.model, model, config) if drafts.model else None,
    )
    if warm:
        compiled_first(ops, partial(warm_attention, model, node.kv, config))
    node.expert_error, node.dense_error = expert_error, model.rounding_error
    if isinstance(tensors, StoredTensors):
        node.unread = told_unread(tensors, spec.layers, naming)
    return node


def open_devices(
    source: ModelSource, spec: ModelSpec, config: EngineConfig, ops: Ops, joint: Joint | None = None
) -> Devices:
    """As many as `config` says: GPUs that follow the node's own by number, or one CPU in the place of all. Raises
    ConfigError where the model cannot be split over so many."""
    count = config.tensor_parallel
    check_split(spec, count)
    if ops.device.type == "cpu":
        return Devices(ops, [ops] * (count - 1), joint)
    numbers = range((ops.device.index or 0) + 1, (ops.device.index or 0) + count)
    with device_of(ops.device).as_current():  # which another one that is opened becomes
        opened = [open_ops(f"{ops.device.type}:{n}", config.threads, config.gpu_kernels) for n in numbers]
    return Devices(ops, opened, joint)


def build_draft_model(folder: str, target: AttentionModel, config: EngineConfig) -> DraftModel:
    """A small model that guesses for `target`, with all its experts, if it has any. Raises CheckpointError, or
    ConfigError for one that cannot."""
    spec, ops, dtype = draft_model_spec(folder), target.ops, target.dtype
    naming, longest = draft_model_naming(spec), min(config.max_model_len, spec.max_position)
    tensors = Checkpoint(Path(folder), spec.fp8_block, ops.device, coverage=spec.coverage)
    check_no_more_layers(Path(folder), tensors.names, spec.layers, naming)
    kept = config.dense_dtype, config.lm_head
    model = AttentionModel(spec, tensors, naming, ops, dtype, longest, lambda done: None, *kept)
    if not spec.moe_layers:
        return DraftModel(model, NoBank(), config)
    bank = ExpertBank(spec, spec.experts, ops, tensors, naming, dtype, config.expert_dtype)
    bank.load([(layer, e, e) for layer in range(spec.moe_layers) for e in range(spec.experts)], silent)
    return DraftModel(model, bank, config)


def attention_weights(source: ModelSource) -> str:
    """Equal wherever an attention node would load the same numbers. Raises CheckpointError."""
    return identify(source, ("attention",), DigestCache(user_folder()))[weights_of("attention")]


def build_expert_bank(
    source: ModelSource,
    held: Held,
    slots: int,
    *,
    threads: int = 1,
    device: str = "cpu",
    expert_dtype: str = "auto",
    progress: Progress = silent,
    ops: Ops | None = None,
    recheck: Callable[[], bool] | None = None,
    memory: int = 0,
    in_host: bool = False,
    draft: DraftChoice = NO_DRAFTS,
) -> AnyBank:
    """Reads the routed experts of `held` (MoE layer number, slot, expert), kept as `expert_dtype` says. Raises
    CheckpointError, or ConfigError where the kernels cannot keep them so. `recheck`: see `Checkpoint.check_changes`.
    `memory`: bytes; of experts that need more, those that were used lately are in memory, a device's where it computes;
    `in_host`: all of them are in the host's then."""
    spec = spec_of(source, draft)
    ops = ops or open_ops(device, threads)
    tensors = tensors_of(source, spec, ops.device, past_cache=memory > 0)
    if recheck is not None and isinstance(tensors, StoredTensors):
        tensors.check_changes(recheck)
    naming, dtype, place = naming_of(spec), dtype_of(source, spec), device_of(ops.device)
    whole = ExpertBank(spec, slots, ops, tensors, naming, dtype, expert_dtype, memory, place.later)
    bank: AnyBank = whole
    if whole.places is not None:
        bank = TieredBank(places_of(whole, place, in_host), load_routers(spec, tensors, naming, dtype, ops))
    if spec.table is not None:
        rows = TableRows(spec.table, tensors, naming)
        bank = TabledBank(bank, rows, spec.look_up_layer, spec.experts)
    bank.load(list(held), progress)
    return bank


def places_of(bank: ExpertBank, device: Device, in_host: bool) -> HostPlaces | DevicePlaces:
    """Of one that has fewer than slots."""
    if not device.later:
        return HostPlaces(bank)
    return DevicePlaces(bank, device, HostCopies(device, bank.each_layer, bank.slots) if in_host else None)


def colocated(
    source: ModelSource, config: EngineConfig, groups: Sequence[KvGroup] = ()
) -> AttentionNode[LocalTicket]:
    """One attention node with all experts in the same process and no mailboxes between."""
    spec = spec_of(source, config.drafts())
    ops = open_ops(config.device, config.threads, config.gpu_kernels, config.isa)
    held = [(layer, expert, expert) for layer in range(spec.moe_layers) for expert in range(spec.experts)]
    bank = build_expert_bank(
        source,
        held,
        spec.experts,
        expert_dtype=config.expert_dtype,
        ops=ops,
        memory=config.expert_memory_bytes,
        in_host=config.experts_in_host,
        draft=config.drafts(),
    )
    node = build_attention_node(source, config, LocalBankLink(bank), ops=ops, groups=groups)
    node.expert_memory = bank.stats
    return node
