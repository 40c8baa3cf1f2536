"""The handshake of a connection: the attention node sends its terms, the expert node its own and a verdict.

All sizes are fixed and all fields are plain numbers: magic, terms in the order of FIELDS, then a number. From the
attention node it is its index. From the expert node it is the turn: how many nodes have had that index, this one
included, or 0 when another node with that index is still connected.
"""

import struct
from collections.abc import Callable

from afserve import member
from afserve.comm.mailbox.rendezvous import FIELDS, compare, terms
from afserve.comm.mailbox.segment import SegmentMap
from afserve.comm.mailbox.wire import MAGIC
from afserve.comm.transport import Layout
from afserve.comm.transports.encrypted import Connection
from afserve.errors import RendezvousError

_GREETING = struct.Struct("<Q" + "Q" * len(FIELDS) + "Q")


def ask(connection: Connection, attention: int, expert: int, layout: Layout) -> int:
    """The turn, as the expert node says. Raises RendezvousError naming it and what is wrong."""
    peer = str(member.expert_node(expert))
    mine = terms(layout, expert=expert, attention_nodes=attention + 1)
    try:
        connection.sendall(_pack(mine, attention))
        theirs, turn = _unpack(_read(connection))
    except (OSError, ValueError) as error:
        raise RendezvousError(f"{peer}: who answers at its address is no expert node ({error})") from error
    nodes = theirs["attention_nodes"]
    compare(
        {**mine, "attention_nodes": max(nodes, attention + 1)},
        theirs,
        me=str(member.attention_node(attention)),
        peer=peer,
    )
    if not turn:
        raise RendezvousError(
            f"{peer} did not take attention-{attention} in: another node of that index is connected"
        )
    return turn


def hear(connection: Connection) -> bytes:
    """What a newcomer says first, of the right length; empty where it says less, or too late."""
    try:
        return _read(connection)
    except (OSError, ValueError):
        return b""


def answer(
    connection: Connection,
    greeting: bytes,
    where: SegmentMap,
    turns: list[int],
    connected: Callable[[int], bool],
) -> int | None:
    """The index of an attention node that is let in, or None. Whoever is refused can read why."""
    mine = terms(where.layout, expert=where.expert, attention_nodes=where.attention_nodes)
    try:
        theirs, attention = _unpack(greeting)
        agreed = {
            **theirs,
            "attention_nodes": where.attention_nodes,
        } == mine and attention < where.attention_nodes
        welcome = agreed and not connected(attention)
        if welcome:
            turns[attention] += 1
        connection.sendall(_pack(mine, turns[attention] if welcome else 0))
    except (OSError, ValueError, struct.error):
        return None
    return attention if welcome else None


def _pack(agreed: dict[str, int], last: int) -> bytes:
    return _GREETING.pack(MAGIC, *(agreed[field] for field in FIELDS), last)


def _unpack(raw: bytes) -> tuple[dict[str, int], int]:
    magic, *values, last = _GREETING.unpack(raw)
    if magic != MAGIC:
        raise ValueError("it does not greet like afserve")
    return dict(zip(FIELDS, values, strict=True)), int(last)


def _read(connection: Connection) -> bytes:
    raw = b""
    while len(raw) < _GREETING.size:
        part = connection.recv(_GREETING.size - len(raw))
        if not part:
            raise ValueError("it hung up")
        raw += part
    return raw
