"""Payloads over torch.distributed: a process group of two nodes (gloo) for each one that reads from another one.

The owner of the memory names a group when it lends to a peer first, and sends what it lends; the reader, told the name
with the place, receives. What both need to meet goes over their greeted connection. A group that fails is dropped whole
with what was under way, and the next piece is lent in a new one. Payloads lie in host memory, also beside a GPU: nccl
is not used. gloo's port asks nobody who they are.
"""

import secrets
import struct
import time
from itertools import count
from queue import SimpleQueue

import torch

from afserve.comm.kv.carriers.carrier import Ended, Memory
from afserve.comm.kv.carriers.dist_pair import MEET_SECONDS, OWNER, READER, Pair, PairTransfer
from afserve.comm.kv.lender import LEASE_SECONDS
from afserve.comm.kv.puller import STALL_SECONDS
from afserve.comm.transports.groups import gloo_device
from afserve.errors import ConfigError

_NAME_BYTES = 16
_SAID = struct.Struct(f"<{_NAME_BYTES}sBB")  # name of the group, rank of who says it, bytes of the key
_PAGE = 4096
RECEIVE_SECONDS = STALL_SECONDS
SEND_SECONDS = LEASE_SECONDS + STALL_SECONDS  # a reader with other peers may let it wait
_GONE = "the peer has gone"


class Dist:
    """`host` is the address on which gloo listens, and no other. Raises ConfigError where it cannot."""

    def __init__(self, host: str, memory: Memory) -> None:
        try:
            self._device = gloo_device(host)
        except RuntimeError as error:
            raise ConfigError(
                f"--kv-transport dist: gloo cannot listen on {host} ({str(error).partition(chr(10))[0]}); "
                "use --kv-transport sockets",
                param="kv_transport",
            ) from error
        self._memory_B = torch.frombuffer(memory.view, dtype=torch.uint8)
        self._numbers = count(1)
        self._ended: SimpleQueue[Ended] = SimpleQueue()
        self._said: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        self._lent: dict[int, Pair] = {}  # by peer
        self._reads: dict[int, Pair] = {}
        self._living: list[Pair] = []

    def lend(self, peer: int, at: int, length: int) -> bytes:
        """It is sent from now on. The name of the group through which it comes."""
        asked = PairTransfer(0, self._memory_B[at : at + length], at // _PAGE)
        pair = self._lent.get(peer)
        if pair is None or pair.ask(asked):
            pair = self._lent[peer] = self._open(peer, secrets.token_bytes(_NAME_BYTES), OWNER)
            pair.ask(asked)
        return pair.group_name

    def read(self, peer: int, where: bytes, at: int, into: int, length: int) -> int:
        number = next(self._numbers)
        asked = PairTransfer(number, self._memory_B[into : into + length], at // _PAGE)
        if why := self._pair_of_owner(peer, where).ask(asked):
            self._ended.put(Ended(number, why))
        return number

    def ended(self) -> list[Ended]:
        return [self._ended.get() for _ in range(self._ended.qsize())]

    def forget(self, where: bytes) -> None:
        """A group is of one peer: it ends when that has `left`."""

    def said(self) -> list[tuple[int, bytes]]:
        return [self._said.get() for _ in range(self._said.qsize())]

    def heard(self, peer: int, what: bytes) -> None:
        """Nothing that a correct peer does not say has an effect."""
        if len(what) < _SAID.size:
            return
        name, rank, length = _SAID.unpack_from(what)
        key, value = what[_SAID.size :][:length].decode(errors="replace"), what[_SAID.size + length :]
        if rank == OWNER and key:
            self._pair_of_owner(peer, name)
        pair = (self._reads if rank == OWNER else self._lent).get(peer)
        if pair is None or pair.group_name != name:
            return
        if key:
            pair.meeting.heard(key, value)
        else:
            pair.end("the other end has given up their group")

    def left(self, peer: int) -> None:
        for pairs in (self._lent, self._reads):
            if (pair := pairs.pop(peer, None)) is not None:
                pair.end(_GONE)

    def close(self) -> None:
        """Threads that wait for a peer to meet them end within MEET_SECONDS, the others at once."""
        for pair in self._living:
            pair.end("this node ends")
        until = time.monotonic() + MEET_SECONDS + 1.0
        for pair in self._living:
            pair.join(max(0.0, until - time.monotonic()))
        for held in (self._lent, self._reads, self._living):
            held.clear()

    def _pair_of_owner(self, peer: int, name: bytes) -> Pair:
        """An owner that names another group has given up the one before."""
        pair = self._reads.get(peer)
        if pair is None or pair.group_name != name:
            if pair is not None:
                pair.end("its owner has given up their group")
            pair = self._reads[peer] = self._open(peer, name, READER)
        return pair

    def _open(self, peer: int, name: bytes, rank: int) -> Pair:
        def say(name: bytes, rank: int, key: str, value: bytes) -> None:
            self._said.put((peer, _SAID.pack(name, rank, len(key)) + key.encode() + value))

        def done(number: int, why: str) -> None:
            if rank == READER:
                self._ended.put(Ended(number, why))

        limit = SEND_SECONDS if rank == OWNER else RECEIVE_SECONDS
        pair = Pair(name, rank, self._device, limit, say, done)
        self._living = [one for one in self._living if one.is_alive()] + [pair]
        pair.start()
        return pair
