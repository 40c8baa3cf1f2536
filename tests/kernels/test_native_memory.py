"""The native library under AddressSanitizer, by night UBSan too, and against unreadable pages, on random shapes."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from afserve.kernels.isa import isas_here
from tests.kernels.compiled import NATIVE, compile_program, digest, needs_python

FUZZ = Path(__file__).with_name("fuzz_native.cpp")
FLAGS = ["-std=c++17", "-fno-omit-frame-pointer", "-ffp-contract=fast"]
FLAGS += ["-fno-sanitize-recover=all", "-Wno-psabi", "-w", "-pthread"]
# By day what is found has the names of functions; by night lines, too. It takes three times as long to compile.
BY_DAY, BY_NIGHT = ["-fsanitize=address"], ["-fsanitize=address,undefined", "-g1"]
FLAGS += [
    "--param",
    "asan-instrumentation-with-call-threshold=0",
]  # checks that are calls compile in half the time


def sets_in(source: Path) -> list[str]:
    """The instruction sets whose loops a file has."""
    return re.findall(r"const Isa\* (\w+)_isa\(\) {", source.read_text())


def sources(all_sets: bool) -> tuple[list[Path], list[str]]:
    """What is compiled, and the sets that are left out. Loops of a set take ten seconds to compile: where not all are
    wanted there are those of any processor, and the best ones of this one, which pack weights for all."""
    found = sorted(path for path in NATIVE.glob("*.cpp") if not needs_python(path))
    if all_sets:
        return found, []
    rest = [path for path in found if sets_in(path) and path.name != "isa_generic.cpp"]
    here = [path for name in isas_here() for path in rest if name in sets_in(path)]
    left = [path for path in rest if path not in here[:1]]
    return [path for path in found if path not in left], [name for path in left for name in sets_in(path)]


def build(compiler: str, flags: list[str], compiled: list[Path], left: list[str], program: Path) -> None:
    """In place of those of the same kind that were built before."""
    for old in program.parent.glob(f"{program.name.partition('-')[0]}-*"):
        old.unlink()
    others = program.with_suffix(".cpp")
    declared = "struct Isa;\nconst Isa* generic_isa();\n"
    others.write_text(declared + "".join(f"const Isa* {n}_isa() {{ return generic_isa(); }}\n" for n in left))
    said = compile_program(compiler, flags, [FUZZ, others, *compiled], program)
    if "cannot find" in said and "asan" in said:
        pytest.skip("the compiler has no AddressSanitizer library")
    assert not said, said[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rounds", [1, pytest.param(30, marks=pytest.mark.long)])
def test_no_op_reads_or_writes_outside_what_it_was_given(kept: Callable[[str], Path], rounds: int) -> None:
    """The program is built once for what it is made of, and kept where pytest keeps what it knows of earlier runs."""
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs g++ on Linux")
    by_night = rounds > 1
    compiled, left = sources(by_night)
    flags = [*FLAGS, *(BY_NIGHT if by_night else BY_DAY)]
    made_of = digest(compiler, [*flags, *isas_here()], [FUZZ])
    program = kept("afserve-fuzz") / f"{'all' if by_night else 'few'}-{made_of}"
    if not program.exists():
        build(compiler, flags, compiled, left, program)
    run = subprocess.run([str(program), str(rounds)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-6000:]
    fuzzed = re.findall(r"(\w+): ", run.stdout)
    names = {name for path in compiled for name in sets_in(path)}
    assert "calls" in run.stdout and names & set(isas_here()) <= set(fuzzed)
