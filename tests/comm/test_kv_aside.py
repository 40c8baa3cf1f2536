"""Who waits by looking leaves a core that another thread has taken, and comes back to nothing it may not use."""

import os

import pytest

from afserve.comm.kv import aside
from afserve.comm.kv.aside import Aside


class Core:
    """Of a made-up machine: how long each yield takes, and what was asked of it."""

    def __init__(self, monkeypatch, cores) -> None:
        self.now, self.takes, self.cores, self.asked = 50.0, 0.0, set(cores), []
        self.may = True
        monkeypatch.setattr(aside, "monotonic", lambda: self.now)
        monkeypatch.setattr(aside, "this_core", lambda: 1)
        monkeypatch.setattr(os, "sched_yield", self.give)
        monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(self.cores))
        monkeypatch.setattr(os, "sched_setaffinity", self.move)

    def give(self):
        self.now += self.takes

    def move(self, thread, cores):
        if not self.may:
            raise PermissionError
        self.asked.append(set(cores))


@pytest.mark.parametrize(
    ("cores", "takes", "asked"),
    [
        ({0, 1, 2}, 0.0003, [{0, 2}, {0, 1, 2}]),
        ({0, 1, 2}, 0.00001, []),  # nobody else wanted it
        ({1}, 0.0003, []),  # it is bound there
    ],
)
def test_it_goes_to_another_core_and_may_use_all_again(monkeypatch, cores, takes, asked):
    core = Core(monkeypatch, cores)
    core.takes = takes
    Aside().give_way()
    assert core.asked == asked


def test_it_does_not_wander(monkeypatch):
    core, one = Core(monkeypatch, {0, 1}), Aside()
    core.takes = 0.0003
    for _ in range(10):
        one.give_way()
    assert len(core.asked) == 2
    core.now += 1.0
    one.give_way()
    assert len(core.asked) == 4


def test_who_may_not_move_stays(monkeypatch):
    core = Core(monkeypatch, {0, 1})
    core.takes, core.may = 0.0003, False
    Aside().give_way()
    assert core.asked == []


def test_a_real_thread_keeps_its_cores():
    before, one = os.sched_getaffinity(0), Aside()
    one._move()
    assert os.sched_getaffinity(0) == before
