"""Processes of afserve's own modules import from where their parent does."""

import subprocess
import sys
from pathlib import Path

import pytest

from afserve import __version__
from afserve.child import module
from afserve.launch.plan.gpus import Gpus, probe_gpus


@pytest.fixture
def beside_a_clone(tmp_path, monkeypatch):
    """A working directory with a folder `afserve`, as a clone makes one, and a file named like a standard module."""
    (tmp_path / "afserve").mkdir()
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the working directory was imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path or ".").resolve() != tmp_path])


def output_of(command):
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_module_is_not_taken_from_the_working_directory(beside_a_clone):
    assert output_of([*module("afserve"), "--version"]) == f"afserve {__version__}\n"


@pytest.mark.slow
def test_devices_are_asked_for_beside_a_clone(beside_a_clone):
    assert isinstance(probe_gpus(), Gpus)


@pytest.mark.slow
def test_a_module_is_taken_from_the_working_directory_where_its_parent_does(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("print('here')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert output_of(module("mine")) == "here\n"
