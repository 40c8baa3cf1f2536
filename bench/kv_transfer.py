"""How fast KV blocks move between two processes, beside plain copies and streams of as many bytes.

    python -m bench.kv_transfer                        1 MiB to 1 GiB: over shared memory and, on loopback, tcp
    python -m bench.kv_transfer --over namespaces      tcp between two network namespaces; needs root and ip(8)
    python -m bench.kv_transfer --over mooncake nixl   payloads by these libraries, beside tcp on loopback

A transfer is everything from the wish for named blocks to the last one being findable: names, copy out of the cache,
checksum, the way, check, copy into the cache. Its peer over shared memory is two processes that copy pieces of 2 MiB
into slots and out of them, one on each core, and do nothing else (`copies`). Over tcp it is one process that sends a
buffer and one that receives into a buffer (`stream`). The other process sleeps until it is asked, by either. They take
turns. `memcpy` is one copy within a process.
"""

import argparse
import itertools
import json
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import torch

from afserve.clock import MonotonicClock
from afserve.comm.disk.passes import CacheMemory
from afserve.comm.kv.carriers.carried import CarriedWires, memory_for
from afserve.comm.kv.carriers.table import CARRIERS, open_carrier
from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.reach import listen_here
from afserve.comm.kv.socket_wires import SocketWires
from afserve.comm.transports.entrance import listen_on
from afserve.engine.kv.blocks import BlockPool, block_hash
from afserve.engine.kv.store import PooledBlocks
from afserve.kernels.cache import LayerShape
from afserve.kernels.ops import open_ops
from bench.m2n_hosts import ADDRESSES, enter, possible, two_hosts
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "kv.jsonl"
MIB = 1 << 20
SIZES = (1, 4, 16, 64, 256, 1024)
SHAPES = {
    "DeepSeek's latent rows": [LayerShape(1, 576)] * 8,  # a block of 16 tokens has 144 KiB
    "keys and values of 8 heads": [LayerShape(8, 128, 128)] * 4,  # 256 KiB, in tiles
}
BLOCK_TOKENS, DTYPE = 16, torch.bfloat16
SHARED, LOOPBACK, NAMESPACES = "shm", "tcp", "namespaces"
SLOTS, PIECE_BYTES = 8, 2 << 20  # of plain copies
_ASLEEP = 0.002  # seconds until who was told to wait does
_SPIN = 200  # looks at a counter before a core is given away


@dataclass(frozen=True, slots=True)
class Case:
    over: str
    shape: str
    sizes: tuple[int, ...]
    hosts: tuple[str, str] | None = None

    def address(self, end: int) -> str:
        return ADDRESSES[end] if self.hosts else "127.0.0.1"


class Cache:
    """A KV cache without a model: what `PooledBlocks` needs of `KvCache`."""

    def __init__(self, shape: str, blocks: int) -> None:
        self._memory = open_ops("cpu", 1).open_cache(SHAPES[shape], blocks, BLOCK_TOKENS, DTYPE)
        for tensor in itertools.chain.from_iterable(self._memory.layers):
            tensor.zero_()  # the host gives memory when it is written first, which takes longer than a transfer
        self.pool = BlockPool(blocks, BLOCK_TOKENS)
        self.block_bytes = self._memory.block_bytes

    def memory(self, blocks: Sequence[int]) -> CacheMemory:
        return CacheMemory(self._memory.memory, blocks)


class End:
    """One process' end: that of the owner (0) or of the puller (1)."""

    def __init__(self, case: Case, end: int, blocks: int) -> None:
        self.news = threading.Event()
        self.cache = Cache(case.shape, blocks)
        self.store = PooledBlocks(self.cache)  # type: ignore[arg-type]
        self.wires = self._wires(case, case.address(end))
        self.wires.start()
        self.exchange = Exchange(self.store, self.wires, MonotonicClock())

    def _wires(self, case: Case, host: str) -> SocketWires | CarriedWires:
        size = self.cache.block_bytes
        listener = listen_here() if case.over == SHARED else listen_on(host)
        if case.over not in CARRIERS:
            return SocketWires(listener, "t", {}, size, self._woken, shares=case.over == SHARED)
        memory = memory_for(size)
        carrier = open_carrier(case.over, host, memory)

        def connected(wake: Callable[[], None]) -> SocketWires:
            return SocketWires(listener, "t", {}, size, wake)

        return CarriedWires(connected, carrier, memory, size, self.news.set, MonotonicClock())

    def _woken(self) -> None:
        """By the thread of the sockets."""
        if isinstance(self.wires, SocketWires):
            self.wires.ring()

    def turn(self) -> None:
        """As a node that has nothing else to do (`control/node/attention.py`)."""
        self.exchange.turn(0.02, lingers=True)
        if not (self.exchange.eager or self.exchange.ended):
            if isinstance(self.wires, SocketWires):
                self.wires.sleep(0.001)
                return
            self.news.wait(0.001)
        self.news.clear()


