"""How fast KV comes back from the disk, beside the disk's own sequential read, or from host memory, beside a plain copy
of as many bytes, and what that does to a first token.

    python -m bench.kv_tiers --folder DIR            # blocks of three sizes, restored from a cold page cache
    python -m bench.kv_tiers --host                  # the same blocks, restored from host memory
    python -m bench.kv_tiers --folder DIR --first    # first tokens of 3,000-token follow-ups, three ways
    python -m bench.kv_tiers --folder DIR --deepspeed  # by DeepSpeed's asynchronous I/O, also where threads are faster

A restoration is everything from the wish to the last block being findable in memory: read, checksum, copy. The plain
read fills one buffer after another from the same bytes of the same file, in the same way, which was measured as fastest
at first. A disk of a virtual machine changes its rate within a second, so a round is one short read of each kind, of
the same bytes, out of the page cache before each, and the order alternates. The share is the median over rounds of a
restoration's rate by that of the plain read beside it. --first starts nano twice: the first life writes the prompts,
the second reads them. Host memory is measured in that second life too: prompts that were read or computed there have
left a cache for four of them when they are asked again.
"""

import argparse
import functools
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from afserve.clock import MonotonicClock
from afserve.comm.disk.deepspeed_library import libraries
from afserve.comm.disk.files import File
from afserve.comm.disk.passes import CacheMemory
from afserve.comm.disk.reader import DiskReader
from afserve.comm.disk.store import DiskStore
from afserve.comm.disk.ways import DEEPSPEED_WAYS, WAYS, Measured, Way, fastest, measure, read_seconds, save
from afserve.comm.disk.workers import DiskWorkers
from afserve.doors.llm import LLM
from afserve.engine.kv.blocks import BlockPool, block_hash
from afserve.engine.kv.cache import Fingerprint, KvBlocks
from afserve.engine.kv.disk import DiskTier
from afserve.engine.kv.host import HostArena, HostTier
from afserve.engine.kv.store import PooledBlocks
from afserve.engine.kv.tiers import KvTiers, Tier
from afserve.engine.scheduling.request import SamplingParams
from afserve.engine.stats import AttentionStats
from afserve.kernels.cache import LayerShape
from afserve.kernels.devices.device import Event
from afserve.kernels.ops import open_ops
from afserve.member import attention_node
from bench.origin import ROOT, origin

OUT = ROOT / "bench" / "results" / "kv_tiers.jsonl"
MIB = 1 << 20
BLOCK_TOKENS = 16
PARTS = 8  # of what is kept: rounds go through them
_BEHIND = 3  # rounds, after which a cache for four prompts has nothing of a prompt any more
_HOST, _WARMING = (
    "64MiB",
    26,
)  # nano's prompts of 3,000 tokens, of which host memory is full: none of it is new then
SHAPES = {
    "nano": [LayerShape(1, 96)] * 5,  # 15 KiB
    "8 layers of DeepSeek's latent rows": [LayerShape(1, 576)] * 8,  # 144 KiB
    "DeepSeek-V3": [LayerShape(1, 576)] * 61,  # 1.1 MiB
}


class Cache:
    """A KV cache without a model: what `PooledBlocks` and `KvTiers` need of `KvCache`."""

    def __init__(self, shape: list[LayerShape], blocks: int) -> None:
        self.on_idle = self.on_evict = None
        self.paged = open_ops("cpu", 1).open_cache(shape, blocks, BLOCK_TOKENS, torch.bfloat16)
        self.pool = BlockPool(
            blocks,
            BLOCK_TOKENS,
            on_idle=lambda found: self.on_idle and self.on_idle(found),
            on_evict=lambda found: self.on_evict and self.on_evict(found),
        )
        self.block_bytes = self.paged.block_bytes
        self.fingerprint = Fingerprint("bench", "bfloat16", "v1", BLOCK_TOKENS)

    def copy_out(self, blocks: list[int], rows_NY: torch.Tensor) -> Event | None:
        return self.paged.copy_out(blocks, rows_NY)

    def read(self, blocks: list[int]) -> KvBlocks:
        return KvBlocks(self.fingerprint, self.paged.read(blocks))

    def write(self, blocks: list[int], contents: KvBlocks) -> None:
        self.paged.write(blocks, contents.bytes_NY)

    @property
    def part_bytes(self) -> int:
        return self.paged.part_bytes

    def parts(self, blocks: list[int]) -> list[list[memoryview]]:
        return self.paged.parts(blocks)

    def memory(self, blocks: list[int]) -> CacheMemory | None:
        return CacheMemory(self.paged.memory, blocks) if self.paged.memory else None

    def clear(self, blocks: list[int]) -> None:
        for layer in range(len(self.paged.layers)):
            self.paged.clear_blocks(layer, blocks)


