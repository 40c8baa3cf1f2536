"""How fast KV blocks move between two processes, and what `--kv-copies` costs decoding.

    python -m bench.kv                  # 1 MiB to 256 MiB, over a Unix socket and tcp, beside a plain stream and memcpy
    python -m bench.kv --over mooncake nixl dist   # payloads by these libraries, beside a plain stream over tcp
    python -m bench.kv --copies 10      # ten pairs of turns with and without copies

A transfer is everything from the wish to the last block being findable: names, read, checksum, socket, check, write.
The plain stream sends as many bytes from one buffer into another; memcpy copies as many within one process.
"""

import argparse
import json
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from afserve.clock import MonotonicClock
from afserve.comm.kv.carried import CarriedWires, memory_for
from afserve.comm.kv.carriers.table import CARRIERS, open_carrier
from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.reach import listen_here, listen_on
from afserve.comm.kv.socket_wires import SocketWires
from afserve.engine.blocks import BlockPool, block_hash
from afserve.engine.kv_cache import Fingerprint, KvBlocks
from afserve.engine.kv_store import PooledBlocks
from afserve.engine.request import SamplingParams
from afserve.kernels.cache import LayerShape
from afserve.kernels.ops import open_ops
from afserve.llm import LLM
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "kv.jsonl"
MIB = 1 << 20
SIZES = (1, 4, 16, 64, 256)
SHAPE = [LayerShape(1, 576)] * 8  # DeepSeek's latent rows: a block of 16 tokens has 144 KiB
BLOCK_TOKENS, DTYPE = 16, torch.bfloat16
PAIRS_PER_START = 4
PROMPTS = [f"def function_{n}(a, b):\n" * 20 for n in range(8)]


class Cache:
    """A KV cache without a model: what `PooledBlocks` needs of `KvCache`."""

    def __init__(self, blocks: int) -> None:
        self.memory = open_ops("cpu", 1).open_cache(SHAPE, blocks, BLOCK_TOKENS, DTYPE)
        self.pool = BlockPool(blocks, BLOCK_TOKENS)
        self.block_bytes = self.memory.block_bytes
        self.fingerprint = Fingerprint("bench", "bfloat16", "v1", BLOCK_TOKENS)

    def read(self, blocks: list[int]) -> KvBlocks:
        return KvBlocks(self.fingerprint, self.memory.read(blocks))

    def write(self, blocks: list[int], contents: KvBlocks) -> None:
        self.memory.write(blocks, contents.bytes_NY)


class End:
    """One process' end."""

    def __init__(self, kind: str, blocks: int) -> None:
        self.news = threading.Event()
        self.cache = Cache(blocks)
        self.store = PooledBlocks(self.cache)  # type: ignore[arg-type]
        self.wires = self._wires(kind)
        self.wires.start()
        self.exchange = Exchange(self.store, self.wires, MonotonicClock())

    def _wires(self, kind: str) -> SocketWires | CarriedWires:
        size = self.cache.block_bytes

        def connected(wake: Callable[[], None]) -> SocketWires:
            return SocketWires(listener_of(kind), "t", {}, size, wake)

        if kind not in CARRIERS:
            return connected(self.news.set)
        memory = memory_for(size)
        carrier = open_carrier(kind, "127.0.0.1", memory)
        return CarriedWires(connected, carrier, memory, size, self.news.set, MonotonicClock())

    def turn(self) -> None:
        self.exchange.turn(0.02)
        if not self.exchange.busy or not self.news.is_set():
            self.news.wait(0.001)
        self.news.clear()


def listener_of(kind: str) -> socket.socket:
    return listen_here() if kind == "unix" else listen_on("127.0.0.1")


def chain(number: int, blocks: int) -> list[bytes]:
    names, parent = [], b"root"
    for index in range(blocks):
        parent = block_hash(parent, [number, index])
        names.append(parent)
    return names


