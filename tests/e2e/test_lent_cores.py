"""Two nodes that lend each other their cores: one is killed or stopped. The same tokens."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.streams import begins, begun, few, same_after, texts, wait
from tests.e2e.test_losses import _wake, kill, serving, whole

pytestmark = [pytest.mark.process, pytest.mark.alone]
PAIR = ("--attention", "1", "--experts", "1", "--threads", "1", "--share-cores", "--loss-deadline", "120")


def has_guest(pid):
    """A thread that went to a core of another node may run on that one only."""
    everywhere = os.sched_getaffinity(pid)
    return any(len(where) == 1 < len(everywhere) for where in _affinities(pid))


def _affinities(pid):
    for thread in psutil.Process(pid).threads():
        try:
            yield os.sched_getaffinity(thread.id)
        except ProcessLookupError:
            continue


def mapped(pid):
    """How many expert nodes' memories a process holds."""
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    return len({line.split()[4] for line in lines if "afserve-expert-" in line})


def lending(server, expected):
    """Both nodes have computed on the other one's core, where a core is lent while there is work."""
    assert begins(expected, few(server.url))
    return len(os.sched_getaffinity(0)) == 1 or all(map(has_guest, serving(server).values()))


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("expert-0", signal.SIGKILL),
        ("attention-0", signal.SIGKILL),
        pytest.param("expert-0", signal.SIGSTOP, marks=pytest.mark.long),
        pytest.param("attention-0", signal.SIGSTOP, marks=pytest.mark.long),
    ],
)
def test_one_of_two_goes_and_comes_back(shared_up, name, number, undisturbed):
    server = shared_up(*PAIR)
    expected = undisturbed(server.url)
    wait(lambda: lending(server, expected), "a guest")
    pid, streams = whole(server)[name], begun(server.url)
    kill(pid, number=number)
    assert texts(streams) == expected
    wait(lambda: whole(server)[name] != pid, "another process in its place")
    _wake(pid)
    assert same_after(server.url, expected)
    wait(lambda: lending(server, expected), "a guest of the new pair")
    wait(lambda: mapped(serving(server)["attention-0"]) == 1, "the end of what the lost node shared")
