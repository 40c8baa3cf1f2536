"""Puts together the tiers below an attention node's KV cache, or says why one is missing and serves without."""

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from afserve.clock import AwakeClock, Clock
from afserve.comm.disk.store import DiskStore
from afserve.comm.disk.ways import chosen
from afserve.comm.disk.workers import DiskWorkers
from afserve.config_sizes import bytes_of
from afserve.control.node.kv import KvMoves, Moved
from afserve.control.node.kv_tiers import KvInTiers
from afserve.control.node.stream import ControlStream
from afserve.control.wire.values import Assigned, Noted
from afserve.digest_cache import DigestCache, user_folder
from afserve.engine.attention_node import AttentionNode
from afserve.engine.kv.disk import DiskTier
from afserve.engine.kv.host import HostArena, HostTier
from afserve.engine.kv.tiers import KvTiers, Tier
from afserve.errors import CheckpointError
from afserve.models.identity import identify, weights_of

_GAP = 0.25  # seconds between two turns that count at the most, as in `kv_open`
Node = AttentionNode[Any]
Warn = Callable[[str], None]


def open_tiers(moves: KvMoves, node: Node, stream: ControlStream, assigned: Assigned) -> KvMoves | KvInTiers:
    """What stands around `moves` with --kv-host or --kv-ssd; `moves` itself without, or where neither can be had."""
    engine, kv, clock = assigned.deployment.engine, node.kv, AwakeClock(most=_GAP)

    def warn(line: str) -> None:
        stream.send(Noted(line, warning=True))

    disk = _disk(node, stream, assigned, clock, warn) if engine.kv_ssd else None
    host = _host(node, stream, assigned, clock, disk, warn) if engine.kv_host else None
    tiers: list[Tier] = [tier for tier in (host, disk) if tier is not None]
    if not tiers:
        return moves
    chain = KvTiers(kv, node.blocks, tiers, clock)
    return KvInTiers(moves, chain, node, clock, engine.block_size, kv.block_bytes, warn, engine.max_waiting)


def _host(
    node: Node,
    stream: ControlStream,
    assigned: Assigned,
    clock: Clock,
    below: DiskTier | None,
    warn: Warn,
) -> HostTier | None:
    engine, kv = assigned.deployment.engine, node.kv
    try:
        arena = HostArena(engine.kv_host_bytes, kv.block_bytes, pinned=engine.device.startswith("cuda"))
    except OSError as error:
        warn(f"KV is not kept in host memory: --kv-host {engine.kv_host}: {error}; ask for another size")
        return None
    stream.send(
        Noted(
            f"KV in host memory: at most {arena.slots:,} blocks of {engine.block_size} tokens "
            f"({kv.block_bytes:,} bytes)"
        )
    )
    return HostTier(node.blocks, arena, clock, below)


def _disk(node: Node, stream: ControlStream, assigned: Assigned, clock: Clock, warn: Warn) -> DiskTier | None:
    engine, kv = assigned.deployment.engine, node.kv
    try:
        what = _what(kv.fingerprint.digest, assigned)
    except CheckpointError as error:
        warn(
            f"KV is not kept on disk: what it stands for cannot be told from the checkpoint: {error.message}"
        )
        return None
    limit, folder = bytes_of("--kv-ssd-size", engine.kv_ssd_size), Path(engine.kv_ssd)
    way = chosen(folder)
    try:
        store = DiskStore.open(
            folder,
            what,
            kv.block_bytes,
            limit,
            lane=assigned.node.index,
            direct=way.direct,
        )
    except OSError as error:
        warn(f"KV is not kept on disk: --kv-ssd {engine.kv_ssd}: {error}; give a folder that it may write to")
        return None
    stream.send(
        Noted(
            f"KV on disk: {store.folder} has {store.blocks:,} of at most {store.capacity:,} blocks of "
            f"{engine.block_size} tokens ({kv.block_bytes:,} bytes), read by {way}"
        )
    )
    workers = DiskWorkers(store, lambda: stream.deliver(Moved()), warn, way)
    workers.start()
    return DiskTier(node.blocks, workers, clock)


def _what(attention: str, assigned: Assigned) -> str:
    """Equal where the same tokens have the same KV. A layer's keys stand on what the experts below it gave, so their
    weights and how these and the rows are rounded belong to it; files outlive the run that wrote them."""
    engine, source = assigned.deployment.engine, assigned.deployment.source
    experts = identify(source, ("expert",), DigestCache(user_folder()))[weights_of("expert")]
    # Files that are older than this setting say nothing of it.
    dense = () if engine.dense_dtype == "auto" else (engine.dense_dtype,)
    said = "\0".join((attention, experts, engine.expert_dtype, engine.wire_dtype, *dense))
    return blake2b(said.encode(), digest_size=32).hexdigest()
