"""Compares what two ends have to agree on before the first byte moves: sizes, dtypes, model, protocol version.

Values in; nothing out, or an error that names the peer and the field. It knows no sockets and no memory.
"""

import hashlib
from collections.abc import Mapping

from afserve.comm.mailbox.wire import VERSION
from afserve.comm.transport import Layout
from afserve.errors import RendezvousError

FIELDS = (
    "protocol",
    "model",
    "hidden",
    "top_k",
    "max_rows",
    "micro_batches",
    "layers",
    "slots",
    "dispatch_wire",
    "combine_wire",
    "exchange",
    "expert",
    "attention_nodes",
)


def terms(layout: Layout, *, expert: int, attention_nodes: int) -> dict[str, int]:
    """The agreement of one attention node with one expert node as numbers, in the order of FIELDS."""
    extra = {"protocol": VERSION, "expert": expert, "attention_nodes": attention_nodes}
    return {name: int(extra[name] if name in extra else getattr(layout, name)) for name in FIELDS}


def compare(mine: Mapping[str, int], theirs: Mapping[str, int], *, me: str, peer: str) -> None:
    """Raises RendezvousError naming the first field in which the two differ."""
    for field in FIELDS:
        if mine[field] != theirs[field]:
            raise RendezvousError(
                f"{peer} and {me} do not agree: {field} is {theirs[field]} there and {mine[field]} here; "
                "start both with the same model, flags and version"
            )


def fingerprint(*parts: object) -> int:
    """A 63-bit number that names what is served, such as the checkpoint's name, its dtype and its config."""
    digest = hashlib.sha256("\0".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
