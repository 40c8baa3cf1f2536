"""An end of a KV transfer whose payloads a library carries, as a process.

It lends 40 blocks of 64 KiB and says its address, or pulls them from one that is given and says how that ended. It ends
without the destructors of libraries, some of which clash with each other's.
"""

import os
import signal
import threading
import time
from dataclasses import asdict
from multiprocessing.connection import Connection

from afserve.clock import AwakeClock
from afserve.comm.kv.carriers import carried
from afserve.comm.kv.carriers.carried import CarriedWires, memory_for
from afserve.comm.kv.carriers.table import open_carrier
from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.socket_wires import SocketWires
from afserve.comm.transports.entrance import listen_on
from tests.comm import kv_world

COUNT, BLOCK = 40, 64 << 10
NAMES = kv_world.chain(1, COUNT)


def content(name: bytes) -> bytes:
    return name * (BLOCK // len(name))


class Spoiling:
    """Of what its library brought, one bit is wrong."""

    def __init__(self, carrier, memory) -> None:
        self.carrier, self.memory = carrier, memory
        self.into = {}

    def read(self, peer, where, at, into, length):
        number = self.carrier.read(peer, where, at, into, length)
        self.into[number] = into + length // 2
        return number

    def ended(self):
        found = self.carrier.ended()
        for one in found:
            self.memory.view[self.into[one.read]] ^= 1
        return found

    def __getattr__(self, name):
        return getattr(self.carrier, name)


class Falling(CarriedWires):
    """Sends itself `signal` with the first payload that it places or reads."""

    signal = 0

    def _place(self, now):
        super()._place(now)
        self._fall(self._lent)

    def _start_reads(self, now):
        super()._start_reads(now)
        self._fall(self._reads)

    def _fall(self, begun):
        if begun and self.signal:
            time.sleep(0.01)  # what was said of it has probably left
            os.kill(os.getpid(), self.signal)


class CarriedEnd:
    def __init__(self, library: str, *, spoils: bool = False) -> None:
        self.news = threading.Event()
        memory = memory_for(BLOCK)
        carrier = open_carrier(library, "127.0.0.1", memory)

        def connected(wake):
            return SocketWires(listen_on("127.0.0.1"), "t", {"transport": library}, BLOCK, wake)

        if spoils:
            carrier = Spoiling(carrier, memory)
        self.wires = Falling(connected, carrier, memory, BLOCK, self.news.set, AwakeClock(0.25))
        self.wires.start()
        self.store = kv_world.Store(2 * COUNT)
        self.exchange = Exchange(self.store, self.wires, AwakeClock(0.25), 3)

    def turn(self) -> None:
        self.exchange.turn(0.02)
        self.news.wait(0.002)
        self.news.clear()


def run(pipe: Connection, library: str, what: str, *more: str) -> None:
    """It lends until it is killed."""
    kv_world.BLOCK, kv_world.content = BLOCK, content
    kv_world.Store.block_bytes = BLOCK
    end = CarriedEnd(library, spoils="spoils" in more)
    falls = [one for one in more if one.startswith("SIG")]
    if falls:
        Falling.signal = getattr(signal, falls[0])
    if what == "lend":
        end.store.compute(NAMES)
        if falls:
            carried.OF_A_PEER = 1  # so that the first payload is not all of them
        pipe.send(end.wires.address)
        while True:
            end.turn()
    end.exchange.pull(what, NAMES, 20.0, request=0, generation=3)
    while not end.exchange.ended:
        end.turn()
    pulled = end.exchange.ended.pop()
    right = [
        end.store.memory[block] == content(NAMES[at]) for at, block in enumerate(end.store.pool.match(NAMES))
    ]
    pipe.send({"right": sum(right), **asdict(pulled)})
    end.exchange.close()
    os._exit(0)
