"""Replaces functions of a library as one module sees them.

`monkeypatch.setattr(os, "pread", ...)` replaces a function for the whole process, and so for every thread of it, those
of pytest, of libraries and of other tests' servers too: one of them calls it, and a test fails that has no fault.
"""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def patch_library(monkeypatch: pytest.MonkeyPatch, module: ModuleType, library: str, **changed: Any) -> None:
    """`module`, which says `import {library}`, finds `changed` in it until the test ends; nobody else does."""
    seen = vars(getattr(module, library))
    assert set(changed) <= set(seen), f"{library} has no {sorted(set(changed) - set(seen))}"
    monkeypatch.setattr(module, library, SimpleNamespace(**{**seen, **changed}))
