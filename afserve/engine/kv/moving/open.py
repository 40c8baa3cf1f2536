"""Puts a node's KV wing together: what must agree between nodes, what carries payloads, who keeps copies, and the tiers
below the cache, or why one of these is missing."""

import socket
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from afserve.clock import AwakeClock, Clock
from afserve.comm.disk.store import DiskStore
from afserve.comm.disk.ways import chosen
from afserve.comm.disk.workers import DiskWorkers
from afserve.comm.kv.carriers.carried import CarriedWires, Wake, memory_for
from afserve.comm.kv.carriers.table import open_carrier
from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.socket_wires import PROTOCOL, SocketWires
from afserve.config import AUTO, SOCKETS, EngineConfig, ModelSource
from afserve.config_texts import bytes_of
from afserve.credentials import Credentials
from afserve.digest_cache import DigestCache, user_folder
from afserve.engine.attention_node import AttentionNode
from afserve.engine.kv.cache import KvCache
from afserve.engine.kv.disk import DiskTier
from afserve.engine.kv.host import HostArena, HostTier
from afserve.engine.kv.inherited import Inheritance
from afserve.engine.kv.kept_keys import KeptKeys
from afserve.engine.kv.moving.copying import Copier
from afserve.engine.kv.moving.handing_on import HandingOn
from afserve.engine.kv.moving.moves import KvMoves
from afserve.engine.kv.tiers import KvTiers, Tier
from afserve.errors import CheckpointError
from afserve.kernels.devices.opened import device_of
from afserve.models.identity import identify, weights_of

_GAP = 0.25  # seconds between two turns that count at the most: a process that was not running judges nobody as late
Node = AttentionNode[Any]


@dataclass(frozen=True, slots=True)
class KvPlace:
    """Where a wing stands: the node's `index`, its host's `address`, what it shows to other nodes, what it was asked.

    `tell` and `warn` take lines for the run's log, from any thread. `wake` lets the node's loop have a turn, also from
    any thread; the loop sleeps in what `sleep_in` is given.
    """

    index: int
    address: str
    credentials: Credentials
    engine: EngineConfig
    source: ModelSource
    tell: Callable[[str], None]
    warn: Callable[[str], None]
    wake: Callable[[], None]
    sleep_in: Callable[[SocketWires], None]


def open_kv(node: Node, listener: socket.socket, place: KvPlace) -> KvMoves:
    """It takes the socket over. Raises ConfigError where the library that is to carry payloads cannot be used."""
    clock, kv, engine, shown = AwakeClock(most=_GAP), node.kv, place.engine, place.credentials
    terms = {field.name: str(getattr(kv.fingerprint, field.name)) for field in fields(kv.fingerprint)}
    terms |= {"protocol": str(PROTOCOL), "block bytes": str(kv.block_bytes), "transport": engine.kv_transport}
    in_sockets = engine.kv_transport == SOCKETS

    def connected(wake: Wake) -> SocketWires:
        return SocketWires(
            listener, shown.token, terms, kv.block_bytes, wake, shown.certificates, shares=in_sockets
        )

    wires: SocketWires | CarriedWires
    if in_sockets:
        wires = connected(place.wake)
        place.sleep_in(wires)
    else:
        memory = memory_for(kv.block_bytes)
        carrier = open_carrier(engine.kv_transport, place.address, memory)
        wires = CarriedWires(connected, carrier, memory, kv.block_bytes, place.wake, AwakeClock(most=_GAP))
    exchange = Exchange(node.blocks, wires, clock, shown.generation)
    copier = Copier(node, exchange, kv.block_bytes, clock) if engine.kv_copies else None
    # What is on a disk is there for other nodes of this host without it.
    handing_on = None if engine.kv_ssd else HandingOn(node, exchange, kv.block_bytes, clock, place.tell)
    exchange.on_inherited = node.told.inherited
    wires.start()
    return KvMoves(
        node,
        exchange,
        clock,
        engine.block_size,
        kv.block_bytes,
        copier,
        place.tell,
        engine.straight_tokens,
        engine.max_waiting,
        open_tiers(node, place),
        place.warn,
        handing_on,
    )


