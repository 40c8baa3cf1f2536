"""When a waiter looks again and when it parks, with a clock of its own."""

import pytest

from afserve.comm.transports.busy_poll import BusyPoll

US = 1e-6


class Core:
    """Time passes when the core is given away, and nowhere else."""

    def __init__(self):
        self.now, self.gone, self.given = 0.0, 1 * US, 0

    def clock(self):
        return self.now

    def give_way(self):
        self.now += self.gone
        self.given += 1


@pytest.fixture
def core():
    return Core()


@pytest.fixture
def spinner(core):
    return BusyPoll(core.clock, core.give_way)


def wait(core, spinner, seconds, limit=1.0):
    """How often the waiter looked, and whether it had to park, for news that come after `seconds`."""
    due, core.given = core.now + seconds, 0
    spinner.begin(limit)
    parked = not spinner.look(lambda: ["news"] if core.now >= due else [])
    core.now = max(core.now, due)
    spinner.end()
    return core.given, parked


def test_news_that_are_there_cost_no_yield(core, spinner):
    assert wait(core, spinner, 0.0) == (0, False)


def test_short_waits_never_park(core, spinner):
    assert all(not wait(core, spinner, 50 * US)[1] for _ in range(50))


def test_long_waits_are_learnt_and_then_park_at_once(core, spinner):
    for _ in range(50):
        wait(core, spinner, 5000 * US)
    looked, parked = wait(core, spinner, 5000 * US)
    assert parked and looked <= 3


def test_waits_that_become_short_are_looked_for_again(core, spinner):
    for _ in range(50):
        wait(core, spinner, 5000 * US)
    assert any(not wait(core, spinner, 50 * US)[1] for _ in range(50))


def test_a_core_that_others_want_is_left_to_them_for_longer_each_time(core, spinner):
    core.gone = 100 * US  # somebody else runs
    pauses, since = [], 0
    for _ in range(400):
        looked, _ = wait(core, spinner, 150 * US)
        if looked:
            pauses.append(since)
            since = 0
        else:
            since += 1
    assert pauses[:8] == [0, 1, 2, 4, 8, 16, 32, 64] and set(pauses[8:]) == {64}


def test_one_moment_of_somebody_else_costs_one_wait(core, spinner):
    core.gone = 100 * US
    assert wait(core, spinner, 150 * US) == (1, True)
    core.gone = 1 * US
    assert wait(core, spinner, 50 * US)[0] == 0
    assert not wait(core, spinner, 50 * US)[1]


def test_nobody_looks_beyond_the_end_of_the_wait(core, spinner):
    looked, parked = wait(core, spinner, 100 * US, limit=10 * US)
    assert parked and looked == 10
