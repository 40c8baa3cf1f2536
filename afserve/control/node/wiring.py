"""Puts a node together from its assignment: engine, link and transport. The one file here that imports torch.

A node that reads another config.json than the controller's is refused before any weight is read.
"""

import socket
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from afserve.comm.device_exchange.wire import open_link, open_port, warm_exchange
from afserve.comm.m2n.bank import Bank, LocalBankLink
from afserve.comm.m2n.near import Near
from afserve.comm.mailbox import rendezvous, wire
from afserve.comm.transport import Layout, Transport
from afserve.comm.transports import connect
from afserve.config import FULL
from afserve.control.identifying import Tell, reading, unchanged
from afserve.control.node.stream import ControlStream
from afserve.control.wire.desired import Deployment
from afserve.control.wire.values import Assigned, Noted, Peers
from afserve.credentials import Credentials
from afserve.engine.attention_node import AttentionNode
from afserve.engine.build import build_attention_node, build_expert_bank, dtype_of, layout_for, spec_of
from afserve.engine.device_queues import alone_on, queue_per_box, queues_of
from afserve.engine.expert_node import ExpertNode
from afserve.engine.filler import Filler
from afserve.engine.kv.moving.open import KvPlace
from afserve.engine.warm import compiled_first, warm_experts
from afserve.errors import ConfigError, RendezvousError
from afserve.kernels.devices.cuda import built_for_amd, count_gpus
from afserve.kernels.devices.opened import device_of
from afserve.kernels.ops import Ops, open_ops
from afserve.member import MODEL_ROLES, Role
from afserve.models.identity import Identity
from afserve.placement.placement import Placement
from afserve.spec import ModelSpec
from afserve.tracing.trace import Trace

CONNECT_SECONDS = 60.0  # contexts of CUDA and connections of NCCL of all nodes of a host begin at once
Progress = Callable[[float], None]
Close = Callable[[], None]
Agreed = dict[str, str]
AnyNode = AttentionNode[Any]  # over whichever link's tickets


def build_attention(
    assigned: Assigned,
    progress: Progress,
    meet: Callable[[Agreed], Peers],
    tell: Tell,
    credentials: Credentials,
) -> tuple[AnyNode, Peers, Close]:
    """`meet` tells what this node will put on the data plane and returns the expert nodes to connect to.

    `tell` is given, from a thread, what this host has of the checkpoint, before this returns.
    """
    deployment = assigned.deployment
    identity, progress = _identity(assigned, progress, tell)
    ops = _ops(deployment)
    spec = _checked_spec(assigned)
    placement = deployment.placement
    layout = _layout(deployment, spec, placement)
    first = meet(_agreed(layout, deployment, spec))
    if deployment.colocated:
        node, close = _colocated(assigned, spec, placement, progress, ops, identity)
        return node, first, close
    addresses = {peer.life.index: peer.address for peer in first.experts}
    transport = connect.connect(
        addresses,
        attention=assigned.node.index,
        layout=layout,
        timeout=CONNECT_SECONDS,
        device=ops.device,
        credentials=credentials,
    )
    _share_cores(deployment, transport, ops)
    link = open_link(
        transport,
        attention=assigned.node.index,
        layout=layout,
        placement=placement,
        deadline=deployment.engine.loss_deadline,
        device=ops.device,
        near=_near(assigned),
    )
    trace = _trace(assigned)
    _first(deployment, identity)
    warm = device_of(ops.device).later
    if warm:
        warm_exchange(layout, placement.nodes, ops.device, dtype_of(deployment.source, spec))
    node = build_attention_node(
        deployment.source, deployment.engine, link, progress, ops=ops, trace=trace, warm=warm
    )
    identity.result()
    return node, first, _closing(trace, deployment, link.close)


def kv_place(
    stream: ControlStream, assigned: Assigned, credentials: Credentials, wake: Callable[[], None]
) -> KvPlace:
    """Where the node's KV wing stands; `wake` lets its loop have a turn, from any thread."""
    deployment = assigned.deployment
    return KvPlace(
        index=assigned.node.index,
        address=stream.own_address(),
        credentials=credentials,
        engine=deployment.engine,
        source=deployment.source,
        tell=lambda line: stream.send(Noted(line)),
        warn=lambda line: stream.send(Noted(line, warning=True)),
        wake=wake,
        sleep_in=stream.sleep_in,
    )


