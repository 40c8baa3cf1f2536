"""Programs that tests compile from the native library's files, without its bindings."""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import xxhash

NATIVE = Path(__file__).parents[2] / "kernels/native"
# Read once, in place of once a file: a fifth of what these files take without optimising, a sixteenth with -O1.
HEADERS = (
    "algorithm",
    "atomic",
    "chrono",
    "cmath",
    "cstring",
    "functional",
    "map",
    "memory",
    "random",
    "stdexcept",
)
HEADERS += ("string", "thread", "vector", "immintrin.h")
# Without those: GCC reads `arm_sve.h` before all other headers, or not at all, and where loops are optimised, what was
# read without optimising is of no use.
APART = ("isa_sve.cpp", "isa_neon.cpp", "isa_neonbf16.cpp")


def needs_python(source: Path) -> bool:
    """Whether it, or a header that it includes, is of the bindings."""
    text = source.read_text()
    headers = [NATIVE / name for name in re.findall(r'#include "([a-z0-9_]+\.h)"', text)]
    return "bind" in text or any(needs_python(header) for header in headers)


def digest(compiler: str, words: Iterable[str], own: Iterable[Path]) -> str:
    """Of all that a program is made of: the library, its `own` files, and the words that it is compiled with."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    content = [path.read_bytes() for path in (Path(__file__), *own, *sorted(NATIVE.glob("*.[ch]*")))]
    return xxhash.xxh64_hexdigest(b"".join((version, " ".join(words).encode(), *content)))


def compile_program(
    compiler: str, flags: Sequence[str], files: Sequence[Path], program: Path, loops: str = "-O0"
) -> str:
    """What the compiler says where it cannot, nothing where `program` is there. `loops`: how far those of Arm's sets
    are optimised; nothing else is."""
    command = [compiler, *flags, "-O0", f"-I{NATIVE}"]
    with tempfile.TemporaryDirectory(dir=program.parent) as folder:
        headers, made = Path(folder) / "headers.h", Path(folder) / "made"
        headers.write_text(
            "".join(f"#if __has_include(<{name}>)\n#include <{name}>\n#endif\n" for name in HEADERS)
        )
        apart = {str(file): f"{folder}/{file.stem}.o" for file in files if file.name in APART}
        together = [str(file) for file in files if file.name not in APART]
        for words in (
            ["-x", "c++-header", str(headers), "-o", f"{headers}.gch"],
            *([loops, "-c", file, "-o", made_of] for file, made_of in apart.items()),
            ["-include", str(headers), *together, *apart.values(), "-o", str(made)],
        ):
            said = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
            if said.returncode:
                return said.stderr
        made.replace(program)
    return ""
