"""Seeded schedules of moving KV blocks over faulty wires: nothing leaks, nothing wrong is kept, nobody waits long."""

from collections import Counter

import pytest

from tests.comm.kv_world import BLOCK, World

IN_CI, ALL, STEPS = 165, 10_000, 300


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Two blocks in a message, two messages in a window."""
    monkeypatch.setattr("afserve.comm.kv.messages.PIECE_BYTES", 2 * BLOCK)
    monkeypatch.setattr("afserve.comm.kv.lender.WINDOW_BYTES", 4 * BLOCK)


def play(seed: int) -> World:
    world = World(seed)
    world.run(STEPS)
    return world


@pytest.mark.slow
def test_blocks_arrive_or_are_given_up():
    happened = Counter()
    for seed in range(IN_CI):
        happened += play(seed).happened
    for what in ("complete", "partial", "dropped", "reordered", "repeated", "corrupted", "cut", "killed"):
        assert happened[what] > 7, happened
    assert happened["row"] > 50 and happened["fetched from who asked"] > 10, happened
    assert happened["complete"] > 150 and happened["another chain"] and happened["computed for another"] > 150


@pytest.mark.long
def test_ten_thousand_schedules():
    for seed in range(IN_CI, ALL):
        play(seed)
