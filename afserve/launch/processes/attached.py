"""`python -m afserve.launch.processes.attached PID ARGUMENTS`: an afserve command that ends with its parent PID.

The kernel is asked before anything else happens; the nodes of one machine do the same.
"""

import os
import sys

from afserve.child import module
from afserve.kinship import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.executable, [*module("afserve"), *sys.argv[2:]])  # noqa: S606  no shell is wanted
