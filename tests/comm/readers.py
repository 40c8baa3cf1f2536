"""Processes that read for a store, as tests start them: a plain one, and DeepSpeed's where that was built."""

import os
import sys
from pathlib import Path

import pytest

from afserve.comm.disk.deepspeed_library import libraries

_PLAIN = Path(__file__).with_name("plain_reader.py")
_CACHE = os.environ.get("XDG_CACHE_HOME")  # of the user: tests have one of their own
KINDS = ("plain", "deepspeed")


def plain(fault="none"):
    return [sys.executable, str(_PLAIN), fault]


def command_of(kind, monkeypatch):
    if kind == "plain":
        return plain()
    pytest.importorskip("deepspeed")
    if _CACHE is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", _CACHE)
    if libraries() is None:
        pytest.skip("DeepSpeed's asynchronous I/O is not built: run `afserve doctor --io`")
    return ()
