"""The native library as processors with Arm's instructions run it, in QEMU: each kernel against what it has to give.

Debian has both tools: `apt install g++-aarch64-linux-gnu qemu-user-static`. QEMU says whether results are right, never
how long they take.
"""

import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from afserve.config import ISAS
from tests.kernels.arm.cases import Case, kernels, save
from tests.kernels.compiled import NATIVE, compile_program, digest, needs_python

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
FLAGS = [
    "-std=c++17",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-pthread",
    "-w",
    "-static",
]
LOOPS = "-O1"  # of each set: QEMU takes many times as long with those of -O0 as GCC with these
SETS = {  # of each processor, the best first
    "max": ["neonbf16", "neon", "generic"],  # SVE vectors of 64 bytes, which no processor with BF16 has
    "max,sve256=on": ["sve", "neonbf16", "neon", "generic"],
    "max,sve128=on": ["neonbf16", "neon", "generic"],
    "max,sve=off": ["neonbf16", "neon", "generic"],
    "neoverse-n1": ["neon", "generic"],
    "cortex-a72": ["generic"],
}
RUNS_ON = {
    "sve": "max,sve256=on",
    "neonbf16": "max,sve128=on",
    "neon": "neoverse-n1",
    "generic": "cortex-a72",
}
KERNELS = (
    "linear", "linear_heads", "expert_ffn", "norms", "router", "attend_gqa", "attend_mla", "delta", "blocks",
)  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="session")
def program(kept: Callable[[str], Path]) -> Path:
    """The library without its bindings, and `run_cases.cpp`, as one static program for aarch64. It takes half a
    minute to build, and is kept where pytest keeps what it knows of earlier runs."""
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}: apt install g++-aarch64-linux-gnu qemu-user-static")
    own = [Path(__file__).with_name(name) for name in ("run_cases.cpp", "cases.h")]
    folder = kept("afserve-arm")
    built = folder / f"run_cases-{digest(COMPILER, [*FLAGS, LOOPS], own)}"
    if not built.exists():
        for old in folder.iterdir():
            old.unlink()
        sources = [path for path in NATIVE.glob("*.cpp") if not needs_python(path)]
        said = compile_program(COMPILER, FLAGS, [*sources, own[0]], built, LOOPS)
        assert not said, said[-4000:]
    return built


@pytest.fixture(scope="session")
def cases() -> dict[str, list[Case]]:
    return kernels()


def run_cases(program: Path, cpu: str, cases: list[Case], sets: Iterable[str], folder: Path) -> list[str]:
    """The lines that it printed."""
    save(folder / "cases", cases)
    command = [EMULATOR, "-cpu", cpu, str(program), str(folder / "cases"), *sets]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    return run.stdout.splitlines()


@pytest.mark.parametrize("cpu", SETS)
def test_a_processor_has_its_sets(program: Path, tmp_path: Path, cpu: str) -> None:
    lines = run_cases(program, cpu, [], ISAS, tmp_path)
    assert lines == [*(f"set {name}" for name in SETS[cpu]), "0 right, 0 wrong"]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", RUNS_ON)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_set_computes_what_the_reference_does(
    program: Path, cases: dict[str, list[Case]], tmp_path: Path, kernel: str, name: str
) -> None:
    """A row's bits are also the same alone and among others."""
    assert set(cases) == set(KERNELS)
    ran, result = run_cases(program, RUNS_ON[name], cases[kernel], [name], tmp_path)
    assert ran == f"set {name}"
    assert int(result.split()[0]) >= len(cases[kernel]) and result.endswith(" 0 wrong")
