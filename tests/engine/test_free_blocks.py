"""Free blocks: always a set, and runs for sequences that grow in turn."""

from hypothesis import given
from hypothesis import strategies as st

from afserve.engine.free_blocks import RUN, FreeBlocks


@given(st.integers(0, 5 * RUN), st.lists(st.tuples(st.booleans(), st.integers(0, 10**6))))
def test_every_block_is_free_or_taken_once(blocks: int, steps: list[tuple[bool, int]]) -> None:
    free, taken = FreeBlocks(blocks), list[int]()
    for give, at in steps:
        if give and taken:
            free.add(taken.pop(at % len(taken)))
        elif not give and len(free):
            taken.append(free.take(taken[at % len(taken)] if taken and at % 3 else None))
        assert len(free) + len(taken) == blocks == len({*free, *taken})


def test_sequences_that_grow_in_turn_each_get_a_run() -> None:
    free = FreeBlocks(8 * RUN)
    sequences: list[list[int]] = [[] for _ in range(8)]
    for _ in range(RUN):
        for blocks in sequences:
            blocks.append(free.take(blocks[-1] if blocks else None))
    assert all(b == list(range(b[0], b[0] + RUN)) for b in sequences)
    assert not len(free)


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
