"""Puts together the tier of an attention node's KV on disk, or says why there is none and serves without it."""

from hashlib import blake2b
from pathlib import Path
from typing import Any

from afserve.clock import AwakeClock
from afserve.comm.disk.store import DiskStore
from afserve.comm.disk.ways import chosen
from afserve.comm.disk.workers import DiskWorkers
from afserve.config_sizes import bytes_of
from afserve.control.node.kv import KvMoves, Moved
from afserve.control.node.kv_disk import KvOnDisk
from afserve.control.node.stream import ControlStream
from afserve.control.wire.values import Assigned, Noted
from afserve.digest_cache import DigestCache, user_folder
from afserve.engine.attention_node import AttentionNode
from afserve.engine.kv_disk import DiskTier
from afserve.errors import CheckpointError
from afserve.models.identity import identify, weights_of

_GAP = 0.25  # seconds between two turns that count at the most, as in `kv_open`


def open_disk(
    moves: KvMoves, node: AttentionNode[Any], stream: ControlStream, assigned: Assigned
) -> KvMoves | KvOnDisk:
    """What stands around `moves` with --kv-ssd; `moves` itself without, or where the folder cannot be used."""
    engine, kv = assigned.deployment.engine, node.kv
    if not engine.kv_ssd:
        return moves

    def warn(line: str) -> None:
        stream.send(Noted(line, warning=True))

    try:
        what = _what(kv.fingerprint.digest, assigned)
    except CheckpointError as error:
        warn(
            f"KV is not kept on disk: what it stands for cannot be told from the checkpoint: {error.message}"
        )
        return moves
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
        return moves
    stream.send(
        Noted(
            f"KV on disk: {store.folder} has {store.blocks:,} of at most {store.capacity:,} blocks of "
            f"{engine.block_size} tokens ({kv.block_bytes:,} bytes), read by {way}"
        )
    )
    clock = AwakeClock(most=_GAP)
    workers = DiskWorkers(store, lambda: stream.deliver(Moved()), warn, way)
    tier = DiskTier(kv, node.blocks, workers, clock)
    workers.start()
    return KvOnDisk(moves, tier, node, clock, engine.block_size, kv.block_bytes, warn, engine.max_waiting)


def _what(attention: str, assigned: Assigned) -> str:
    """Equal where the same tokens have the same KV. A layer's keys stand on what the experts below it gave, so their
    weights and how these and the rows are rounded belong to it; files outlive the run that wrote them."""
    engine, source = assigned.deployment.engine, assigned.deployment.source
    experts = identify(source, ("expert",), DigestCache(user_folder()))[weights_of("expert")]
    # Files that are older than this setting say nothing of it.
    dense = () if engine.dense_dtype == "auto" else (engine.dense_dtype,)
    said = "\0".join((attention, experts, engine.expert_dtype, engine.wire_dtype, *dense))
    return blake2b(said.encode(), digest_size=32).hexdigest()
