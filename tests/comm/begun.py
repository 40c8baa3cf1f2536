"""Processes of tests that begin as copies of one that has imported PyTorch: by itself each takes two seconds for that.

They are children of that one, which ends with this process. What it could not import they import themselves.
"""

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
_COMMON = ["tests.comm.conformance", "tests.comm.carried_end", "hypothesis", "psutil", "pytest"]
FORKED.set_forkserver_preload(_COMMON)


def import_also(*modules: str) -> None:
    """In that process too, if it has not begun yet."""
    FORKED.set_forkserver_preload([*_COMMON, *modules])
