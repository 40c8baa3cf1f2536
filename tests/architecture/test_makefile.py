"""The environment of `make setup` belongs to one checkout: a copy that came along with another folder is made anew."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def would_run(folder: Path) -> str:
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    (folder / ".venv").mkdir()
    (folder / ".venv" / ".ready").write_text(f"{folder}\n")
    done = subprocess.run(["make", "-n", "setup"], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def test_an_environment_of_this_folder_is_kept_and_a_copied_one_is_not(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    assert "venv" not in would_run(here)
    shutil.copytree(here, there)
    copied = subprocess.run(["make", "-n", "setup"], cwd=there, capture_output=True, text=True, check=True)
    assert f".venv was made for {here}: it is made anew" in copied.stdout and "rm -rf .venv" in copied.stdout


def test_no_line_runs_a_script_of_the_environment() -> None:
    """Such a script names the folder that it was made in."""
    lines = (ROOT / "Makefile").read_text().splitlines()
    assert not [line for line in lines if "$(BIN)/" in line and "$(BIN)/python" not in line]