def owner(control: Connection, kind: str) -> None:
    """The other process: holds blocks that are asked for, and streams plain bytes."""
    torch.set_num_threads(1)
    largest = SIZES[-1] * MIB // Cache(1).block_bytes + 1
    end = End(kind, largest * 33 // 32 + 33)
    names = chain(0, largest)
    blocks = end.store.reserve(largest, copies=False)
    for block, name in zip(blocks, names, strict=True):
        end.store.publish(block, name)
    end.store.release(blocks)
    plain = listener_of(kind)
    control.send((end.wires.address, plain.getsockname()))
    stream, _ = plain.accept()
    data = bytearray(SIZES[-1] * MIB)
    while True:
        if control.poll():
            what, size = control.recv()
            if what == "stream":
                stream.sendall(memoryview(data)[:size])
            elif what == "end":
                break
        end.turn()
    end.exchange.close()
    stream.close()
    plain.close()


def median_seconds(act: Callable[[], None], turns: int = 5) -> float:
    found = []
    for _ in range(turns + 1):
        began = time.perf_counter()
        act()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def transfers(kind: str) -> list[dict[str, object]]:
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=owner, args=(there, kind), daemon=True)
    process.start()
    address, plain_address = here.recv()
    stream = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    stream.connect(plain_address)
    largest = SIZES[-1] * MIB // Cache(1).block_bytes + 1
    end = End(kind, largest * 33 // 32 + 33)
    into, source = bytearray(SIZES[-1] * MIB), bytearray(SIZES[-1] * MIB)
    rows = []
    for size in (mib * MIB for mib in SIZES):
        blocks = max(1, size // end.cache.block_bytes)
        size = blocks * end.cache.block_bytes

        def pull(blocks: int = blocks) -> None:
            end.exchange.pull(address, chain(0, blocks), 60.0, request=0, generation=0)
            while not end.exchange.ended:
                end.turn()
            found = end.exchange.ended.pop()
            assert found.received == blocks, found
            pool = end.cache.pool
            pool.release(pool.allocate(pool.available))  # everything is forgotten

        def plain(size: int = size) -> None:
            here.send(("stream", size))
            view = memoryview(into)[:size]
            while view:
                view = view[stream.recv_into(view) :]

        def memcpy(size: int = size) -> None:
            memoryview(into)[:size] = memoryview(source)[:size]

        seconds = [median_seconds(act) for act in (pull, plain, memcpy)]
        rates = dict(zip(("kv", "stream", "memcpy"), (size / s / 1e9 for s in seconds), strict=True))
        rows.append({"what": "transfer", "over": kind, "bytes": size, "gb_s": rates})
        print(
            f"{kind:8} {size / MIB:7.1f} MiB   KV {rates['kv']:6.2f} GB/s   plain stream {rates['stream']:6.2f}   "
            f"memcpy {rates['memcpy']:6.2f}   {rates['kv'] / rates['stream']:.0%} of the stream"
        )
    here.send(("end", 0))
    end.exchange.close()
    stream.close()
    process.join(10)
    return rows


def decoding(llm: LLM, turn: str) -> float:
    """Tokens per second of eight long streams. No prefix is known from another `turn`."""
    asked = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    found = llm.generate([f"# {turn}\n{prompt}" for prompt in PROMPTS], asked)
    return sum(len(one.token_ids) for one in found) / (time.perf_counter() - began)


def overhead(pairs: int) -> dict[str, object]:
    """Pairs of turns of two deployments that live at once; both are started anew every few pairs."""
    ratios: list[float] = []
    without: list[float] = []
    while len(ratios) < pairs:
        sizes = {"attention": 2, "experts": 1}
        with LLM("nano", kv_copies=0, **sizes) as plain, LLM("nano", kv_copies=1, **sizes) as copying:
            both = {0: plain, 1: copying}
            for copies, llm in both.items():
                decoding(llm, f"warm {copies}")
            for _ in range(min(PAIRS_PER_START, pairs - len(ratios))):
                pair = len(ratios)
                order = (0, 1) if pair % 2 else (1, 0)
                rate = {copies: decoding(both[copies], f"{pair} {copies}") for copies in order}
                ratios.append(rate[1] / rate[0])
                without.append(rate[0])
                print(f"pair {pair}: {rate[0]:,.0f} tokens/s without, {rate[1]:,.0f} with, {ratios[-1]:.3f}")
    print(f"with copies: {statistics.median(ratios):.3f} of the throughput (median of {pairs} pairs)")
    row = {"what": "copies", "pairs": pairs, "median": statistics.median(ratios)}
    return {**row, "low": min(ratios), "high": max(ratios), "tokens_per_second": statistics.median(without)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kv", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--copies", type=int, metavar="PAIRS", help="measure what copies cost instead")
    parser.add_argument(
        "--over", nargs="+", default=["unix", "tcp"], choices=["unix", "tcp", *CARRIERS], help="unix and tcp"
    )
    parser.add_argument("--save", nargs="?", const=str(OUT), help="append rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.copies:
        rows = [overhead(options.copies)]
    else:
        rows = [row for kind in options.over for row in transfers(kind)]
    if options.save:
        with Path(options.save).open("a") as file:
            file.writelines(json.dumps({**row, **origin()}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
