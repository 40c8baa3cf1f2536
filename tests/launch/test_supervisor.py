"""The supervisor over children that only end: who is followed by another, and what the last one's end means."""

import json
import socket
from collections.abc import Callable, Iterator

import pytest

from afserve.launch.processes.supervisor import Reports
from tests.warm.interpreter import Warm

pytestmark = pytest.mark.process
DIE = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """What the supervisor imports is imported once."""
    modules = ("processes.supervisor", "processes.forker")
    one = Warm("afserve.server.text.text_pool", *(f"afserve.launch.{name}" for name in modules))
    yield one
    one.close()


@pytest.fixture
def run(warm: Warm) -> Callable[..., list[str]]:
    """What is printed by a supervisor whose children run the lines of `body`."""

    def said(*body: str, recovers: bool = True) -> list[str]:
        done = warm.said("tests.launch.supervised", "\n".join(body), "recovers" * recovers)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return said


def test_a_child_that_served_is_followed_by_one_that_knows_what_is_wanted_and_was_learnt(run):
    said = run(
        "if life.number == 2: return",
        "life.reports.serves()",
        "life.reports.wanted('nano', {Role.EXPERT: 3 + life.number}, {1: AttentionPhase.DECODE})",
        "life.reports.note_learnt('nano', {'rates': [life.number + 0.5]})",
        DIE,
    )
    assert [line.partition(" ")[0] for line in said] == ["0", "1", "2", "returned"]
    assert said[0] == "0 {} {} {}" and ": 3}" in said[1] and ": 4}" in said[2]
    assert "'decode'" in said[1] and "'decode'" in said[2]
    assert "{'nano': {'rates': [0.5]}}" in said[1] and "{'nano': {'rates': [1.5]}}" in said[2]


def test_what_was_learnt_is_said_where_it_has_changed():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reports = Reports(ours, {"nano": {"rates": [0.5]}})
        for rate in (0.5, 1.5, 1.5, 0.5):
            reports.note_learnt("nano", {"rates": [rate]})
        said = [json.loads(line)["learnt"] for line in theirs.recv(4096).splitlines()]
    assert said == [{"rates": [1.5]}, {"rates": [0.5]}]


def test_one_that_fails_before_it_served_is_not_followed(run):
    assert run("os.kill(os.getpid(), signal.SIGSEGV)")[-1].startswith(
        "PeerLost the controller: its process was killed by SIGSEGV"
    )


def test_one_that_is_killed_before_it_served_begins_again_so_many_times(run):
    said = run(DIE)
    assert said[:-1] == ["0 {} {} {}"] * 6
    assert said[-1].startswith("PeerLost the controller: its process was killed by SIGKILL")


def test_nobody_is_followed_where_losses_end_the_run(run):
    said = run("life.reports.serves()", DIE, recovers=False)
    assert len(said) == 2 and said[-1].startswith("PeerLost the controller")


def test_children_that_are_killed_are_never_given_up(run):
    said = run("if life.number == 7: return", "life.reports.serves()", DIE)
    assert [line.partition(" ")[0] for line in said] == [*map(str, range(8)), "returned"]


def test_children_that_fail_again_and_again_are_given_up(run):
    said = run("life.reports.serves()", "sys.exit(1)")
    assert [line[0] for line in said[:-1]] == list("012345") and "it was started 6 times" in said[-1]


def test_a_child_whose_loop_stands_still_is_killed_and_followed(run):
    said = run(
        "if life.number == 1: return",
        "life.reports.serves()",
        "life.reports.beats()",
        "os.kill(os.getpid(), signal.SIGSTOP)",
    )
    assert [line.partition(" ")[0] for line in said] == ["0", "1", "returned"]


def test_what_a_child_raises_ends_the_run_as_it_is(run):
    assert run('raise ConfigError("port: no")')[-1] == "ConfigError port: no"


def test_a_child_that_was_told_twice_to_stop_interrupts(run):
    assert run("sys.exit(130)")[-1] == "interrupted"


def test_one_signal_ends_a_child_that_does_not_listen_yet(run):
    said = run("os.kill(os.getppid(), signal.SIGTERM)", "signal.pause()")
    assert said[-1] == "returned"


@pytest.mark.parametrize("signals", [1, 2])
def test_signals_are_told_to_a_child_that_listens(run, signals):
    said = run(
        "life.reports.beats()",
        "import time; time.sleep(0.5)",  # until it was heard
        "heard = 0",
        f"for each in range({signals}):",
        "    os.kill(os.getppid(), signal.SIGTERM)",
        "    while heard <= each: heard += life.reports.told_to_stop()",  # two at once would be one
        "print('heard', heard, flush=True)",
    )
    assert said == ["0 {} {} {}", f"heard {signals}", "returned"]


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_to_the_child_alone_is_a_loss(run, number):
    said = run(
        "if life.number == 1: return",
        "life.reports.serves()",
        "life.reports.beats()",
        f"os.kill(os.getpid(), signal.{number})",
        "signal.pause()",
    )
    assert [line.partition(" ")[0] for line in said] == ["0", "1", "returned"]
