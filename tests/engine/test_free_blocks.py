"""Free blocks: always a set, and runs for sequences that grow in turn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.engine.kv.free_blocks import LONG, RUN, FreeBlocks


@given(st.integers(0, 5 * RUN), st.lists(st.tuples(st.booleans(), st.integers(0, 10**6))))
def test_every_block_is_free_or_taken_once(blocks: int, steps: list[tuple[bool, int]]) -> None:
    free, taken = FreeBlocks(blocks), list[int]()
    for give, at in steps:
        if give and taken:
            free.add(taken.pop(at % len(taken)))
        elif not give and len(free):
            taken.append(free.take(taken[at % len(taken)] if taken and at % 3 else None))
        assert len(free) + len(taken) == blocks == len({*free, *taken})


@given(st.integers(1, 5 * RUN), st.lists(st.tuples(st.booleans(), st.integers(0, 10**6))))
def test_some_at_once_are_those_that_follow_each_other(blocks: int, steps: list[tuple[bool, int]]) -> None:
    free, taken = FreeBlocks(blocks), list[int]()
    for give, at in steps:
        if give and taken:
            free.add(taken.pop(at % len(taken)))
        elif not give and len(free):
            last = taken[at % len(taken)] if taken and at % 3 else None
            behind = last is not None and last + 1 in set(free)
            some = free.take_some(last, 1 + at % 40)
            assert 1 <= len(some) <= 1 + at % 40 and some.step == 1
            assert not behind or (last is not None and some[0] == last + 1)
            taken += some
        assert len(free) + len(taken) == blocks == len({*free, *taken})


def test_sequences_that_grow_in_turn_each_get_a_run() -> None:
    free = FreeBlocks(8 * RUN)
    sequences: list[list[int]] = [[] for _ in range(8)]
    for _ in range(RUN):
        for blocks in sequences:
            blocks.append(free.take(blocks[-1] if blocks else None))
    assert all(b == list(range(b[0], b[0] + RUN)) for b in sequences)
    assert not len(free)


def test_a_sequence_that_fills_a_run_moves_to_a_longer_one() -> None:
    free = FreeBlocks(8 * LONG)
    sequences: list[list[int]] = [[] for _ in range(4)]
    for _ in range(RUN + LONG):
        for blocks in sequences:
            blocks.append(free.take(blocks[-1] if blocks else None))
    for blocks in sequences:
        jumps = [i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1] + 1]
        assert len(jumps) <= 1 and all(at >= RUN for at in jumps)


def test_where_no_run_is_whole_sequences_share_halves() -> None:
    free = FreeBlocks(4 * RUN)
    first = [[free.take(None)] for _ in range(4)]
    second = list[list[int]]()
    for sequences, blocks in ((first, RUN // 2 - 1), (second, RUN // 2)):
        for _ in range(blocks):
            if not second and sequences is second:
                second.extend([free.take(None)] for _ in range(4))
                continue
            for sequence in sequences:
                sequence.append(free.take(sequence[-1]))
    assert all(b == list(range(b[0], b[0] + RUN // 2)) for b in (*first, *second))
    with pytest.raises(KeyError, match="no block"):
        free.take(None)


def test_without_whole_runs_any_block_will_do() -> None:
    free = FreeBlocks(2 * RUN)
    taken = [free.take(None) for _ in range(2 * RUN)]
    assert sorted(taken) == list(range(2 * RUN))
    for block in taken[::2]:
        free.add(block)
    assert free.take(taken[-1]) in taken[::2]
    for block in range(RUN):
        if block not in free:
            free.add(block)
    assert free.take(None) % RUN == 0
