"""What nodes on several hosts have drawn, kept in files as it comes, for whoever makes one trace of it at the end.

Nothing is looked into: the event loop that gateways share only appends bytes. `pieces` reads a file again.
"""

import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path

from afserve.errors import ProtocolError
from afserve.member import Life, NodeId, Role
from afserve.tracing.trace_part import MOST_BYTES, TracePart

log = logging.getLogger("afserve.control")

SUFFIX = ".sent"
MOST_KEPT = 2 << 30  # bytes of all nodes of a run: some 100 million events
MOST_LIVES = 10_000  # of nodes, each of which has a file
_FRAME = struct.Struct("<dQ")  # when it came, in seconds of the controller's clock, and the bytes that follow


class TraceFiles:
    """Of one controller; the next one of the run goes on with the same files."""

    def __init__(self, folder: Path, most: int = MOST_KEPT) -> None:
        self._folder, self._most = folder, most
        self._kept = sum(path.stat().st_size for path in folder.glob(f"*{SUFFIX}"))
        self._lives: set[Life] = set()
        self._full = False

    def keep(self, life: Life, host: str, data: bytes, now: float) -> None:
        """`host` is the name of the machine, as the node said it.

        What comes when there is no room any more is dropped, which is logged once.
        """
        room = self._kept + len(data) <= self._most and len(data) <= MOST_BYTES
        if self._full or not room or (life not in self._lives and len(self._lives) >= MOST_LIVES):
            if not self._full:
                self._full = True
                log.warning("--trace: no more than %d MiB of all nodes are kept", self._most >> 20)
            return
        self._lives.add(life)
        self._kept += len(data)
        with (self._folder / f"{life.node}.{life.generation}{SUFFIX}").open("ab") as file:
            if file.tell() == 0:
                file.write(json.dumps([life.node.role, life.index, life.generation, host]).encode() + b"\n")
            file.write(_FRAME.pack(now, len(data)) + data)


def read_life(path: Path) -> tuple[Life, str, Iterator[tuple[float, TracePart]]]:
    """Whose file it is, on which host, and (when it came, what) of each part that can be read: the end may be
    missing."""
    file = path.open("rb")
    role, index, generation, host = json.loads(file.readline())
    node = NodeId(Role(role), index)

    def parts() -> Iterator[tuple[float, TracePart]]:
        with file:
            while len(head := file.read(_FRAME.size)) == _FRAME.size:
                came, size = _FRAME.unpack(head)
                data = file.read(size)
                try:
                    yield came, TracePart.unpack(data)
                except ProtocolError as error:
                    log.warning("--trace: of %s on %s: %s", node, host, error.message)

    return Life(node, generation), host, parts()
