"""The choice of micro-batches against scripted machines."""

import random

import pytest

from afserve.engine.pace import LOOK_AGAIN_SECONDS, Pace


def drive(pace, rate_of, running, seconds, now=0.0, noise=0.0, rng=None):
    """Let a machine with rate_of(m) tokens per second run for `seconds`; how often each count was used."""
    used: dict[int, float] = {}
    end = now + seconds
    while now < end:
        rate = rate_of(pace.active) * (1 + noise * ((rng or random).random() - 0.5))
        now += running / pace.active / rate
        used[pace.active] = used.get(pace.active, 0) + 1 / pace.active
        pace.observe(now, round(running / pace.active), running, decode_only=True)
    return used, now


@pytest.mark.parametrize("best", [1, 2, 3, 4])
def test_finds_the_best_and_stays(best):
    pace = Pace(4)
    machine = {m: 1000.0 - 150 * abs(m - best) for m in range(1, 5)}
    _, now = drive(pace, machine.get, 24, 6.0)
    used, _ = drive(pace, machine.get, 24, 12.0, now)
    assert max(used, key=used.get) == best
    assert used[best] > 0.85 * sum(used.values())


def test_noise_moves_nothing():
    rng = random.Random(1)
    pace = Pace(4)
    used, now = drive(pace, lambda m: 1000.0, 32, 3.0, noise=0.02, rng=rng)
    kept = pace._levels[(32).bit_length()].best
    used, _ = drive(pace, lambda m: 1000.0, 32, LOOK_AGAIN_SECONDS * 0.6, now, noise=0.02, rng=rng)
    assert used[kept] > 0.9 * sum(used.values())


def test_follows_a_machine_that_changes():
    pace = Pace(4)
    _, now = drive(pace, {1: 900.0, 2: 1000.0, 3: 950.0, 4: 900.0}.get, 24, 5.0)
    _, now = drive(pace, {1: 1000.0, 2: 500.0, 3: 400.0, 4: 300.0}.get, 24, 2 * LOOK_AGAIN_SECONDS, now)
    assert pace._levels[(24).bit_length()].best == 1


def test_never_more_than_sequences_and_prefill_counts_for_nothing():
    pace = Pace(4)
    pace.observe(0.0, 0, 1, decode_only=False)
    assert pace.active == 1
    used, now = drive(pace, lambda m: 100.0, 1, 5.0)
    assert set(used) == {1}
    for step in range(200):
        pace.observe(now + step, 5, 8, decode_only=False)
    assert pace._levels[(8).bit_length()].rate == {}