def _ops(deployment: Deployment) -> Ops:
    """The native library has threads of its own; torch would only get in their way, and nothing large is left to it."""
    device = torch.device(deployment.engine.device)
    if device.type == "cuda" and built_for_amd():
        raise ConfigError(
            f"device: {device} on {socket.gethostname()} is AMD's, for which there are no kernels; use --device cpu"
        )
    engine = deployment.engine
    last = (device.index or 0) + engine.tensor_parallel - 1
    if device.type == "cuda" and last >= count_gpus():
        raise ConfigError(
            f"device: cuda:{last} is not on {socket.gethostname()}; torch finds {count_gpus()} CUDA devices"
        )
    ops = open_ops(engine.device, engine.threads, engine.gpu_kernels, engine.isa)
    torch.set_num_threads(1 if ops.backend_name == "native" else engine.threads)
    return ops


def _near(assigned: Assigned) -> Near | None:
    """Only where each NUMA node has as many attention nodes, as `Near` takes for granted."""
    deployment, count = assigned.deployment, assigned.deployment.engine.numa_nodes
    even = count > 1 and deployment.count(Role.ATTENTION) % count == 0
    return Near.of(assigned.node, count) if even else None


def _share_cores(deployment: Deployment, transport: Transport, ops: Ops) -> None:
    """Between two nodes of one thread each: with more threads a core would be lent and the others would not."""
    engine = deployment.engine
    sharing = transport.offers.sharing_cores
    alone = deployment.count(Role.ATTENTION) == 1 == deployment.count(Role.EXPERT)
    if engine.share_cores and engine.threads == 1 and alone and sharing is not None:
        sharing.share_cores(ops.borrow_core)


def _colocated(
    assigned: Assigned,
    spec: ModelSpec,
    placement: Placement,
    progress: Progress,
    ops: Ops,
    identity: "Future[Identity]",
) -> tuple[AnyNode, Close]:
    deployment, trace = assigned.deployment, _trace(assigned)
    _first(deployment, identity)
    first, later = _halves(progress)
    bank = build_expert_bank(
        deployment.source,
        placement.held(0),
        spec.experts,
        expert_dtype=deployment.engine.expert_dtype,
        memory=deployment.engine.expert_memory_bytes,
        in_host=deployment.engine.experts_in_host,
        draft=deployment.engine.drafts(),
        progress=first,
        ops=ops,
    )
    link = LocalBankLink(bank)
    rounded = bank.rounding_error
    warm = device_of(ops.device).later
    if warm:
        _warm_experts(bank, deployment, spec, spec.experts, deployment.engine.most_rows, ops)
    node = build_attention_node(
        deployment.source,
        deployment.engine,
        link,
        later,
        ops=ops,
        trace=trace,
        expert_error=rounded,
        warm=warm,
    )
    node.expert_memory = bank.stats
    identity.result()
    return node, _closing(trace, deployment, link.close)


def build_expert(
    assigned: Assigned,
    progress: Progress,
    announce: Callable[[str, Agreed], None],
    tell: Tell,
    host: str,
    credentials: Credentials,
) -> tuple[ExpertNode, Filler, Close]:
    """Listens before it reads weights, so that attention nodes connect meanwhile; between hosts only on `host`.

    `tell` as for attention nodes.
    """
    deployment = assigned.deployment
    identity, progress = _identity(assigned, progress, tell)
    ops = _ops(deployment)
    spec = _checked_spec(assigned)
    placement = deployment.placement
    layout = _layout(deployment, spec, placement)
    transport, address = connect.listen(
        deployment.transport,
        expert=assigned.node.index,
        attention_nodes=deployment.most(Role.ATTENTION),
        layout=layout,
        host=host,
        device=ops.device,
        credentials=credentials,
    )
    _share_cores(deployment, transport, ops)
    announce(address, _agreed(layout, deployment, spec))
    _first(deployment, identity)
    bank = build_expert_bank(
        deployment.source,
        placement.held(assigned.node.index),
        layout.slots,
        expert_dtype=deployment.engine.expert_dtype,
        memory=deployment.engine.expert_memory_bytes,
        in_host=deployment.engine.experts_in_host,
        draft=deployment.engine.drafts(),
        progress=progress,
        ops=ops,
        recheck=unchanged(deployment.source, Role.EXPERT, identity, full=deployment.verify == FULL),
    )
    identity.result()
    place = device_of(ops.device)
    if place.later:
        most = layout.max_rows * deployment.count(Role.ATTENTION)
        _warm_experts(bank, deployment, spec, layout.slots, most, ops)
        warm_exchange(layout, 1, ops.device, dtype_of(deployment.source, spec))
    filler = Filler(bank, inside=partial(alone_on, place))
    filler.start()
    trace = _trace(assigned)
    recorder = place if deployment.engine.step_graphs and place.records else None
    port = open_port(transport, bank, ops.device, queue_per_box(place), recorder)
    node = ExpertNode(
        port,
        bank,
        epoch=placement.epoch,
        phases=deployment.phases,
        step_rows=deployment.engine.step_rows,
        prompt_share=deployment.engine.prompt_share,
        device=queues_of(place),
        trace=trace,
        expert_error=bank.rounding_error,
        isa=ops.isa,
    )
    return node, filler, _closing(trace, deployment, transport.close, bank.close)


