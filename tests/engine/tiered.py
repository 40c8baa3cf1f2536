"""A node with tiers below its KV cache, and what its loop does with them."""

import time
from dataclasses import replace

import torch

from afserve.clock import MonotonicClock
from afserve.comm.disk.store import DiskStore
from afserve.comm.disk.ways import Way
from afserve.comm.disk.workers import DiskWorkers
from afserve.config import ModelSource
from afserve.engine.build import colocated
from afserve.engine.kv.disk import DiskTier
from afserve.engine.kv.host import HostArena, HostTier
from afserve.engine.kv.tiers import KvTiers
from afserve.kernels.devices.opened import device_of
from tests.engine.driving import config

PATIENCE = 60.0


class Node:
    """`host_blocks` of host memory where that is not 0, and a disk where there is a folder."""

    def __init__(
        self,
        path,
        folder=None,
        clock=None,
        limit=1 << 20,
        spared=0,
        readers=1,
        host_blocks=0,
        way=None,
        command=(),
        groups=(),
        **fields,
    ):
        self.engine = colocated(ModelSource(str(path), "m"), config(**fields), groups)
        kv, blocks = self.engine.kv, self.engine.blocks
        self.said: list[str] = []
        clock = clock or MonotonicClock()
        self.disk = self.disk_tier = self.host = None
        if folder is not None:
            store = DiskStore.open(folder, kv.fingerprint.digest, kv.block_bytes, limit, spared=spared)
            way = way or Way(readers=readers)
            self.disk = DiskWorkers(store, tell=self.said.append, way=way, command=command)
            self.disk.start()
            self.disk_tier = DiskTier(blocks, self.disk, clock)
        if host_blocks:
            device = device_of(torch.device(fields.get("device", "cpu")))
            self.arena = HostArena(host_blocks * kv.block_bytes, kv.block_bytes, device)
            self.host = HostTier(blocks, self.arena, clock, self.disk_tier)
        self.tiers = KvTiers(kv, blocks, [one for one in (self.host, self.disk_tier) if one], clock)

    def wait(self, until):
        deadline = time.monotonic() + PATIENCE
        while not until():
            assert time.monotonic() < deadline
            self.tiers.turn(0.01)
            self.check()
            time.sleep(0.001)

    def restore(self, request):
        number = self.tiers.restore(self.engine.usable_names(request), PATIENCE)
        if number is None:
            return None
        self.wait(lambda: self.tiers.ended)
        return self.tiers.ended.pop()

    def ask(self, request):
        """Its events, and everything that is to be kept then is."""
        self.restore(request)
        self.tiers.turn(0.0)
        self.engine.submit(request)
        events = []
        while self.engine.busy:
            events += self.engine.step()
            self.check()
        self.wait(lambda: self.tiers.settled)
        return events

    def check(self):
        self.engine._scheduler.check(self.engine.blocks.held)
        if self.disk is not None:
            self.disk.store.check()
        if self.host is not None:
            self.host._slots.check()

    def forget(self, at_once=1 << 20):
        """Everything in the cache, so many blocks at once."""
        pool, taken = self.engine.kv.pool, []
        while pool.available:
            taken += pool.allocate(min(at_once, pool.available))
        pool.release(taken)

    def stats(self):
        return self.engine.stats(tiers=self.tiers.stats()).tiers

    def close(self):
        self.tiers.close()
        assert not list(self.engine.blocks.held)


def rest_of(request, said, handle):
    """The same request with 40 tokens of its answer: a follow-up whose prefix is known."""
    return replace(request, handle=handle, generated=tuple(said[:40]))
