"""Instructions of Arm's loops for each byte of weights, counted in QEMU, beside those of llama.cpp's loops.

Needs `g++-aarch64-linux-gnu` and `qemu-user-static` of Debian, and llama.cpp's source for its side. Nothing is timed.
What is done once for a panel is not in it: 64 columns times 2,048 inputs are counted, less the same with 1,024.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.origin import ROOT, origin

RESULTS = ROOT / "bench" / "results" / "arm_counts.jsonl"
PROGRAM, NATIVE = ROOT / "bench" / "arm_counts.cpp", ROOT / "kernels" / "native"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
FLAGS = ["-w", "-O3", "-static", "-Wl,--unresolved-symbols=ignore-all"]
OURS = [
    "-std=c++17",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-pthread",
    f"-I{NATIVE}",
]
COLUMNS, INPUTS = 64, (1024, 2048)


@dataclass(frozen=True, slots=True)
class Set:
    cpu: str  # that QEMU pretends to have
    march: str  # of llama.cpp
    inputs: int  # that its loops take from a column at a time


SETS = {
    "generic": Set("cortex-a72", "armv8-a", 0),
    "neon": Set("neoverse-n1", "armv8.2-a+dotprod+fp16", 4),
    "neonbf16": Set("max,sve128=on", "armv8.2-a+dotprod+fp16+i8mm+bf16", 8),
    "sve": Set("max,sve256=on", "armv8.2-a+dotprod+fp16+i8mm+bf16+sve", 8),
}
TYPES = {  # bytes of a number, scales aside, and llama.cpp's type
    "bf16": (2, "bf16"), "int8": (1, "q8_0"), "Q8_0": (1, "q8_0"), "int4": (0.5, "q4_0"), "Q4_0": (0.5, "q4_0"),
    "MXFP4": (0.5, "mxfp4"), "Q5_0": (0.625, "q5_0"), "Q4_K": (0.5, "q4_K"), "Q5_K": (0.625, "q5_K"),
    "Q6_K": (0.75, "q6_K"),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        ours = _build_ours(Path(folder), pool)
        theirs = _build_theirs(options.llama, Path(folder), pool) if options.llama else {}
        for row in _rows(ours, theirs, options):
            print(json.dumps(row) if options.json else _line(row), flush=True)
            if options.save:
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


def loop_of(kind: str, name: str) -> str:
    """What llama.cpp multiplies weights of this kind by one row with: eight or four columns at a time where it has
    repacked them, one elsewhere."""
    given = TYPES[kind][1]
    if given == "bf16":
        return "ggml_vec_dot_bf16"
    row = "q8_K" if given.endswith("K") else "q8_0"
    inputs = 4 if given == "mxfp4" else SETS[name].inputs
    if name == "generic" or given == "q5_0":
        return f"ggml_vec_dot_{given}_{row}"
    columns = 8 if row == "q8_K" or (name == "sve" and given == "q4_0") else 4
    return f"ggml_gemv_{given}_{columns}x{inputs}_{row}"


def _rows(ours: Path, theirs: dict[str, Path], options: argparse.Namespace) -> Iterator[dict[str, object]]:
    made = {"bench": "arm_counts", "compiler": _version(COMPILER), "emulator": _version(EMULATOR)}
    for kind in TYPES:
        for name, of in SETS.items():
            for rows in options.rows:
                found = made | {"weights": kind, "set": name, "rows": rows}
                found["instructions"] = _per_byte(of.cpu, kind, [str(ours), name, kind], [str(rows)])
                if theirs and rows == 1:
                    loop = loop_of(kind, name)
                    found |= {"peer": options.llama_version, "peer_loop": loop}
                    found["peer_instructions"] = _per_byte(of.cpu, kind, [str(theirs[name]), loop], [])
                yield found | {**origin(), "isa": name}


def _per_byte(cpu: str, kind: str, command: Sequence[str], last: Sequence[str]) -> float:
    fewer, more = (_executed(cpu, [*command, str(inputs), *last]) for inputs in INPUTS)
    return round((more - fewer) / ((INPUTS[1] - INPUTS[0]) * COLUMNS * TYPES[kind][0]), 4)


def _executed(cpu: str, command: Sequence[str]) -> int:
    """Every instruction is a block of its own, and its execution a line."""
    words = [EMULATOR, "-cpu", cpu, "-singlestep", "-d", "exec,nochain", "-D", "/dev/stderr", *command]
    with subprocess.Popen(words, stderr=subprocess.PIPE) as run:
        assert run.stderr is not None
        count, last = 0, b""
        for last in run.stderr:
            count += last.startswith(b"Trace ")
    if run.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {run.returncode}: {last.decode(errors='replace')}")
    return count


def _build_ours(folder: Path, pool: ThreadPoolExecutor) -> Path:
    sources = [PROGRAM, NATIVE / "isa.cpp", *(NATIVE / f"isa_{name}.cpp" for name in SETS)]
    objects = [folder / f"{source.stem}.o" for source in sources]
    list(pool.map(lambda s, o: _compile([*OURS, "-c", str(s), "-o", str(o)]), sources, objects))
    _compile([*OURS, *map(str, objects), "-o", str(folder / "ours")])
    return folder / "ours"


def _build_theirs(llama: Path, folder: Path, pool: ThreadPoolExecutor) -> dict[str, Path]:
    """A program for each set."""
    cpu = llama / "ggml/src/ggml-cpu"
    words = [
        "-DNDEBUG",
        "-D_GNU_SOURCE",
        *(f"-I{llama / f'ggml/{part}'}" for part in ("include", "src", "src/ggml-cpu")),
    ]
    sources = [
        (cpu / "arch/arm/quants.c", "gnu11"),
        (cpu / "arch/arm/repack.cpp", "c++17"),
        (cpu / "vec.cpp", "c++17"),
    ]

    def compiled(name: str) -> Path:
        objects = []
        for source, standard in sources:
            objects.append(str(folder / f"{name}-{source.stem}.o"))
            language = ["-x", "c"] if source.suffix == ".c" else []
            given = [f"-march={SETS[name].march}", f"-std={standard}", *words, *language, "-c", str(source)]
            _compile(
                [*given, "-o", objects[-1]], COMPILER if not language else COMPILER.replace("g++", "gcc")
            )
        program = folder / f"theirs-{name}"
        _compile(["-std=c++17", "-DLLAMA", str(PROGRAM), *objects, "-o", str(program)])
        return program

    return dict(zip(SETS, pool.map(compiled, SETS), strict=True))


def _compile(words: Sequence[str], compiler: str = COMPILER) -> None:
    run = subprocess.run([compiler, *FLAGS, *words], capture_output=True, text=True, check=False, timeout=600)
    if run.returncode:
        raise RuntimeError(f"{compiler} {' '.join(words)}: {run.stderr[-2000:]}")


def _version(tool: str) -> str:
    run = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True, timeout=60)
    return run.stdout.splitlines()[0]


def _line(row: dict[str, object]) -> str:
    beside = f"  {row['peer_loop']} {row['peer_instructions']:.3f}" if "peer_loop" in row else ""
    return f"{row['weights']:<6} {row['set']:<9} rows {row['rows']}  {row['instructions']:.3f}{beside}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.arm_counts", description=__doc__.splitlines()[0])
    parser.add_argument("--llama", type=Path, help="llama.cpp's source, to count its loops too")
    parser.add_argument("--llama-version", default="llama.cpp", help="what rows call it")
    parser.add_argument("--rows", default="1,4", help="that come together, 1 to 64")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help=f"append the rows to {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    rows = options.rows.split(",")
    if not all(each.isdecimal() and 1 <= int(each) <= 64 for each in rows):
        parser.error(f"--rows: {options.rows!r} is no list of numbers from 1 to 64, such as 1,4")
    options.rows = [int(each) for each in rows]
    if options.llama and not (options.llama / "ggml/src/ggml-cpu/arch/arm").is_dir():
        parser.error(f"--llama: {options.llama} has no ggml/src/ggml-cpu/arch/arm; give llama.cpp's source")
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            parser.error(f"{tool} is missing: apt install g++-aarch64-linux-gnu qemu-user-static")
    return options


if __name__ == "__main__":
    main()