def open_tiers(node: Node, place: KvPlace) -> KvTiers | None:
    """What --kv-host and --kv-ssd ask for; None without, or where neither can be had."""
    engine, kv, clock = place.engine, node.kv, AwakeClock(most=_GAP)
    disk = _disk(node, place, clock) if engine.kv_ssd else None
    host = _host(node, place, clock, disk) if engine.kv_host else None
    found: list[Tier] = [tier for tier in (host, disk) if tier is not None]
    if not found:
        return None
    tiers = KvTiers(kv, node.blocks, found, clock)
    node.told.look_below(tiers.holds, None if disk is None else KeptKeys(disk.store.folder / "keys"))
    if disk is not None:
        limit, start = bytes_of("--kv-ssd-size", engine.kv_ssd_size), partial(_reading, place)
        parts = tiers, node.blocks, node.told, clock, place.tell
        tiers.on_look = Inheritance(disk.store, limit, start, *parts).look
    return tiers


def _host(node: Node, place: KvPlace, clock: Clock, below: DiskTier | None) -> HostTier | None:
    engine, kv = place.engine, node.kv
    try:
        arena = HostArena(engine.kv_host_bytes, kv.block_bytes, device_of(torch.device(engine.device)))
    except OSError as error:
        place.warn(
            f"KV is not kept in host memory: --kv-host {engine.kv_host}: {error}; ask for another size"
        )
        return None
    place.tell(
        f"KV in host memory: at most {arena.slots:,} blocks of {engine.block_size} tokens "
        f"({kv.block_bytes:,} bytes)"
    )
    return HostTier(node.blocks, arena, clock, below)


def _disk(node: Node, place: KvPlace, clock: Clock) -> DiskTier | None:
    engine, kv = place.engine, node.kv
    try:
        what = _what(kv, place)
    except CheckpointError as error:
        place.warn(
            f"KV is not kept on disk: what it stands for cannot be told from the checkpoint: {error.message}"
        )
        return None
    limit, folder = bytes_of("--kv-ssd-size", engine.kv_ssd_size), Path(engine.kv_ssd)
    way = chosen(folder)
    try:
        store = DiskStore.open(folder, what, kv.block_bytes, limit, lane=place.index, direct=way.direct)
    except OSError as error:
        place.warn(
            f"KV is not kept on disk: --kv-ssd {engine.kv_ssd}: {error}; give a folder that it may write to"
        )
        return None
    place.tell(
        f"KV on disk: {store.folder} has {store.blocks:,} of at most {store.capacity:,} blocks of "
        f"{engine.block_size} tokens ({kv.block_bytes:,} bytes), read by {way}"
    )
    return DiskTier(node.blocks, _reading(place, store), clock)


def _reading(place: KvPlace, store: DiskStore) -> DiskWorkers:
    """Its threads, which have begun."""
    workers = DiskWorkers(store, place.wake, place.warn, chosen(Path(place.engine.kv_ssd)))
    workers.start()
    return workers


def _what(kv: KvCache, place: KvPlace) -> str:
    """Equal where the same tokens have the same KV. A layer's keys stand on what the experts below it gave, so their
    weights and how these and the rows are rounded belong to it; files outlive the run that wrote them. What `auto`
    leaves as it is stored depends on the kernels, which are taken to be this node's on expert nodes too."""
    engine = place.engine
    experts = identify(place.source, ("expert",), DigestCache(user_folder()))[weights_of("expert")]
    # Files that are older than these settings say nothing of them.
    dense = "fp8" if kv.dense_in_fp8 else engine.dense_dtype
    later = [dense] * (dense != AUTO)
    later += [f"kv {engine.kv_dtype}"] * (engine.kv_dtype != AUTO)
    if engine.expert_dtype == AUTO:
        later += [f"experts in {name}" for name in kv.experts_as_stored]
    said = "\0".join((kv.fingerprint.digest, experts, engine.expert_dtype, engine.wire_dtype, *later))
    return blake2b(said.encode(), digest_size=32).hexdigest()
