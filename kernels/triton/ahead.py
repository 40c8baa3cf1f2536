"""Kernels are compiled side by side before they are launched one after the other.

What a node launches before it is ready is gone through twice: 60 kernels of about 2 s are two minutes of one core. The
first time a launch only asks for its kernel, which one of several threads compiles (Triton's assembler is a process of
its own). Nothing is launched then, and memory that kernels would have filled is 0, so what is looked up by it is there.
The second time all kernels are there.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import triton
from triton.runtime._async_compile import AsyncCompileMode

_MOST = 8  # at once: each takes a core, and some hundred MB
_FILLED = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like, Tensor.new_empty: Tensor.new_zeros}


class _Zeros(TorchFunctionMode):
    """In the place of memory that has anything."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _FILLED.get(func, func)(*args, **(kwargs or {}))


def compile_ahead(warm: Callable[[], object]) -> None:
    """The kernels that `warm` launches, as far as they were not compiled yet; nothing where they are interpreted.
    Raises what compiling raises."""
    if triton.knobs.runtime.interpret:
        return
    threads = min(_MOST, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, "compiler") as pool, AsyncCompileMode(pool), _Zeros():
        warm()
