"""The native library's part of the data plane, where it is built; everything there has a PyTorch or Python twin."""

from importlib import import_module
from typing import Any

_NEEDED = ("FlagBoard", "RowSplit", "Routes", "copy_choices")


def native_library() -> Any | None:
    """The module, or None where it is not built or is older than this code."""
    try:
        module = import_module("afserve.kernels._native")
    except ImportError:
        return None
    return module if all(hasattr(module, name) for name in _NEEDED) else None
