"""Passes of a drafter rest where they cost more than they bring, by load."""

import pytest

from afserve.engine.draft.resting import Resting

STEPS = 4000


def shares(costs, loads):
    """How often it is awake at each load; `costs(sequences)` are tokens of a sequence and seconds, awake."""
    resting, awake = Resting(), {}
    for sequences in loads:
        kept = []
        for _ in range(STEPS):
            each, seconds = costs(sequences) if resting.awake else (1.0, 1.0)
            kept.append(resting.awake)
            resting.note_step(sequences, round(each * sequences * 100), seconds)
        awake[sequences] = sum(kept) / STEPS
    return awake


@pytest.mark.parametrize(
    ("tokens", "seconds", "pays"), [(1.8, 1.5, True), (1.8, 2.2, False), (1.0, 1.05, False)]
)
def test_what_is_slower_takes_few_steps(tokens, seconds, pays):
    (share,) = shares(lambda _: (tokens * 1.0, seconds), [4]).values()
    assert share > 0.95 if pays else share < 0.07


def test_each_load_has_its_own_answer():
    found = shares(lambda sequences: (1.8, 1.4 if sequences < 8 else 2.5), [1, 32, 1, 32])
    assert found[1] > 0.95 and found[32] < 0.05


def test_a_change_is_noticed():
    resting = Resting()
    seen = []
    for seconds in (1.2, 3.0, 1.2):
        for _ in range(6000):
            each, took = (2, seconds) if resting.awake else (1, 1.0)
            resting.note_step(1, each, took)
        seen.append(resting.awake)
    assert seen == [True, False, True]
