"""Payloads by NIXL over UCX (extra `afserve[nixl]`), which takes RDMA, shared memory or TCP, whatever both hosts have.

It runs without the library's own thread, which would take a third of a core from an idle node. Its ports ask nobody who
they are.
"""

import logging
import secrets
import struct
from itertools import count
from typing import Any

from afserve.comm.kv.carriers.carrier import Ended, Memory, OneSided
from afserve.errors import ConfigError

_BASE = struct.Struct("<Q")
_HOST_MEMORY = "DRAM"
_DONE, _RUNNING = "DONE", "PROC"


class Nixl(OneSided):
    """Raises ImportError without the library, ConfigError where it does not start. UCX itself chooses the addresses at
    which others reach this end, so `host` is not used."""

    def __init__(self, host: str, memory: Memory) -> None:
        from nixl import _bindings
        from nixl._api import nixl_agent, nixl_agent_config

        logging.getLogger("nixl").setLevel(logging.WARNING)
        self._errors = tuple(getattr(_bindings, name) for name in dir(_bindings) if name.endswith("Error"))
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            self._agent = nixl_agent(f"afserve-{secrets.token_hex(8)}", config)
            self._registered = self._agent.register_memory(
                [(memory.address, memory.size, 0, "")], _HOST_MEMORY
            )
        except self._errors as error:
            raise ConfigError(
                f"--kv-transport nixl: UCX does not start here ({error}); use --kv-transport sockets",
                param="kv_transport",
            ) from error
        self._memory = memory
        self.where = _BASE.pack(memory.address) + self._agent.get_agent_metadata()
        self._numbers = count(1)
        self._peers: dict[bytes, Any] = {}  # where -> the agent's name
        self._running: dict[int, Any] = {}
        self._refused: list[Ended] = []

    def read(self, peer: int, where: bytes, at: int, into: int, length: int) -> int:
        number = next(self._numbers)
        (base,) = _BASE.unpack_from(where)
        try:
            if where not in self._peers:
                self._peers[where] = self._agent.add_remote_agent(where[_BASE.size :])
            here, there = (
                self._agent.get_xfer_descs([(address, length, 0)], _HOST_MEMORY)
                for address in (self._memory.address + into, base + at)
            )
            handle = self._agent.initialize_xfer("READ", here, there, self._peers[where])
            self._agent.transfer(handle)
        except self._errors as error:
            self._refused.append(Ended(number, f"its read did not begin: {error}"))
        else:
            self._running[number] = handle
        return number

    def ended(self) -> list[Ended]:
        self._agent.get_new_notifs()  # nobody sends any: this lets the library work
        ended, self._refused = self._refused, []
        for number, handle in list(self._running.items()):
            try:
                state, why = self._agent.check_xfer_state(handle), "its read failed"
            except self._errors as error:
                state, why = "", f"its read failed: {error}"
            if state != _RUNNING:
                del self._running[number]  # dropping the handle releases it
                ended.append(Ended(number, "" if state == _DONE else why))
        return ended

    def forget(self, where: bytes) -> None:
        if (name := self._peers.pop(where, None)) is not None:
            try:
                self._agent.remove_remote_agent(name)
            except self._errors as error:
                logging.getLogger("afserve.kv").debug("NIXL had forgotten a peer before: %s", error)

    def close(self) -> None:
        self._running.clear()
        for where in list(self._peers):
            self.forget(where)
        self._agent.deregister_memory(self._registered)
