"""When a child that says nothing counts as frozen: not while nobody could hear it, nor before it has begun to speak."""

import signal

import pytest

from afserve.clock import AwakeClock, FakeClock
from afserve.launch.processes.supervisor import BEAT_SECONDS, FROZEN_SECONDS, Supervisor


@pytest.fixture
def watched(monkeypatch):
    """(supervisor over a child that serves and beats, its clock, signals that the child was sent)"""
    clock, sent = FakeClock(), []
    supervisor = Supervisor(lambda term: None, recovers=True, _awake=AwakeClock(2 * BEAT_SECONDS, clock))
    monkeypatch.setattr(Supervisor, "_send", lambda self, number: sent.append(number))
    for said in ("serves", "beats"):
        supervisor._note({said: True})
    return supervisor, clock, sent


def passes(watched, seconds):
    """Time in which the supervisor runs."""
    supervisor, clock, sent = watched
    for _ in range(int(seconds / BEAT_SECONDS)):
        clock.advance(BEAT_SECONDS)
        supervisor._check_frozen()
    return sent


def test_a_child_that_says_nothing_is_killed_once(watched):
    assert passes(watched, FROZEN_SECONDS) == []
    assert passes(watched, 5.0) == [signal.SIGKILL]
    assert "stood still" in watched[0]._frozen


def test_one_that_speaks_is_not(watched):
    for _ in range(4):
        assert passes(watched, FROZEN_SECONDS - BEAT_SECONDS) == []
        watched[0]._note({"beats": True})


def test_a_machine_that_slept_has_frozen_nobody(watched):
    watched[1].advance(3600.0)
    watched[0]._check_frozen()
    assert watched[2] == []


def test_one_that_never_beat_or_served_or_is_not_to_be_followed_is_left_alone(watched):
    supervisor = watched[0]
    supervisor.recovers = False
    assert passes(watched, 9.0) == []
    supervisor.recovers, supervisor._beat_at = True, None
    assert passes(watched, 9.0) == []