class Node:
    """A cache with a tier, and the loop around it: a disk's where there is a folder, else host memory."""

    def __init__(
        self, shape: list[LayerShape], total: int, folder: Path | None = None, way: Way | None = None
    ) -> None:
        self.news, self.way = threading.Event(), way or Way()
        self.count = max(1, total // Cache(shape, 1).block_bytes)
        self.cache = Cache(shape, self.count * 32 // 31 + 33)  # a thirty-second stays free for requests
        for tensor in itertools.chain.from_iterable(self.cache.paged.layers):
            tensor.fill_(1)  # as of a node that has served for a while: its memory is there
        blocks, clock, size = PooledBlocks(self.cache), MonotonicClock(), self.cache.block_bytes  # type: ignore[arg-type]
        self.disk = self.arena = None
        tier: Tier
        if folder is None:
            self.arena = HostArena(self.count * size, size)
            self.copied = torch.ones(self.count // PARTS * size, dtype=torch.uint8)
            tier = HostTier(blocks, self.arena, clock)
        else:
            store = DiskStore.open(
                folder, self.cache.fingerprint.digest, size, 2 * total, direct=self.way.direct
            )
            self.disk = DiskWorkers(store, self.news.set, way=self.way)
            self.disk.start()
            tier = DiskTier(blocks, self.disk, clock)
        self.tiers = KvTiers(self.cache, blocks, [tier], clock)  # type: ignore[arg-type]
        self.names, parent = [], b"root"
        for number in range(self.count):
            parent = block_hash(parent, [number])
            self.names.append(parent)

    def turn_until(self, ended: Callable[[], bool]) -> None:
        while not ended():
            self.tiers.turn(0.02)
            if self.disk is not None:
                self.news.wait(0.001)
                self.news.clear()

    def fill(self) -> float:
        """Keep all blocks; seconds until the tier has them."""
        pool = self.cache.pool
        blocks = pool.allocate(self.count)
        for block, name in zip(blocks, self.names, strict=True):
            pool.publish(block, name)
        began = time.perf_counter()
        pool.release(blocks)
        if self.arena is not None:
            self.forget()
        self.turn_until(lambda: self.tiers.settled)
        return time.perf_counter() - began

    def forget(self) -> None:
        """Everything in the cache."""
        pool = self.cache.pool
        pool.release(pool.allocate(pool.available))

    def restore(self, first: int, count: int) -> float:
        """Seconds until `count` blocks from this one on are in memory, which has none of them before."""
        self.turn_until(lambda: not self.tiers.busy)
        self.forget()
        began = time.perf_counter()
        assert self.tiers.restore(self.names[first : first + count], 600.0) is not None
        self.turn_until(lambda: bool(self.tiers.ended))
        seconds = time.perf_counter() - began
        (found,) = self.tiers.ended
        self.tiers.ended.clear()
        assert sum(found.received.values()) == count, found
        return seconds

    def plain(self, first: int, count: int) -> float:
        """Seconds for the same bytes into buffers; of host memory into other memory, in one copy."""
        if self.arena is not None:
            began = time.perf_counter()
            self.copied.view(count, -1).copy_(self.arena.rows_SY[first : first + count])
            return time.perf_counter() - began
        assert self.disk is not None
        pitch = self.disk.store.kind.pitch
        file, reader = self.plainly
        return read_seconds(file, range(first * pitch, (first + count) * pitch), self.way, reader)

    @functools.cached_property
    def plainly(self) -> tuple[File, DiskReader | None]:
        """The blocks' file once more, and a process of its own that reads it where the way has one."""
        file, queue = File(self.data, direct=self.way.direct), self.way.queue
        if queue is None:
            return file, None
        reader = DiskReader([file], queue, queue.asks, self.way.piece_bytes, tell=print)
        reader.start()
        assert reader.wait_ready(), "the process that reads has ended"
        return file, reader

    def close(self) -> None:
        self.tiers.close()
        if self.disk is not None:
            file, reader = self.plainly
            if reader is not None:
                reader.close()
            file.close()

    def cold(self) -> None:
        """What is read next is not in the page cache."""
        if self.disk is not None:
            forget(self.data)

    @property
    def data(self) -> Path:
        assert self.disk is not None
        return self.disk.store.folder / "data"


def forget(path: Path) -> None:
    """Out of the page cache."""
    file = File(path)
    file.forget()
    file.close()


def measured(folder: Path, only: bool) -> Measured:
    """The fastest way that is here, or with `only` the fastest of DeepSpeed's."""
    here = DEEPSPEED_WAYS if libraries() is not None else ()
    found = measure(folder, ways=(*WAYS, *here), tell=print)
    for one in found:
        print(f"{one.rate / 1e9:5.2f} GB/s by {one.way}, {one.cost * 1e9:.2f} s of a core for each GB")
    return fastest(one for one in found if one.way.queue is not None or not only)


def restores(folder: Path, mib: int, rounds: int, only: bool) -> list[dict[str, object]]:
    rows = []
    way = measured(folder, only).way
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory(dir=folder) as own:
            node = Node(shape, mib * PARTS * MIB, Path(own), way)
            rows.append({"what": _named("restore", only), "by": str(way), **in_turns(node, name, rounds)})
    return rows


def _named(what: str, only: bool) -> str:
    """Rows of a way that was asked for do not stand beside those of the one that is fastest."""
    return f"{what} by DeepSpeed" if only else what


def host_restores(mib: int, rounds: int) -> list[dict[str, object]]:
    return [
        {"what": "host restore", **in_turns(Node(shape, mib * PARTS * MIB), name, rounds)}
        for name, shape in SHAPES.items()
    ]


def in_turns(node: Node, name: str, rounds: int) -> dict[str, object]:
    """Restorations and plain reads of the same blocks, one after another."""
    written = node.count * node.cache.block_bytes / node.fill() / 1e9
    part = node.count // PARTS
    size = part * node.cache.block_bytes
    found: dict[str, list[float]] = {"restore": [], "plain": []}
    for turn in range(-2, rounds):
        first = turn % PARTS * part
        acts = [("restore", node.restore), ("plain", node.plain)]
        for what, act in acts if turn % 2 else acts[::-1]:
            node.cold()
            rate = size / act(first, part) / 1e9
            if turn >= 0:  # others warm what is used
                found[what].append(rate)
    node.close()
    rates = {what: statistics.median(one) for what, one in found.items()}
    shares = [r / p for r, p in zip(found["restore"], found["plain"], strict=True)]
    share, (low, _, high) = statistics.median(shares), statistics.quantiles(shares, n=4)
    print(
        f"{name:36} {size / MIB:8,.0f} MiB   restored {rates['restore']:5.2f} GB/s   plain "
        f"{rates['plain']:5.2f} GB/s   {share:4.0%} (half of the rounds {low:.0%} to {high:.0%})   "
        f"kept {written:5.2f} GB/s"
    )
    row = {"shape": name, "block_bytes": node.cache.block_bytes, "bytes": size, "rounds": rounds}
    quartiles = {"share": share, "quartiles": [low, high]}
    return {**row, "gb_s": rates, "write_gb_s": written, **quartiles, "all": found}


def prompts(count: int, tokens: int) -> list[list[int]]:
    """Ids that no two prompts share from the first block on."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(10, 400, (tokens,), generator=generator).tolist() for _ in range(count)]


def first_tokens(folder: Path, rounds: int, model: str, tokens: int, only: bool) -> dict[str, object]:
    """Milliseconds to the first token of a prompt that goes on from one that was asked in an earlier life, from one
    that has left the cache since it was asked, and from none."""
    total = rounds + _BEHIND
    known, unknown = prompts(total, tokens), prompts(2 * total + _WARMING, tokens)[total:]
    asked = SamplingParams(max_tokens=1, temperature=0.0)
    found: dict[str, list[float]] = {"disk": [], "host": [], "computed": []}
    best = measured(folder, only)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        save(Path(own), best)
        settings: dict[str, Any] = {"attention": 1, "experts": 1, "kv_ssd": own, "kv_tokens": 4 * tokens}
        with LLM(model, **settings) as llm:
            for prompt in known:
                llm.generate([prompt], asked)
        for path in Path(own).rglob("data"):
            forget(path)
        with LLM(model, kv_host=_HOST, **settings) as llm:
            for prompt in unknown[total:]:
                llm.generate([prompt], asked)
            for number, (old, new) in enumerate(zip(known, unknown, strict=False)):
                acts = [("disk", [*old, *new[:20]]), ("computed", [*new, *old[:20]])]
                if number >= _BEHIND:
                    acts.append(("host", [*known[number - _BEHIND], *new[20:40]]))
                for what, prompt in acts[number % 3 :] + acts[: number % 3]:
                    began = time.perf_counter()
                    (answer,) = llm.generate([prompt], asked)
                    found[what].append(1e3 * (time.perf_counter() - began))
                    cached = answer.cached_tokens
                    assert (cached > 0.9 * tokens) == (what != "computed"), (
                        f"{what}: {cached} tokens were found"
                    )
            check_hits(llm, tokens, rounds)
    medians = {what: statistics.median(one) for what, one in found.items()}
    print(
        f"{model}, {tokens:,} tokens and 20 more: first token after {medians['host']:,.1f} ms from host memory, "
        f"{medians['disk']:,.1f} ms from the disk, {medians['computed']:,.1f} ms computed (median of {rounds})"
    )
    return {
        "what": _named("first token", only),
        "by": str(best.way),
        "model": model,
        "tokens": tokens,
        "rounds": rounds,
        "ms": medians,
        "all": found,
    }


def check_hits(llm: LLM, tokens: int, rounds: int) -> None:
    """What was measured as found in host memory was found there, by what the node says within a few heartbeats."""
    wanted, until = 0.9 * rounds * tokens, time.monotonic() + 10.0
    while time.monotonic() < until:
        member = llm.run.controller.members.last_at(attention_node(0))
        stats = None if member is None else member.stats
        hits = stats.tiers.host.hit_tokens if isinstance(stats, AttentionStats) else 0
        if hits >= wanted:
            return
        time.sleep(0.1)
    raise AssertionError(f"{hits} tokens were found in host memory, {wanted:.0f} at least were asked again")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kv_tiers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    parser.add_argument("--host", action="store_true", help="measure host memory instead of a disk")
    parser.add_argument("--first", action="store_true", help="measure first tokens instead")
    parser.add_argument("--deepspeed", action="store_true", help="measure no other way than DeepSpeed's")
    parser.add_argument("--mib", type=int, default=128, help="restored at once, an eighth of what is kept")
    parser.add_argument("--rounds", type=int, help="64 restorations, 9 first tokens")
    parser.add_argument("--model", default="nano", help="for --first")
    parser.add_argument("--tokens", type=int, default=3000, help="of the prompt, for --first")
    parser.add_argument("--save", nargs="?", const=str(OUT), help="append rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.folder is None and (options.first or not options.host):
        parser.error("--folder: say which disk is to be measured, or --host")
    if options.host and not options.first:
        rows = host_restores(options.mib, options.rounds or 64)
    elif options.first:
        rows = [
            first_tokens(
                options.folder, options.rounds or 9, options.model, options.tokens, options.deepspeed
            )
        ]
    else:
        rows = restores(options.folder, options.mib, options.rounds or 64, options.deepspeed)
    if options.save:
        with Path(options.save).open("a") as file:
            file.writelines(json.dumps({**row, **origin()}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
