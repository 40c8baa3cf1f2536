"""DeepSpeed's libraries: what is lacking is named, a build has an end, and what it leaves is found by its versions."""

import fcntl
import os
import sys
import time

import psutil
import pytest

from afserve.comm.disk import deepspeed_library as library
from afserve.launch.plan import checkup_disk
from afserve.launch.plan.checkup_disk import NOTE, OK
from tests.patching import patch_library

BUILDS = """
import os
from pathlib import Path
own = Path(os.environ["TORCH_EXTENSIONS_DIR"])
assert os.environ["MAX_JOBS"] == "3" and os.environ["CUDA_VISIBLE_DEVICES"] == ""
for name in ("pin_memory", "async_io"):
    (own / name).mkdir(exist_ok=True)
    assert not (own / name / "lock").exists()
    (own / name / f"{name}.so").write_bytes(b"")
"""
HANGS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(3600)'])"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "folder", lambda: tmp_path / "built")
    return tmp_path / "built"


def builds_by(monkeypatch, code):
    monkeypatch.setattr(library, "module", lambda name: [sys.executable, "-c", code])


def test_libraries_are_those_of_these_versions(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    versions = {"deepspeed": "1.2", "torch": "3.4+cpu"}
    monkeypatch.setattr(library.metadata, "version", versions.__getitem__)
    own = tmp_path / "afserve" / "deepspeed" / f"1.2-3.4+cpu-{sys.implementation.cache_tag}"
    assert library.folder() == own and library.libraries() is None
    for name in ("pin_memory", "async_io"):
        (own / name).mkdir(parents=True)
        (own / name / f"{name}.so").write_bytes(b"")
    assert library.libraries() == (own / "pin_memory" / "pin_memory.so", own / "async_io" / "async_io.so")
    versions["torch"] = "3.5+cpu"
    assert library.libraries() is None


def test_what_is_lacking_is_named(monkeypatch):
    found = {"deepspeed": None}
    patch_library(monkeypatch, library, "util", find_spec=lambda name: found[name])
    monkeypatch.setattr(library, "_has_libaio", lambda: False)
    patch_library(
        monkeypatch, library, "shutil", which=lambda name, path=None: None if name == "ninja" else name
    )
    assert library.lacking() == (
        "pip install 'afserve[deepspeed]'; apt install libaio-dev (libaio-devel elsewhere)"
    )
    found["deepspeed"] = "there"
    assert library.lacking().startswith("pip install ninja; apt install libaio-dev")
    monkeypatch.setattr(library, "_has_libaio", lambda: True)
    assert library.lacking() == "pip install ninja"
    patch_library(monkeypatch, library, "shutil", which=lambda name, path=None: name)
    assert library.lacking() == ""
    patch_library(
        monkeypatch, library, "shutil", which=lambda name, path=None: None if name == "c++" else name
    )
    monkeypatch.delenv("CXX", raising=False)
    assert library.lacking().startswith("apt install g++ libaio-dev")
    patch_library(monkeypatch, library, "sys", platform="darwin")
    assert library.lacking() == "it needs Linux"


def test_libaio_is_looked_for_by_the_compiler(tmp_path, monkeypatch):
    for code, there in ((0, True), (1, False)):
        compiler = tmp_path / f"compiler{code}"
        compiler.write_text(f"#!/bin/sh\ncat > /dev/null\nexit {code}\n")
        compiler.chmod(0o700)
        monkeypatch.setenv("CXX", str(compiler))
        assert library._has_libaio() == there
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert not library._has_libaio()


@pytest.mark.process
def test_a_build_leaves_libraries_and_passes_over_locks_of_one_that_was_killed(home, monkeypatch):
    builds_by(monkeypatch, BUILDS)
    (home / "async_io").mkdir(parents=True)
    (home / "async_io" / "lock").write_bytes(b"")
    assert library.build(3, print) == "" and library.libraries() is not None


@pytest.mark.process
def test_a_build_that_fails_says_where_its_log_is(home, monkeypatch):
    builds_by(monkeypatch, "raise SystemExit('no such header')")
    assert library.build(1, print) == f"it does not build here: see {home / 'build.log'}"
    assert "no such header" in (home / "build.log").read_text()
    builds_by(monkeypatch, "pass")
    assert library.build(1, print).startswith("it does not build here")


@pytest.mark.process
def test_a_build_has_an_end_and_says_how_far_it_is(home, monkeypatch):
    builds_by(monkeypatch, HANGS)
    monkeypatch.setattr(library, "_TOLD_SECONDS", 0.5)
    (home / "async_io").mkdir(parents=True)
    (home / "async_io" / "one.o").write_bytes(b"")
    said, before = [], set(psutil.Process().children(recursive=True))
    found = library.build(1, said.append, 2.0)
    assert found == "not built within 0 minutes; what was compiled is kept for the next try"
    assert "1 of about 15 files" in said[0]
    until = time.monotonic() + 30
    asked = ["cmdline", "environ"]  # psutil says None of who ends meanwhile
    while any(
        "sleep(3600)" in str(one.info["cmdline"]) and str(home) in str(one.info["environ"])
        for one in psutil.process_iter(asked)
    ):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_two_do_not_build_at_once(home, monkeypatch):
    builds_by(monkeypatch, "raise SystemExit(1)")
    home.mkdir()
    with open(home / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert library.build(1, print).startswith("another process is building it")
    assert library.build(1, print).startswith("it does not build here")


def test_a_folder_that_cannot_be_made_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(library, "folder", lambda: tmp_path / "file" / "below")
    assert "file" in library.build(1, print)
    monkeypatch.setattr(library, "folder", lambda: None)
    assert library.build(1, print) == "no home folder to build it in"


def test_doctor_builds_it_for_a_folder_and_only_then(home, monkeypatch):
    monkeypatch.setattr(library, "lacking", lambda: "")
    assert checkup_disk.deepspeed().advice == "afserve doctor --io FOLDER builds it"
    built = []

    def build(jobs, tell):
        built.append(jobs)
        return "" if len(built) > 1 else "it does not build here"

    monkeypatch.setattr(library, "build", build)
    first, second = checkup_disk._built(print), checkup_disk._built(print)
    assert (first.level, first.advice) == (NOTE, "it does not build here") and second.level == OK
    assert 1 <= built[0] <= len(os.sched_getaffinity(0))
    monkeypatch.setattr(library, "lacking", lambda: "apt install libaio-dev")
    assert checkup_disk.deepspeed().advice == checkup_disk._built(print).advice == "apt install libaio-dev"
    monkeypatch.setattr(library, "libraries", lambda: ("one", "other"))
    assert checkup_disk.deepspeed().level == checkup_disk._built(print).level == OK and len(built) == 2