def chain(number: int, blocks: int) -> list[bytes]:
    names, parent = [], b"root"
    for index in range(blocks):
        parent = block_hash(parent, [number, index])
        names.append(parent)
    return names


class Plain:
    """The slots of two processes that only copy: words that count pieces in and out, then memory."""

    def __init__(self, name: str | None = None) -> None:
        size = 128 + SLOTS * PIECE_BYTES
        self.memory = SharedMemory(name, create=name is None, size=size)
        self._counts = self._bytes(0, 128).cast("Q")
        self.name = self.memory.name

    def reset(self) -> None:
        self._counts[0] = self._counts[8] = 0

    def put(self, source: memoryview) -> None:
        for number, at in enumerate(range(0, len(source), PIECE_BYTES), 1):
            self._until(8, number - SLOTS)
            piece = source[at : at + PIECE_BYTES]
            self._slot(number)[: len(piece)] = piece
            self._counts[0] = number

    def get(self, into: memoryview) -> None:
        for number, at in enumerate(range(0, len(into), PIECE_BYTES), 1):
            self._until(0, number)
            piece = into[at : at + PIECE_BYTES]
            piece[:] = self._slot(number)[: len(piece)]
            self._counts[8] = number

    def _slot(self, number: int) -> memoryview:
        at = 128 + number % SLOTS * PIECE_BYTES
        return self._bytes(at, at + PIECE_BYTES)

    def _bytes(self, begin: int, end: int) -> memoryview:
        assert self.memory.buf is not None, "it is open"
        return self.memory.buf[begin:end]

    def _until(self, word: int, number: int) -> None:
        looks = 0
        while self._counts[word] < number:
            looks += 1
            if looks % _SPIN == 0:
                time.sleep(0)

    def close(self) -> None:
        self._counts.release()
        self.memory.close()


