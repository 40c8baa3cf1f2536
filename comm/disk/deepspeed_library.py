"""Where the libraries of DeepSpeed's asynchronous I/O are, what is lacking for them, and how they are built.

They are built once for each version of torch and DeepSpeed, into a folder of the user's, by `afserve doctor --io` and
nobody else. Nothing of DeepSpeed is imported here.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata, util
from pathlib import Path

from afserve.child import module
from afserve.digest_cache import user_folder

PIN_MEMORY, ASYNC_IO = "pin_memory", "async_io"
BUILD_SECONDS = 3600.0
_TOLD_SECONDS = 15.0
_FILES = 15  # that are compiled, of DeepSpeed 0.19
_PROBE = b"#include <libaio.h>\nint main() { io_context_t queue = 0; return io_setup(1, &queue); }\n"


def folder() -> Path | None:
    """Where they belong; None without DeepSpeed or a home."""
    home = user_folder()
    try:
        versions = f"{metadata.version('deepspeed')}-{metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        return None
    return None if home is None else home / "deepspeed" / f"{versions}-{sys.implementation.cache_tag}"


def libraries() -> tuple[Path, Path] | None:
    """Those of locked memory and of asynchronous I/O; None where they are not built."""
    own = folder()
    if own is None:
        return None
    pin_memory, async_io = (own / name / f"{name}.so" for name in (PIN_MEMORY, ASYNC_IO))
    return (pin_memory, async_io) if pin_memory.is_file() and async_io.is_file() else None


def lacking() -> str:
    """What is to be installed before they can be built; empty where nothing is."""
    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    wanted = []
    if util.find_spec("deepspeed") is None:
        wanted.append("pip install 'afserve[deepspeed]'")
    elif shutil.which("ninja", path=_path()) is None:
        wanted.append("pip install ninja")
    if shutil.which(_compiler()) is None:
        wanted.append("apt install g++ libaio-dev (or your system's packages of the compiler and libaio)")
    elif not _has_libaio():
        wanted.append("apt install libaio-dev (libaio-devel elsewhere)")
    return "; ".join(wanted)


def _compiler() -> str:
    """The one that torch builds with."""
    return os.environ.get("CXX", "c++")


def _path() -> str:
    """Programs of this environment's packages are found where it is not activated, too."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


def _has_libaio() -> bool:
    command = [_compiler(), "-x", "c++", "-", "-o", os.devnull, "-laio"]
    try:
        return not subprocess.run(
            command, input=_PROBE, capture_output=True, timeout=60, check=False
        ).returncode
    except (OSError, subprocess.SubprocessError):
        return False


def build(jobs: int, tell: Callable[[str], None], seconds: float = BUILD_SECONDS) -> str:
    """Builds them with so many compilers at once; why that failed, empty where it did not. What was compiled stays
    for the next time. `tell` gets a line now and then."""
    own = folder()
    if own is None:
        return "no home folder to build it in"
    try:
        own.mkdir(0o700, parents=True, exist_ok=True)
        with _locked(own / "lock") as lock:
            if lock is None:
                return "another process is building it; try again when that has ended"
            for left in own.glob("*/lock"):  # of a build that was killed: the next one would wait for ever
                left.unlink()
            return _built(own, lock, jobs, tell, seconds)
    except OSError as error:
        return f"{own}: {error}"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """A lock that goes with the last process that has it, or None where another one has."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield None
    else:
        yield descriptor
    finally:
        os.close(descriptor)


def _built(own: Path, lock: int, jobs: int, tell: Callable[[str], None], seconds: float) -> str:
    # Whatever GPU is here: it reads into host memory, and is built so.
    wanted = {"TORCH_EXTENSIONS_DIR": str(own), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    log, began = own / "build.log", time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            module("afserve.comm.disk.deepspeed_build"), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            pass_fds=[lock], start_new_session=True,
            env={**os.environ, **wanted, "MAX_JOBS": str(jobs), "PATH": _path()},
        )  # fmt: skip
    try:
        while (took := time.monotonic() - began) < seconds:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(min(_TOLD_SECONDS, seconds - took))
                return "" if code == 0 and libraries() else f"it does not build here: see {log}"
            done = len(list(own.glob("*/*.o")))
            tell(
                f"building DeepSpeed's asynchronous I/O, once: {done} of about {_FILES} files, {took:,.0f} s"
            )
        return f"not built within {seconds / 60:.0f} minutes; what was compiled is kept for the next try"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # compilers, too
            process.wait()
