"""Declares the one optional native extension; everything else is in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

ROOT = Path(__file__).parent
# Each instruction set has its own file that names its target; the flags are the same for all, so the library
# built here runs on any machine of this architecture.
FLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-pthread"]
# False alarms: float vectors passed by value, and GCC 12's own AVX-512 header.
FLAGS += ["-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]

setup(
    ext_modules=[
        Pybind11Extension(
            "afserve.kernels._native",
            sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("kernels/native/*.cpp")),
            include_dirs=["kernels/native"],
            depends=sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("kernels/native/*.h")),
            cxx_std=17,
            extra_compile_args=FLAGS,
            optional=True,  # without a compiler the install succeeds and PyTorch does the work
        )
    ]
)
