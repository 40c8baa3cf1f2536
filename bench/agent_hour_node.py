"""One node of `bench.agent_hour`: the product's own pool, names, tiers and restorations over bytes that say whose they
are; what a model and a disk take is added as virtual time.
"""

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from afserve.clock import FakeClock
from afserve.comm.disk.store import DiskStore
from afserve.comm.disk.workers import DiskWorkers
from afserve.control.affinity import Chain
from afserve.engine.kv.blocks import BlockPool, Hash
from afserve.engine.kv.cache import Fingerprint, KvCache
from afserve.engine.kv.disk import DiskTier
from afserve.engine.kv.host import HostArena, HostTier
from afserve.engine.kv.kept_keys import KeptKeys
from afserve.engine.kv.moving.restoring import Restores
from afserve.engine.kv.store import PooledBlocks
from afserve.engine.kv.tiers import DISK, HOST, KvTiers, Restored, Tier
from afserve.engine.kv.told import ToldCache
from afserve.engine.scheduling.fair_share import FairShares, WaitingRequests
from afserve.engine.scheduling.open_requests import AHEAD_TOKENS
from afserve.engine.scheduling.request import GenerationRequest
from afserve.engine.scheduling.sequence import Sequence as Running
from afserve.engine.scheduling.sequence_blocks import SequenceBlocks
from afserve.engine.scheduling.turns import Turns

BLOCK = 64  # tokens
_BYTES = 64  # of a block here
_PATIENCE = 60.0  # real seconds for the disk's threads


@dataclass(frozen=True, slots=True)
class Machine:
    """What is modelled: tokens of prompts per second, bytes of a token, bytes per second of each tier and of the link
    between nodes, seconds per token of an answer. A token has DeepSeek-V3's 70 KB of KV; rates are ours."""

    prefill: float = 8_000.0
    token_bytes: float = 70e3
    host: float = 10e9
    disk: float = 3e9
    link: float = 5e9
    tpot: float = 0.02

    def reading(self, tier: str, blocks: int) -> float:
        """Seconds."""
        return blocks * BLOCK * self.token_bytes / (self.host if tier == HOST else self.disk)

    def moving(self, blocks: int) -> float:
        """Seconds from another node."""
        return blocks * BLOCK * self.token_bytes / self.link


class _Memory:
    """Rows of bytes, one for each block."""

    part_bytes, block_bytes = 0, _BYTES
    memory: tuple[()] = ()
    layers: tuple[()] = ()

    def __init__(self, blocks: int) -> None:
        self.rows_NY = torch.zeros(blocks, _BYTES, dtype=torch.uint8)

    def read(self, blocks: Sequence[int]) -> Tensor:
        return self.rows_NY[list(blocks)].clone()

    def copy_out(self, blocks: Sequence[int], rows_NY: Tensor) -> None:
        rows_NY.copy_(self.rows_NY[list(blocks)])

    def write(self, blocks: Sequence[int], rows_NY: Tensor) -> None:
        self.rows_NY[list(blocks)] = rows_NY


class BareKv(KvCache):
    """A cache without a model."""

    def __init__(self, blocks: int, clock: FakeClock) -> None:
        self.fingerprint = Fingerprint("bench", "bytes", "v1", BLOCK)
        self.on_evict = self.on_idle = self.on_part = self.on_forgotten = None
        self.group_of = []
        told: Any = {"on_evict": self._evicted, "on_idle": self._idle}
        self.pool = BlockPool(blocks, BLOCK, clock=clock, **told)
        self.own = _Memory(blocks)
        self._memory = cast(Any, self.own)


@dataclass
class Job:
    """A request at a node. Times are virtual seconds; `found` tokens of the prompt need not be computed."""

    request: GenerationRequest
    arrived: float
    output: tuple[int, ...]
    session: int
    sequence: Running | None = None
    found: int = 0
    began: float = 0.0
    first: float = 0.0
    rank: tuple[int, int, int] = (0, 0, 0)
    chain: Chain = ()

    @property
    def left(self) -> int:
        """Tokens of the prompt that are still to be computed."""
        return 0 if self.sequence is None else len(self.request.prompt_ids) - self.sequence.computed


@dataclass
class Tiered:
    """What lies below a node's cache, in blocks; a disk where there is a folder."""

    host: int = 0
    folder: Path | None = None
    disk: int = 1 << 20
    workers: DiskWorkers | None = field(init=False, default=None)

    def open(self, kv: KvCache, blocks: PooledBlocks, clock: FakeClock, told: ToldCache) -> KvTiers | None:
        found: list[Tier] = []
        below = keys = None
        if self.folder is not None:
            store = DiskStore.open(self.folder, kv.fingerprint.digest, _BYTES, self.disk * 512, spared=0)
            self.workers = DiskWorkers(store)
            self.workers.start()
            below, keys = DiskTier(blocks, self.workers, clock), KeptKeys(store.folder / "keys")
        if self.host:
            found.append(HostTier(blocks, HostArena(self.host * _BYTES, _BYTES), clock, below))
        if below is not None:
            found.append(below)
        if not found:
            return None
        tiers = KvTiers(kv, blocks, found, clock)
        told.look_below(tiers.holds, keys)
        return tiers


