"""Finds the native part of the data plane, if it is built. All of it has a twin in PyTorch or Python."""

from importlib import import_module
from typing import Any

import torch

_VERSION = 6  # of the functions that the data plane calls; the library says which one it has
CODES = {torch.float32: 0, torch.bfloat16: 1}  # what the library calls the dtypes of rows


def native_library() -> Any | None:
    """The module, or None where it is not built or was built from older sources."""
    try:
        module = import_module("afserve.kernels._native")
    except ImportError:
        return None
    return module if getattr(module, "data_plane", 0) == _VERSION else None
