"""A chip that is not here: kernels are compiled for it, never launched, and what the compiler made of each is read.

Of a kernel's machine code it tells registers, spilled bytes, local loads inside loops, shared memory, programs that a
multiprocessor holds at once, how wide global loads are, matrix instructions and the length of the longest loop that
multiplies. It knows no kernel; `gpu_launches.py` has the launches.
"""

import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # of a program (CUDA guide, table 30)
MATRIX = ("HMMA", "HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA")
MULTIPLIES = (*MATRIX, "FFMA")
_REGISTERS, _WARPS, _PROGRAMS = 65536, 64, 32  # of a multiprocessor, capabilities 9.0 and 10.0
DISASSEMBLED = 900.0  # seconds; it begins late where others have the cores
_UNIT = 1 << 10  # shared memory that the system takes of each program
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
_TARGET = re.compile(r"BRA\S*\s+.*?(0x[0-9a-f]+)")
_LOADS = ("LDG.", "LDGSTS.", "UTMALDG", "UBLKCP")  # LDGDEPBAR loads nothing
_BITS = re.compile(r"\.[US]?(8|16|64|128|256)(?=\.|$)")
_WIDE = 16  # bytes
_GUARD = re.compile(r"^@!?U?P\w+\s+")


class AbsentChip:
    """Just enough of a Triton driver to compile for compute capability `arch` (90 is 9.0)."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Made:
    """One compiled kernel. `spill` is bytes of a thread's stack; `wide_loads` is the share of global loads of 128 bits
    among those in loops that multiply, `wide_bytes` their share of what is loaded there (1 where nothing is); `loop` is
    instructions of the longest of these loops; `programs` is how many a multiprocessor holds by registers, shared
    memory and warps."""

    case: str
    kernel: str
    registers: int
    spill: int
    local_in_loops: int
    shared: int
    programs: int
    wide_loads: float
    wide_bytes: float
    matrix: tuple[str, ...]
    loop: int
    seconds: float


def compile_only(arch: int, told: Callable[[Made], None]) -> "Launches":
    """From here on, no launch of this process reaches a device: `told` gets each kernel that is new."""
    driver.set_active(AbsentChip(arch))
    launches = Launches(JITFunction.run, told)

    def run(function: Any, *args: Any, **options: Any) -> Any:  # a function, so that it binds as a method
        return launches(function, *args, **options)

    JITFunction.run = run
    return launches


class Launches:
    """Takes the place of JITFunction.run, and gives nothing that a launch could keep. `case` names what is launched
    now."""

    def __init__(self, run: Callable[..., Any], told: Callable[[Made], None]) -> None:
        self.case = ""
        self._run, self._told = run, told
        self._seen: set[str] = set()

    def begin_group(self) -> None:
        """What an earlier group launched too is told again, so that a group's rows do not depend on others."""
        self._seen.clear()

    def __call__(self, function: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        begin = time.perf_counter()
        kernel = self._run(function, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in self._seen:
            self._seen.add(kernel.hash)
            seconds = round(time.perf_counter() - begin, 2)
            self._told(made_of(kernel, self.case, function.fn.__name__, seconds))


def made_of(kernel: Any, case: str, name: str, seconds: float) -> Made:
    """What Triton's own disassembler says of a compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", cubin]
        code = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=DISASSEMBLED
        ).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", code)
    assert used is not None, f"{name}: the disassembler told no registers"
    registers, stack = map(int, used.groups())
    shared = kernel.metadata.shared
    return Made(
        case, name, registers, stack, shared=shared,
        programs=_programs(registers, shared, kernel.metadata.num_warps), seconds=seconds, **read_code(code),
    )  # fmt: skip


def read_code(code: str) -> dict[str, Any]:
    """`local_in_loops`, `wide_loads`, `wide_bytes`, `matrix` and `loop` of machine code as cuobjdump prints it."""
    lines = [(int(at, 16), _GUARD.sub("", text)) for at, text in _LINE.findall(code)]
    jumps = ((at, _TARGET.match(text)) for at, text in lines)
    loops = [(int(to[1], 16), at) for at, to in jumps if to is not None and int(to[1], 16) < at]
    bodies = [[text.split()[0] for at, text in lines if first <= at <= last] for first, last in loops]
    inside = [text.split()[0] for at, text in lines if any(first <= at <= last for first, last in loops)]
    working = [body for body in bodies if any(name.startswith(MULTIPLIES) for name in body)]
    sizes = [_loaded(name) for body in working for name in body if name.startswith(_LOADS)]
    wide = [size for size in sizes if size >= _WIDE]
    heads = Counter(text.split()[0].partition(".")[0] for _, text in lines)
    return {
        "local_in_loops": sum(name.startswith(("LDL", "STL")) for name in inside),
        "wide_loads": round(len(wide) / len(sizes), 2) if sizes else 1.0,
        "wide_bytes": round(sum(wide) / sum(sizes), 2) if sizes else 1.0,
        "matrix": tuple(name for name in MATRIX if heads[name]),
        "loop": max(map(len, working), default=0),
    }


def _loaded(name: str) -> int:
    """Bytes of a thread's load; a copy by the tensor memory accelerator counts as one of 16."""
    told = _BITS.search(name)
    return int(told[1]) // 8 if told else 4 if name.startswith("LDG") else _WIDE


def _programs(registers: int, shared: int, warps: int) -> int:
    by_registers = _REGISTERS // (-(-registers * 32 // 256) * 256 * warps)
    return min(by_registers, (228 << 10) // (shared + _UNIT), _WARPS // warps, _PROGRAMS)


def row(made: Made) -> dict[str, object]:
    return asdict(made)
