"""Puts together how an attention node moves KV blocks: its listening socket, what must agree, what carries payloads,
and who keeps copies."""

import socket
from dataclasses import fields
from typing import Any

from afserve.clock import AwakeClock
from afserve.comm.kv.carriers.carried import CarriedWires, Wake, memory_for
from afserve.comm.kv.carriers.table import open_carrier
from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.reach import listen_here
from afserve.comm.kv.socket_wires import PROTOCOL, SocketWires
from afserve.comm.transports.entrance import listen_on
from afserve.config import SOCKETS
from afserve.control.node.copying import Copier
from afserve.control.node.kv import KvMoves, Moved
from afserve.control.node.stream import ControlStream
from afserve.control.wire.values import Assigned, Noted
from afserve.engine.attention_node import AttentionNode
from afserve.tls import is_loopback

_GAP = 0.25  # seconds between two turns that count at the most: a process that was not running judges nobody as late


def listen(stream: ControlStream) -> socket.socket:
    """Inside this host where the controller is on its loopback, else on the address that reaches the controller."""
    host = stream.own_address()
    return listen_here() if is_loopback(host) else listen_on(host)


def open_kv(
    node: AttentionNode[Any], listener: socket.socket, stream: ControlStream, assigned: Assigned
) -> KvMoves:
    """It takes the socket over. Raises ConfigError where the library that is to carry payloads cannot be used."""
    clock, kv, engine = AwakeClock(most=_GAP), node.kv, assigned.deployment.engine
    terms = {field.name: str(getattr(kv.fingerprint, field.name)) for field in fields(kv.fingerprint)}
    terms |= {"protocol": str(PROTOCOL), "block bytes": str(kv.block_bytes), "transport": engine.kv_transport}

    def connected(wake: Wake) -> SocketWires:
        return SocketWires(
            listener,
            stream.token,
            terms,
            kv.block_bytes,
            wake,
            stream.certificates,
            shares=engine.kv_transport == SOCKETS,
        )

    def moved() -> None:
        stream.deliver(Moved())

    wires: SocketWires | CarriedWires
    if engine.kv_transport == SOCKETS:
        wires = connected(moved)
        stream.sleep_in(wires)
    else:
        memory = memory_for(kv.block_bytes)
        carrier = open_carrier(engine.kv_transport, stream.own_address(), memory)
        wires = CarriedWires(connected, carrier, memory, kv.block_bytes, moved, AwakeClock(most=_GAP))
    exchange = Exchange(node.blocks, wires, clock, assigned.generation)
    copier = None
    if engine.kv_copies:
        copier = Copier(node, exchange, assigned.node.index, engine.kv_copies, kv.block_bytes, clock)
    wires.start()
    return KvMoves(
        node,
        exchange,
        clock,
        engine.block_size,
        kv.block_bytes,
        copier,
        lambda line: stream.send(Noted(line)),
        engine.straight_tokens,
        engine.max_waiting,
    )
