"""Reading a host's own copy beside everything else: what it tells, when, and how it ends."""

import logging
import time

import pytest

from afserve.comm.mailbox import wire
from afserve.config import EngineConfig, ModelSource
from afserve.control import identifying
from afserve.control.identifying import reading
from afserve.control.node import wiring
from afserve.control.wire.values import ROLES, Run
from afserve.engine.build import layout_for
from afserve.errors import CheckpointError
from afserve.families.table import load_spec
from afserve.launch.models import CONFIGS
from afserve.models.identity import is_full

SECONDS = 30.0
NANO = str(CONFIGS / "nano")


def run_of(path):
    return Run(ModelSource(str(path), "m"), EngineConfig(64, 9), 1, 1, "f", "{}")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.mark.parametrize("full", [False, True])
def test_it_is_told_before_it_is_done(full):
    told, done = [], []
    found = reading(run_of(NANO), ROLES, full=full, progress=done.append, tell=told.append)
    assert found.result(SECONDS) is told[0]
    assert is_full(told[0]) == full == bool(done)
    assert "expert weights" in told[0] and "tokenizer.json" in told[0]


def test_a_broken_copy_is_raised_to_who_waits(tmp_path):
    told = []
    found = reading(run_of(tmp_path), ROLES, full=False, progress=print, tell=told.append)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read: No such file"):
        found.result(SECONDS)
    assert not told


def test_what_takes_long_is_said(monkeypatch, caplog):
    monkeypatch.setattr(identifying, "_SAID_AFTER", 0.0)
    monkeypatch.setattr(identifying, "_SAID_EVERY", 0.0)
    caplog.set_level(logging.INFO, "afserve.verify")
    reading(run_of(NANO), ("expert",), full=True, progress=lambda done: time.sleep(0.0)).result(SECONDS)
    assert "reading all bytes of the expert weights: " in caplog.text


def test_what_is_soon_done_is_not_said(caplog):
    caplog.set_level(logging.INFO, "afserve.verify")
    reading(run_of(NANO), ROLES, full=False, progress=print).result(SECONDS)
    assert not caplog.text


def test_nodes_agree_on_protocol_dtype_and_format_by_name():
    spec, run = load_spec(NANO), run_of(NANO)
    agreed = wiring._agreed(layout_for(run.source, spec, run.engine, 8), run, spec)
    assert agreed["data-plane protocol"] == str(wire.VERSION)
    assert (agreed["dtype"], agreed["load_format"], agreed["hidden"]) == (
        "bfloat16",
        "safetensors",
        str(spec.hidden),
    )