def owner(control: Connection, case: Case) -> None:
    """The other process: holds blocks that are asked for, copies and streams plain bytes."""
    torch.set_num_threads(1)
    if case.hosts:
        enter(case.hosts[0])
    largest = case.sizes[-1] // Cache(case.shape, 1).block_bytes + 1
    end = End(case, 0, largest * 33 // 32 + 33)
    blocks, names = end.store.reserve(largest, copies=False), chain(0, largest)
    end.store.fill(blocks, names, bytearray(largest * end.cache.block_bytes))
    for block, name in zip(blocks, names, strict=True):
        end.store.publish(block, name)
    end.store.release(blocks)
    server = socket.create_server((case.address(0), 0))
    control.send((end.wires.address, server.getsockname()))
    plain = Plain(control.recv())
    stream, _ = server.accept()
    data = memoryview(bytearray(b"x" * case.sizes[-1]))
    while (what := _said(control, end)) is not None:
        kind, size = what
        if kind == "wait":
            control.send(kind)
            kind, size = control.recv()
        if kind == "stream":
            stream.sendall(data[:size])
        else:
            plain.put(data[:size])
    end.exchange.close()
    plain.close()


def _said(control: Connection, end: End) -> tuple[str, int] | None:
    while not control.poll():
        end.turn()
    found: tuple[str, int] | None = control.recv()
    return found


@contextmanager
def opened(case: Case) -> Iterator[tuple[dict[str, Callable[[int], None]], Callable[[str], None]]]:
    """Ways to move so many bytes from another process, by name, and what is called before each."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=owner, args=(there, case), daemon=True)
    process.start()
    address, plain_address = here.recv()
    if case.hosts:
        enter(case.hosts[1])
    plain, stream = Plain(), socket.create_connection(plain_address)
    here.send(plain.name)
    end = End(case, 1, (case.sizes[-1] // Cache(case.shape, 1).block_bytes + 1) * 33 // 32 + 33)
    into, source = (memoryview(bytearray(b"y" * case.sizes[-1])) for _ in range(2))
    pool, size_of_block = end.cache.pool, end.cache.block_bytes
    names = chain(0, case.sizes[-1] // size_of_block)

    def pull(size: int) -> None:
        blocks = size // size_of_block
        end.exchange.pull(address, names[:blocks], 60.0, request=0, generation=0)
        while not end.exchange.ended:
            end.turn()
        found = end.exchange.ended.pop()
        assert found.received == blocks, found

    def prepare(way: str) -> None:
        pool.release(pool.allocate(pool.available))
        if way in ("stream", "copies"):
            plain.reset()
            here.send(("wait", 0))
            here.recv()
        time.sleep(_ASLEEP)

    def streamed(size: int) -> None:
        here.send(("stream", size))
        view = into[:size]
        while view:
            view = view[stream.recv_into(view) :]

    def copied(size: int) -> None:
        here.send(("copies", size))
        plain.get(into[:size])

    def memcpy(size: int) -> None:
        into[:size] = source[:size]

    try:
        yield {"kv": pull, "stream": streamed, "copies": copied, "memcpy": memcpy}, prepare
    finally:
        here.send(None)
        end.exchange.close()
        process.join(10)
        plain.close()
        plain.memory.unlink()


def transfers(case: Case, turns: int) -> Iterator[dict[str, object]]:
    block = Cache(case.shape, 1).block_bytes
    with opened(case) as (ways, prepare):
        ways.pop("stream" if case.over == SHARED else "copies")
        for size in (max(1, size // block) * block for size in case.sizes):
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(turns + 1):
                for way, act in ways.items():
                    prepare(way)
                    began = time.perf_counter()
                    act(size)
                    seconds[way] += [time.perf_counter() - began] if turn else []
            yield row(case, size, seconds)


def row(case: Case, size: int, seconds: dict[str, list[float]]) -> dict[str, object]:
    peer = "copies" if case.over == SHARED else "stream"
    shares = [other / own for own, other in zip(seconds["kv"], seconds[peer], strict=True)]
    rates = {way: size / statistics.median(taken) / 1e9 for way, taken in seconds.items()}
    share = statistics.median(shares)
    print(
        f"{case.over:10} {case.shape:27} {size / MIB:7.1f} MiB   KV {rates['kv']:6.2f} GB/s   {peer} "
        f"{rates[peer]:6.2f}   memcpy {rates['memcpy']:6.2f}   {share:.0%} ({min(shares):.0%} to {max(shares):.0%})",
        flush=True,
    )
    return {
        "what": "transfer", "over": case.over, "shape": case.shape, "bytes": size, "gb_s": rates,
        "share": share, "share_spread": [min(shares), max(shares)], "turns": len(shares),
    }  # fmt: skip


def measured(over: str, shape: str, sizes: tuple[int, ...], turns: int) -> list[dict[str, object]]:
    if over == NAMESPACES and not possible():
        print("not measured: network namespaces need Linux, root and ip(8)")
        return []
    with two_hosts() if over == NAMESPACES else nullcontext() as hosts:
        return list(transfers(Case(over, shape, sizes, hosts), turns))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kv_transfer", description=(__doc__ or "").split("\n")[0]
    )
    ways = [SHARED, LOOPBACK, NAMESPACES, *CARRIERS]
    parser.add_argument("--over", nargs="+", default=[SHARED, LOOPBACK], choices=ways, help="shm and tcp")
    parser.add_argument("--shape", choices=range(len(SHAPES)), type=int, help="only this one")
    parser.add_argument("--mib", type=int, nargs="+", default=SIZES, help="sizes, ascending")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--save", nargs="?", const=str(OUT), help="append rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes, known = tuple(mib * MIB for mib in options.mib), origin()
    shapes = list(SHAPES) if options.shape is None else [list(SHAPES)[options.shape]]
    for over in options.over:
        for shape in shapes:
            rows = measured(over, shape, sizes, options.turns)
            if options.save:
                with Path(options.save).open("a") as file:
                    file.writelines(json.dumps({**one, **known}) + "\n" for one in rows)


if __name__ == "__main__":
    main()
