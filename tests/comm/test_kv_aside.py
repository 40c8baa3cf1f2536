"""Who waits by looking leaves a core that the other end has, and comes back to nothing that it may not use."""

import os

import pytest

from afserve.comm.kv import aside
from afserve.comm.kv.aside import Aside
from tests.patching import patch_library

ALL, HERE = {0, 1, 2}, 1


class Core:
    """Of a made-up machine: how long each yield takes, and what was asked of it."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.takes, self.cores, self.asked, self.may = 50.0, 0.0, ALL, [], True
        monkeypatch.setattr(aside, "monotonic", lambda: self.now)
        monkeypatch.setattr(aside, "this_core", lambda: HERE)
        cores = {"sched_getaffinity": lambda thread: set(self.cores), "sched_setaffinity": self.move}
        patch_library(monkeypatch, aside, "os", sched_yield=self.give, **cores)

    def give(self):
        self.now += self.takes

    def move(self, thread, cores):
        if not self.may:
            raise PermissionError
        self.asked.append(set(cores))


@pytest.fixture
def core(monkeypatch):
    return Core(monkeypatch)


@pytest.mark.parametrize(
    ("cores", "other", "asked"),
    [
        (ALL, HERE, [{0, 2}, ALL]),
        (ALL, 2, []),
        (ALL, -1, []),  # nobody knows
        ({HERE}, HERE, []),  # it is bound there
    ],
)
def test_it_goes_to_another_core_and_may_use_all_again(core, cores, other, asked):
    core.cores = cores
    Aside().leave(other)
    assert core.asked == asked


def test_a_core_is_shared_when_it_was_taken_twice_within_a_short_while(core):
    one = Aside()
    core.takes = 0.0003
    assert [one.give_way() for _ in range(3)] == [False, True, True]
    core.now += 1.0
    assert [one.give_way() for _ in range(2)] == [False, True]
    core.takes = 0.00001
    assert not one.give_way()


def test_it_does_not_wander(core):
    one = Aside()
    for _ in range(10):
        core.now += 0.0003
        one.leave(HERE)
    assert len(core.asked) == 2
    core.now += 1.0
    one.leave(HERE)
    assert len(core.asked) == 4


def test_who_may_not_move_stays(core):
    core.may = False
    Aside().leave(HERE)
    assert core.asked == []


def test_a_real_thread_keeps_its_cores():
    before = os.sched_getaffinity(0)
    Aside().leave(aside.this_core())
    assert os.sched_getaffinity(0) == before
