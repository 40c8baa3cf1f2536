"""Declares the one optional native extension; everything else is in pyproject.toml.

Its files are compiled side by side, the longest first, and only those whose object is older than they or a header.
"""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

ROOT = Path(__file__).parent
NATIVE = ROOT / "kernels" / "native"
# Each instruction set has its own file that names its target; the flags are the same for all, so the library
# built here runs on any machine of this architecture.
FLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-pthread"]
# False alarms: float vectors passed by value, and GCC 12's own AVX-512 header.
FLAGS += ["-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
GLUE = ("bind_", "module")  # what only hands arguments over: optimising its templates takes half of the time


def weight(path: Path) -> tuple[bool, int]:
    """Sorts what takes long to compile to the front: instruction sets, then the largest files."""
    return not path.name.startswith("isa_"), -path.stat().st_size


def is_stale(obj: str, src: str) -> bool:
    made = Path(obj).stat().st_mtime if Path(obj).exists() else 0.0
    return max(path.stat().st_mtime for path in (Path(src), *NATIVE.glob("*.h"))) > made


class BuildNative(build_ext):
    def build_extension(self, ext: Pybind11Extension) -> None:
        compile_one = self.compiler._compile

        def with_level(obj, src, kind, cc_args, extra, pp_opts):  # type: ignore[no-untyped-def]
            glue = Path(src).name.startswith(GLUE)
            compile_one(obj, src, kind, cc_args, [*extra, "-O1"] if glue else extra, pp_opts)

        self.compiler._compile = with_level
        super().build_extension(ext)


with ParallelCompile(default=0, needs_recompile=is_stale):
    setup(
        cmdclass={"build_ext": BuildNative},
        ext_modules=[
            Pybind11Extension(
                "afserve.kernels._native",
                [str(path.relative_to(ROOT)) for path in sorted(NATIVE.glob("*.cpp"), key=weight)],
                include_dirs=["kernels/native"],
                depends=sorted(str(path.relative_to(ROOT)) for path in NATIVE.glob("*.h")),
                cxx_std=17,
                extra_compile_args=FLAGS,
                optional=True,  # without a compiler the install succeeds and PyTorch does the work
            )
        ],
    )
