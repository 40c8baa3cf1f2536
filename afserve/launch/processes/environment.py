"""The environment of the processes of a run: what a node may need of the shell that starts it, and nothing else.

Keys and tokens of the shell are none of their business. It starts no process.
"""

import ctypes
import os
import sys
from collections.abc import Collection

_KEPT = {
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "TZ",
    "TMPDIR",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
}
# The interpreter's own, e.g. where afserve itself may be; not PYTHONINSPECT and PYTHONSTARTUP, which are of a terminal.
_PYTHONS = {
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONPLATLIBDIR",
    "PYTHONNOUSERSITE",
    "PYTHONSAFEPATH",
    "PYTHONUSERBASE",
    "PYTHONPYCACHEPREFIX",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONUTF8",
    "PYTHONIOENCODING",
    "PYTHONCOERCECLOCALE",
    "PYTHONHASHSEED",
    "PYTHONUNBUFFERED",
    "PYTHONWARNINGS",
    "PYTHONFAULTHANDLER",
    "PYTHONDEVMODE",
    "PYTHONOPTIMIZE",
    "PYTHONMALLOC",
    "PYTHONTRACEMALLOC",
    "PYTHONINTMAXSTRDIGITS",
}
_KEPT_FAMILIES = {
    "LC",
    "XDG",
    "CUDA",
    "NVIDIA",
    "NCCL",
    "GLOO",
    "TORCH",
    "PYTORCH",
    "TRITON",
    "OMP",
    "MALLOC",
}
# Of the command that the user typed: its terminal, ssh to other hosts, Ray.
TYPED = ("TERM", "COLORTERM", "NO", "FORCE", "COLUMNS", "LINES", "SHELL", "SSH", "KRB5", "KRB5CCNAME", "RAY")
_STAT, _ENV_START, _ENV_END = "/proc/self/stat", 47, 48  # fields behind the name


def kept_environment(also: Collection[str] = ()) -> dict[str, str]:
    """`also` are further families of variables, by what they begin with.

    NumPy's BLAS starts threads on import, and a process with threads cannot be forked safely.
    """
    kept = {name: value for name, value in os.environ.items() if _is_kept(name, also)}
    return {**kept, "OPENBLAS_NUM_THREADS": "1"}


def forget_secrets(also: Collection[str] = TYPED) -> None:
    """Takes all else out of this process's environment, and overwrites it where the kernel shows it to others."""
    for name in [name for name in os.environ if not _is_kept(name, also)]:
        del os.environ[name]
    try:
        with open(_STAT, encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return  # not Linux: nobody is shown it
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    at = start
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        variable, _, value = entry.partition(b"=")
        if value and not _is_kept(os.fsdecode(variable), also):
            ctypes.memset(at + len(variable) + 1, 0, len(value))
        at += len(entry) + 1


def _is_kept(name: str, also: Collection[str]) -> bool:
    if name in _PYTHONS:  # a command that ignores them has nodes that do
        return not sys.flags.ignore_environment
    family = name.rstrip("0123456789").partition("_")[0]
    return name in _KEPT or family in _KEPT_FAMILIES or family in also