class _KnownRates(Restores):
    """What it measures would be this machine's disk."""

    def know(self, rates: dict[str, float]) -> None:
        self._rates = rates

    def _measure(self, restored: Restored) -> None:
        """It is known."""

    @property
    def reading(self) -> bool:
        return self._jobs.running > 0


class HourNode:
    """`prefill_rate` is as an attention node measures it."""

    def __init__(self, blocks: int, below: Tiered, machine: Machine, clock: FakeClock) -> None:
        self.kv = BareKv(blocks, clock)
        self.pool, self._machine, self._clock, self._below = self.kv.pool, machine, clock, below
        self.told = ToldCache(self.pool)
        self.kv.on_forgotten = self.told.gone
        self.blocks = PooledBlocks(self.kv)
        self.tiers = below.open(self.kv, self.blocks, clock, self.told)
        self.own = SequenceBlocks(self.pool, self.told)
        self.prefill_rate = machine.prefill
        size = int(BLOCK * machine.token_bytes)
        self.restores = _KnownRates(self.tiers, cast(Any, self), clock, BLOCK, size, lambda line: None, 1024)
        self.restores.know({HOST: machine.host, DISK: machine.disk})
        self.reads_until = 0.0  # when the disk is free
        self.queue, self._turns, self._came = WaitingRequests(FairShares()), Turns(), itertools.count()
        self._queued: dict[int, Job] = {}
        self.active: list[Job] = []  # those that have begun and have no token yet
        self.running: Job | None = None  # whose step is under way
        self.reading = 0  # jobs
        self.open: dict[int, tuple[int, Running]] = {}  # with the blocks that they will have at the end
        self.decoding: list[Job] = []
        self.ahead: deque[Job] = deque()
        self.ahead_tokens = 0

    @property
    def cache_tokens(self) -> int:
        return self.pool.blocks * BLOCK

    # ---- what `Restores` asks of an engine

    def usable_names(self, request: GenerationRequest) -> list[Hash]:
        return self.own.usable_names(request)

    def known(self, names: list[Hash]) -> int:
        return len(self.pool.match(names))

    def draw(self, row: str, what: str, seconds: float) -> None:
        """Nothing is drawn."""

    # ---- blocks

    def read(self, job: Job) -> bool:
        """Whether what of its beginning is worth it is restored: `take_read` has it when it has come."""
        return self.restores.restore(job.request)

    def take_read(self) -> dict[int, float]:
        """Requests whose beginnings have come, by handle, and when that is."""
        if self.tiers is None:
            return {}
        until, before = time.monotonic() + _PATIENCE, self._read_so_far()
        over = self.restores.turn(1.0)
        while self.restores.reading:
            over += self.restores.turn(1.0)
            assert time.monotonic() < until, "the disk's threads have stopped"
            time.sleep(0.0001)
        when = self._reading_until(before) if over else 0.0
        return {job.request.handle: when for job in over}

    def lend_below(self, names: list[Hash]) -> float:
        """Another node wants them: when those below this cache are in it."""
        if self.tiers is None:
            return self._clock.now()
        known, before, until = self.known(names), self._read_so_far(), time.monotonic() + _PATIENCE
        if not self.restores.bring(names):
            return self._clock.now()
        while self.tiers.brings(names[known]):
            self.restores.turn(1.0)
            assert time.monotonic() < until, "the disk's threads have stopped"
            time.sleep(0.0001)
        return self._reading_until(before)

    def _read_so_far(self) -> dict[str, int]:
        """Blocks, by tier."""
        stats = self.restores.stats()
        return {HOST: stats.host.bytes_read // _BYTES, DISK: stats.bytes_read // _BYTES}

    def _reading_until(self, before: dict[str, int]) -> float:
        """When what was read since then is here. The disk reads one after the other."""
        now, read = self._clock.now(), self._read_so_far()
        seconds = sum(self._machine.reading(tier, read[tier] - before[tier]) for tier in read)
        if read[DISK] == before[DISK]:
            return now + seconds
        self.reads_until = max(now, self.reads_until) + seconds
        return self.reads_until

    # ---- who waits

    def enqueue(self, job: Job) -> None:
        """By the product's turns."""
        sequence = Running.start(job.request, next(self._came), frozenset())
        sequence.lacks = self.lacking(sequence)
        left = [(one.group, one.lacks) for one in self.queue]
        left += [((one.request.tenant.name, one.request.priority), one.left) for one in self.active]
        sequence.turn = self._turns.next(sequence.group, sequence.lacks, left)
        self.queue.add(sequence)
        self._queued[job.request.handle] = job

    def lacking(self, sequence: Running) -> int:
        """Tokens of its prompt that are not here."""
        return len(sequence.tokens) - len(self.own.found(sequence)) * BLOCK

    def admit(self) -> bool:
        """Whether anybody begins now: in turn, as far as there is room."""
        before = len(self.active)
        while (sequence := self.queue.first()) is not None:
            job = self._queued[sequence.request.handle]
            if not self.begin(job):
                break
            self.queue.remove(sequence)
            del self._queued[sequence.request.handle]
            job.rank, job.began = sequence.prompt_rank, self._clock.now()
            self.active.append(job)
        return len(self.active) > before

    def whose_turn(self) -> Job | None:
        return min(self.active, key=lambda job: job.rank, default=None)

    def pull_beginning(self, job: Job, other: "HourNode") -> float:
        """What of its beginning the other node has and this one has not: when it is there. Over this link it is always
        sooner there than computed."""
        names = self.usable_names(job.request)
        here = self.blocks.find(names)
        when = other.lend_below(names) if len(here) < len(names) else self._clock.now()
        theirs = other.blocks.find(names)
        missing = names[len(here) : len(theirs)]
        room = self.blocks.reserve(len(missing), copies=False)
        if room:
            self.kv.own.write(room, other.kv.own.read(theirs[len(here) : len(here) + len(room)]))
        for block, name in zip(room, missing, strict=False):
            self.blocks.publish(block, name)
        other.blocks.release(theirs)
        self.blocks.release(here + room, awaited=True)
        return when + self._machine.moving(len(room))

    def begin(self, job: Job) -> bool:
        """Whether there is room: then its blocks are held, with what was found."""
        sequence = Running.start(job.request, 0, frozenset())
        self._turn()
        found, whole = self.own.found(sequence), -(-(len(sequence.tokens) + len(job.output)) // BLOCK)
        if not self.pool.can_grow(whole - len(found) + self._promised(), found):
            return False
        self.open[job.request.handle] = whole, sequence
        for block, name in zip(found, sequence.full_hashes(BLOCK), strict=False):
            assert bytes(self.kv.own.rows_NY[block, :16].tolist()) == name, "another block's bytes"
        self.own.hold(sequence, found)
        job.sequence, job.found = sequence, sequence.computed
        return True

    def _promised(self) -> int:
        """Blocks that those which have begun will still need."""
        return sum(whole - len(sequence.blocks) for whole, sequence in self.open.values())

    def compute(self, job: Job, tokens: int) -> None:
        """So many more of its tokens."""
        sequence = job.sequence
        assert sequence is not None
        before = sequence.computed
        self._turn()  # tiers let go of what they have brought
        grown = self.own.grow(sequence, tokens)
        assert grown, "it was promised"
        sequence.computed += tokens
        first, last = before // BLOCK, sequence.computed // BLOCK
        if fresh := sequence.full_hashes(BLOCK)[first:last]:
            rows = torch.frombuffer(bytearray(b"".join(name * 4 for name in fresh)), dtype=torch.uint8)
            self.kv._memory.write(sequence.blocks[first:last], rows.view(len(fresh), _BYTES))
        self.own.computed(sequence, before)

    def end(self, job: Job) -> None:
        """Its blocks are nobody's, and are kept below where there is something."""
        assert job.sequence is not None
        self.own.release(job.sequence)
        del self.open[job.request.handle]
        job.sequence = None
        self._turn()
        self.told.look()

    def comes_again(self, names: Sequence[Hash], until: float) -> None:
        """These are asked for again at this time, infinity where never: only an oracle makes use of it."""

    def _turn(self) -> None:
        """Of the tiers, and a wait for the disk's threads, in real time: what they do takes virtual time only."""
        if self.tiers is None:
            return
        self.tiers.turn(1.0)
        workers, until = self._below.workers, time.monotonic() + _PATIENCE
        while workers is not None and workers.writing:
            assert time.monotonic() < until, "the disk's threads have stopped"
            time.sleep(0.0001)

    @property
    def idle(self) -> bool:
        return not (self.queue or self.active or self.running or self.decoding or self.reading)

    def close(self) -> None:
        """Its process ends."""
        if self.tiers is not None:
            self.tiers.close()


def whole_steps(tokens: float) -> int:
    """What was computed ahead by then: of a step that ends in the middle nothing is."""
    return int(tokens // AHEAD_TOKENS) * AHEAD_TOKENS
