"""Processes of tests that begin as copies of one that has imported PyTorch: by itself each takes two seconds for that.

They are children of that one, which ends with this process. What it could not import they import themselves.
"""

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    ["tests.comm.conformance", "tests.comm.carried_end", "hypothesis", "psutil", "pytest"]
)
