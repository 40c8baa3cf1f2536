"""Reading a host's own copy beside everything else: what it tells, when, and how it ends."""

import logging
import time

import pytest

from afserve.comm.mailbox import wire
from afserve.config import EngineConfig, ModelSource
from afserve.control import identifying
from afserve.control.identifying import reading
from afserve.control.node import wiring
from afserve.control.wire.desired import Deployment
from afserve.engine.build import layout_for
from afserve.errors import CheckpointError
from afserve.families.table import load_spec
from afserve.launch.plan.models import CONFIGS
from afserve.member import MODEL_ROLES, Role
from afserve.models.identity import Identity, is_full
from afserve.placement.placement import Placement

SECONDS = 30.0
NANO = str(CONFIGS / "nano")


def source_of(path):
    return ModelSource(str(path), "m")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.mark.parametrize("full", [False, True])
def test_it_is_told_before_it_is_done(full):
    told: list[Identity] = []
    done: list[float] = []
    found = reading(source_of(NANO), MODEL_ROLES, full=full, progress=done.append, tell=told.append)
    assert found.result(SECONDS) is told[0]
    assert is_full(told[0]) == full == bool(done)
    assert "expert weights" in told[0] and "tokenizer.json" in told[0]


def test_a_broken_copy_is_raised_to_who_waits(tmp_path):
    told: list[Identity] = []
    found = reading(source_of(tmp_path), MODEL_ROLES, full=False, progress=print, tell=told.append)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read: No such file"):
        found.result(SECONDS)
    assert not told


@pytest.mark.slow
def test_what_takes_long_is_said(monkeypatch, caplog):
    monkeypatch.setattr(identifying, "_SAID_AFTER", 0.0)
    monkeypatch.setattr(identifying, "_SAID_EVERY", 0.0)
    caplog.set_level(logging.INFO, "afserve.verify")
    reading(source_of(NANO), ("expert",), full=True, progress=lambda done: time.sleep(0.0)).result(SECONDS)
    assert "reading all bytes of the expert weights: " in caplog.text


def test_what_is_soon_done_is_not_said(caplog):
    caplog.set_level(logging.INFO, "afserve.verify")
    reading(source_of(NANO), MODEL_ROLES, full=False, progress=print).result(SECONDS)
    assert not caplog.text


def test_nodes_agree_on_protocol_dtype_and_format_by_name():
    spec, source, engine = load_spec(NANO), source_of(NANO), EngineConfig(64, 9)
    placement = Placement.contiguous(layers=1, experts=8, nodes=1)
    deployment = Deployment(source, engine, {Role.ATTENTION: 1, Role.EXPERT: 1}, "f", placement)
    agreed = wiring._agreed(layout_for(source, spec, engine, 8), deployment, spec)
    assert agreed["data-plane protocol"] == str(wire.VERSION)
    assert (agreed["dtype"], agreed["load_format"], agreed["hidden"]) == (
        "bfloat16",
        "safetensors",
        str(spec.hidden),
    )
