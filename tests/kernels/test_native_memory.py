"""The native library under AddressSanitizer and UBSan, and against unreadable pages, on random shapes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = ["-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", "-ffp-contract=fast"]
FLAGS += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rounds", [2, pytest.param(30, marks=pytest.mark.long)])
def test_no_op_reads_or_writes_outside_what_it_was_given(tmp_path: Path, rounds: int) -> None:
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux")
    every = (ROOT / "kernels/native").glob("*.cpp")
    sources = [str(path) for path in every if "bind" not in path.read_text()]  # the rest needs Python
    program = tmp_path / "fuzz"
    include = f"-I{ROOT / 'kernels/native'}"
    main = str(Path(__file__).with_name("fuzz_native.cpp"))
    built = subprocess.run(
        [compiler, *FLAGS, "-Wno-psabi", "-w", "-pthread", include, main, *sources, "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "cannot find" in built.stderr and "asan" in built.stderr:
        pytest.skip("the compiler has no AddressSanitizer library")
    assert built.returncode == 0, built.stderr[-4000:]
    run = subprocess.run([str(program), str(rounds)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-6000:]
    assert "calls" in run.stdout
