"""How much work code does, counted: the same on any machine and any day, unlike seconds."""

import sys
from types import FrameType
from typing import Any


class Calls:
    """`made`: the calls that this thread makes within, of functions of Python's and of C's."""

    def __init__(self) -> None:
        self.made = 0

    def __enter__(self) -> "Calls":
        self._before = sys.getprofile()
        sys.setprofile(self._count)
        return self

    def _count(self, frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            self.made += 1

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)
