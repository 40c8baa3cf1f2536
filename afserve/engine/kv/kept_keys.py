"""Keys of beginnings, in a file beside the blocks on the disk: so that gateways know after a restart what is there.

It only advises: what cannot be read or written is said once in the log, and prompts go where they would without it.
Entries are a block's name and the key of the beginning that it ends; one that was cut, or whose block is not on the
disk any more, is passed over.
"""

import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from afserve.engine.kv.blocks import Hash
from afserve.engine.kv.prefix_keys import MOST_HELD

log = logging.getLogger("afserve.engine")
_ENTRY = struct.Struct("<16sQ")
_PRIVATE = 0o600


class KeptKeys:
    """Twice as many as a node tells of are in the file at most: then it is written anew with those that are noted."""

    def __init__(self, path: Path) -> None:
        self._path, self._noted = path, bytearray()
        self._entries: dict[Hash, int] = {}
        self._written, self._broken = 0, False

    def read_all(self) -> Iterator[tuple[Hash, int]]:
        """What an earlier life of this node has noted; the newest key of a name counts."""
        try:
            data = self._read() if self._path.exists() else b""
        except OSError as error:
            self._give_up(error)
            return
        whole = len(data) // _ENTRY.size * _ENTRY.size
        self._written = whole // _ENTRY.size
        self._entries = dict(_ENTRY.iter_unpack(data[:whole]))
        if whole != len(data):
            self._rewrite()
        yield from list(self._entries.items())

    def _read(self) -> bytes:
        with open(self._path, "rb") as file:
            return file.read(2 * MOST_HELD * _ENTRY.size)

    def note(self, name: Hash, key: int) -> None:
        if self._broken or self._entries.get(name) == key:
            return
        self._entries[name] = key
        self._noted += _ENTRY.pack(name, key)

    def forget(self, name: Hash) -> None:
        """It is not written again."""
        self._entries.pop(name, None)

    def write(self) -> None:
        """What was noted since the last call."""
        if not self._noted:
            return
        count = len(self._noted) // _ENTRY.size
        if self._written + count > 2 * MOST_HELD:
            self._rewrite()
            return
        try:
            with open(self._path, "ab", opener=_private) as file:
                file.write(self._noted)
        except OSError as error:
            self._give_up(error)
        self._written += count
        self._noted.clear()

    def _rewrite(self) -> None:
        kept = list(self._entries.items())[-MOST_HELD:]
        self._entries, fresh = dict(kept), self._path.with_name(f"{self._path.name}.new")
        try:
            with open(fresh, "wb", opener=_private) as file:
                file.write(b"".join(_ENTRY.pack(*one) for one in kept))
            fresh.replace(self._path)
        except OSError as error:
            self._give_up(error)
        self._written = len(kept)
        self._noted.clear()

    def _give_up(self, error: OSError) -> None:
        self._broken = True
        log.warning("%s: %s; after a restart gateways do not know what is on this disk", self._path, error)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, _PRIVATE)
