"""Payloads by Mooncake's transfer engine (extra `afserve[mooncake]`), which finds its peers without a metadata service.

It takes RDMA devices where the host has any, and TCP otherwise. Its ports ask nobody who they are.
"""

import struct
from itertools import count

from afserve.comm.kv.carriers.carrier import Ended, Memory, OneSided
from afserve.errors import ConfigError

_BASE = struct.Struct("<Q")
_COMPLETE, _RUNNING = 1, 0


class Mooncake(OneSided):
    """`host` is where other ends reach this one. Raises ImportError without the library, ConfigError where it does not
    start."""

    def __init__(self, host: str, memory: Memory) -> None:
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        if code := self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise ConfigError(
                f"--kv-transport mooncake: its engine does not start on {host} (code {code}); this node's log has why",
                param="kv_transport",
            )
        if code := self._engine.register_memory(memory.address, memory.size):
            raise ConfigError(
                f"--kv-transport mooncake: {memory.size / 1e6:.0f} MB could not be registered (code {code}); "
                "raise the limit of locked memory (ulimit -l) or use --kv-transport sockets",
                param="kv_transport",
            )
        self._memory = memory
        self.where = _BASE.pack(memory.address) + f"{host}:{self._engine.get_rpc_port()}".encode()
        self._numbers = count(1)
        self._running: dict[int, int] = {}  # number of a read -> the library's
        self._refused: list[Ended] = []

    def read(self, peer: int, where: bytes, at: int, into: int, length: int) -> int:
        number = next(self._numbers)
        (base,), owner = _BASE.unpack_from(where), where[_BASE.size :].decode(errors="replace")
        batch = self._engine.batch_transfer_async_read(
            owner, [self._memory.address + into], [base + at], [length]
        )
        if batch in (0, -1):
            self._refused.append(Ended(number, f"nobody answers at {owner}"))
        else:
            self._running[number] = batch
        return number

    def ended(self) -> list[Ended]:
        ended, self._refused = self._refused, []
        for number, batch in list(self._running.items()):
            status = self._engine.transfer_check_status(batch)
            if status != _RUNNING:
                del self._running[number]  # the library has forgotten it, too
                ended.append(Ended(number, "" if status == _COMPLETE else f"its read failed ({status})"))
        return ended

    def forget(self, where: bytes) -> None:
        """The library dials an address anew by itself."""

    def close(self) -> None:
        self._engine.unregister_memory(self._memory.address)
