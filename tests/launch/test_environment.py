"""What of a shell's environment is left, in the process and where the kernel shows it to others."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.launch.processes import environment
from afserve.launch.processes.environment import kept_environment

pytestmark = pytest.mark.process
SCRIPT = """
import os, sys
os.environ["CHANGED_TOKEN"] = "never2"
from afserve.launch.processes.environment import forget_secrets
forget_secrets()
child = os.fork()
if child == 0:
    sys.stdout.buffer.write(open("/proc/self/environ", "rb").read())
    sys.stdout.flush()
    os._exit(0)
os.wait()
import subprocess
sys.stdout.flush()
subprocess.run(["env"], check=True)
"""
KEPT = {"PATH": os.environ["PATH"], "HOME": "/h", "LC_ALL": "C", "SSH_AUTH_SOCK": "/s", "TERM": "dumb"}
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True).map(lambda name: f"{name}_TOKEN")
values = st.text(st.characters(exclude_characters="\0\n", codec="utf-8"), max_size=20).map(
    lambda v: f"never{v}="
)


@settings(max_examples=5)
@given(st.dictionaries(names, values, max_size=20))
def test_nothing_is_left_but_what_processes_need(secrets):
    given_ = {
        **secrets,
        **KEPT,
        "HF_TOKEN": "never",
        "CHANGED_TOKEN": "never1",
        "EMPTY": "",
        "URL": "x://u:never@",
    }
    given_ = {name: value for name, value in given_.items() if not is_kept(name) or name in KEPT}
    python = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
    command = [sys.executable, "-c", SCRIPT]
    shown = subprocess.run(
        command, env={**python, **given_}, capture_output=True, timeout=60, check=True
    ).stdout
    assert b"never" not in shown
    assert all(shown.count(f"{name}={value}".encode()) == 2 for name, value in KEPT.items())


def is_kept(name):
    return name.rstrip("0123456789").partition("_")[0] in {
        "LC",
        "XDG",
        "CUDA",
        "NO",
        "FORCE",
        "RAY",
        "SSH",
    }


def test_what_nodes_need_is_kept(monkeypatch):
    """Where a command finds afserve by PYTHONPATH, its nodes find the same one."""
    needed = {"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "NCCL_DEBUG", "PYTHONPATH", "PYTHONNOUSERSITE"}
    others = {
        "HF_TOKEN",
        "AFSERVE_API_KEY",
        "PYTHONANYWHERE_TOKEN",
        "PYTHON_KEYRING_PASSWORD",
        "PYTHONSECRET",
        "PYTHONINSPECT",
    }
    for name in needed | others:
        monkeypatch.setenv(name, "x")
    kept = kept_environment()
    assert needed <= kept.keys() and not others & kept.keys()
    assert kept["OPENBLAS_NUM_THREADS"] == "1"


def test_a_command_that_ignores_what_the_shell_says_to_python_has_nodes_that_do(monkeypatch):
    """As `python -I` and `python -E` do."""
    for name in ("PYTHONPATH", "PYTHONHASHSEED", "LC_ALL"):
        monkeypatch.setenv(name, "0")
    assert {"PYTHONPATH", "PYTHONHASHSEED", "LC_ALL"} <= kept_environment().keys()
    monkeypatch.setattr(environment, "sys", SimpleNamespace(flags=SimpleNamespace(ignore_environment=1)))
    kept = kept_environment()
    assert "LC_ALL" in kept and not [name for name in kept if name.startswith("PYTHON")]
