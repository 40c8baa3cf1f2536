"""The native library under AddressSanitizer and UBSan, and against unreadable pages, on random shapes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "kernels/native"
FLAGS = ["-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", "-ffp-contract=fast"]
FLAGS += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def needs_python(source: Path) -> bool:
    """Whether it, or a header that it includes, is of the bindings."""
    text = source.read_text()
    headers = [NATIVE / name for name in re.findall(r'#include "([a-z0-9_]+\.h)"', text)]
    return "bind" in text or any(needs_python(header) for header in headers)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rounds", [2, pytest.param(30, marks=pytest.mark.long)])
def test_no_op_reads_or_writes_outside_what_it_was_given(tmp_path: Path, rounds: int) -> None:
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux")
    sources = [str(path) for path in NATIVE.glob("*.cpp") if not needs_python(path)]
    program = tmp_path / "fuzz"
    include = f"-I{NATIVE}"
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
