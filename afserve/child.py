"""The command that starts one of afserve's modules in a process of its own. It knows no module and starts nothing."""

import os
import sys


def module(name: str) -> list[str]:
    """It imports from the working directory only where this process does.

    `python -m` alone would: a folder there that is called `afserve`, such as the one a clone makes, would be taken for
    the package, and files of other people for modules of the standard library.
    """
    here = os.getcwd()
    is_looked_in = any(os.path.abspath(path) == here for path in sys.path)
    return [sys.executable, *([] if is_looked_in else ["-P"]), "-m", name]
