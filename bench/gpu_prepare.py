"""Wheels for a machine without a network: Python 3.12 on Linux, beside the torch 2.11 that is there already.

`python -m bench.gpu_first_run --prepare` downloads what afserve and its tests need but torch, its libraries and Triton;
there, the run's first step unpacks them: `python -m bench.gpu_prepare unpack FOLDER`. Nothing is installed. Of the
libraries that are compared with own kernels FlashInfer is left out: its wheel alone has 97 MiB.
"""

import argparse
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

from bench.origin import ROOT

PYTHON = "3.12"
PLATFORMS = (*(f"manylinux_2_{glibc}_x86_64" for glibc in (17, 27, 28, 31, 34)), "manylinux2014_x86_64")
MOST = 60 << 20  # bytes of all wheels: what may be carried there
THERE = ("torch", "numpy", "triton")  # with the machine's torch, and each of them large
TESTS = ("pytest", "pytest-timeout", "hypothesis", "pybind11", "setuptools")
COMPARED = ("fla-core", "sgl-deep-gemm")  # 6 MiB, with what they need
NAME = re.compile(r"^[A-Za-z0-9._-]+")
TIME = 600


def wanted(pyproject: str, constraints: str) -> list[str]:
    """Requirements, `name==version` where they are pinned: those of the project, of its tests and of the libraries that
    are compared that the machine has not. What these need is found by pip, at constraints.txt's versions."""
    declared = [_name(line) for line in tomllib.loads(pyproject)["project"]["dependencies"]]
    pins = dict(line.split("==") for line in constraints.split() if "==" in line)
    names = [name for name in (*declared, *TESTS, *COMPARED) if name not in THERE]
    return [f"{name}=={pins[name]}" if name in pins else name for name in dict.fromkeys(names)]


def _name(requirement: str) -> str:
    found = NAME.match(requirement)
    assert found is not None, requirement
    return found[0].lower()


def prepare(folder: Path) -> int:
    """Exit status 1 where something could not be had or all of it is too much to carry."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = wanted((ROOT / "pyproject.toml").read_text(), (ROOT / "constraints.txt").read_text())
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    command = [
        sys.executable, "-m", "pip", "download", "-q", "--dest", str(folder), "--python-version", PYTHON,
        "--implementation", "cp", "--only-binary=:all:", "--constraint", str(ROOT / "constraints.txt"), *platforms,
    ]  # fmt: skip
    failed = []
    for requirement in asked:
        done = subprocess.run(
            [*command, requirement], capture_output=True, text=True, timeout=TIME, check=False
        )
        if done.returncode:
            failed.append(requirement)
            print(f"{requirement}: {done.stderr.strip().splitlines()[-1:]}")
    size = sum(path.stat().st_size for path in folder.glob("*.whl"))
    had = len(asked) - len(failed)
    print(f"{had} of {len(asked)} wheels, {size / 2**20:.1f} MiB of at most {MOST >> 20}, in {folder}")
    if size > MOST:
        print(
            f"too much to carry: the largest is {max(folder.glob('*.whl'), key=lambda p: p.stat().st_size).name}"
        )
    return int(bool(failed) or size > MOST)


def unpack(folder: Path) -> list[str]:
    """All wheels of a folder into its `site`, where they can be imported. What they would put elsewhere is left out."""
    return [_unpack(wheel, folder / "site") for wheel in sorted(folder.glob("*.whl"))]


def _unpack(wheel: Path, site: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site, members=_inside(archive.namelist()))
    return wheel.name


def _inside(names: Iterable[str]) -> list[str]:
    return [name for name in names if ".data/" not in name]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_prepare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=("unpack",))
    parser.add_argument("folder", type=Path)
    print(json.dumps({"wheels": unpack(parser.parse_args().folder)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