def _warm_experts(
    bank: Bank, deployment: Deployment, spec: ModelSpec, slots: int, most_rows: int, ops: Ops
) -> None:
    """Before the node says that it is ready."""
    like_TH = torch.empty((0, spec.expert_width), dtype=dtype_of(deployment.source, spec), device=ops.device)
    compiled_first(
        ops, partial(warm_experts, bank, spec.moe_layers, like_TH, spec.moe.top_k, slots, most_rows)
    )


def _trace(assigned: Assigned) -> Trace | None:
    return Trace(str(assigned.node)) if assigned.deployment.trace_folder else None


def _closing(trace: Trace | None, deployment: Deployment, *closes: Close) -> Close:
    """In this order. Also writes this node's part of the trace, where it is not sent."""

    def closing() -> None:
        for close in closes:
            close()
        if trace is not None and not deployment.trace_sent:
            trace.write(Path(deployment.trace_folder) / f"{trace.process}.trace")

    return closing


def _checked_spec(assigned: Assigned) -> ModelSpec:
    source = assigned.deployment.source
    spec = spec_of(source, assigned.deployment.engine.drafts())
    if spec.fingerprint() != assigned.deployment.fingerprint:
        raise RendezvousError(
            f"{assigned.node}: model: {source.path}/config.json describes another model "
            f"here ({spec.fingerprint()}) than on the controller's host ({assigned.deployment.fingerprint})"
        )
    return spec


def _layout(deployment: Deployment, spec: ModelSpec, placement: Placement) -> Layout:
    layout = layout_for(deployment.source, spec, deployment.engine, placement.slots_per_node())
    served = rendezvous.fingerprint(
        spec.fingerprint(),
        dtype_of(deployment.source, spec),
        deployment.source.load_format,
        deployment.source.seed,
        deployment.engine.expert_dtype,
        deployment.engine.dense_dtype,
    )
    return replace(layout, model=served)


def _agreed(layout: Layout, deployment: Deployment, spec: ModelSpec) -> Agreed:
    """What `layout.model` is a hash of is named beside it, so that a disagreement says more than two numbers."""
    return {
        "data-plane protocol": str(wire.VERSION),
        "dtype": str(dtype_of(deployment.source, spec)).removeprefix("torch."),
        "load_format": deployment.source.load_format,
        **{name: str(value) for name, value in asdict(layout).items()},
    }


def _identity(assigned: Assigned, progress: Progress, tell: Tell) -> "tuple[Future[Identity], Progress]":
    """Begins to read what this node's role needs of the checkpoint; with the progress that is left for loading."""
    deployment = assigned.deployment
    roles = MODEL_ROLES if deployment.colocated else (assigned.node.role,)
    if deployment.verify != FULL:
        return reading(deployment.source, roles, full=False, progress=lambda done: None, tell=tell), progress
    first, later = _halves(progress)
    return reading(deployment.source, roles, full=True, progress=first, tell=tell), later


def _halves(progress: Progress) -> tuple[Progress, Progress]:
    """For two things one after the other."""
    return lambda done: progress(done / 2), lambda done: progress(0.5 + done / 2)


def _first(deployment: Deployment, identity: "Future[Identity]") -> None:
    """Where every byte is read for it, it comes before the weights: both want the disk."""
    if deployment.verify == FULL:
        identity.result()
