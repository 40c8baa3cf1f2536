"""What Linux is asked about parents and children of this process, and its name. Elsewhere these do nothing.

A parent's end is told to its child by the kernel, also where nobody else is left to tell it.
`python -m afserve.kinship PID ARGUMENTS` becomes an afserve command that ends with its parent PID: the kernel is asked
before anything else happens.
"""

import ctypes
import os
import signal
import sys

from afserve.child import module

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel for a signal when the parent goes. Where it cannot (not Linux), the broken stream tells.

    The parent is a thread, for the kernel: that which started this process, or the first one of who adopted it.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            sys.exit(0)


def wake_with_parent() -> None:
    """When the parent goes this process is continued, should it be stopped: it has to see that it is alone."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


_ADOPTERS: list[int] = []  # one process has one bit of this at the kernel, whoever in it asks


def adopt_orphans() -> None:
    """Processes whose parents end become children of this one, if they descend from it, until `leave_orphans`."""
    _ADOPTERS.append(os.getpid())
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def leave_orphans() -> None:
    """Once for each `adopt_orphans` of this process: after the last one, orphans are the system's again."""
    _ADOPTERS.remove(os.getpid())
    if sys.platform == "linux" and os.getpid() not in _ADOPTERS:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def name_process(name: str) -> None:
    """What `top` and `ps -o comm` show: at most 15 characters."""
    if sys.platform == "linux":
        _prctl(_PR_SET_NAME, name.replace("attention", "attn").encode()[:15])


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.executable, [*module("afserve"), *sys.argv[2:]])  # noqa: S606  no shell is wanted
