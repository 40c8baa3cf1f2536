"""Triton's interpreter with a fence around every tensor: a kernel that touches memory which it was not given, fails.

`fenced` is what a launch was given: the extents of its tensors, and of those in tuples. An access of a lane that is not
masked has to lie in one of them as a whole, as compute-sanitizer's memcheck wants it on a GPU, and here in the tensor
itself, not only in its allocation. What a kernel says of addresses (`tl.multiple_of`) has to be so: the compiler makes
wide loads of it. Kernels whose addresses come as numbers (`symm.py`, `symm_exchange.py`) are not
fenced. Memory of `torch.empty` has NaN or the largest number in it (`torch.utils.deterministic`), so that a result in
which something counts that nobody wrote is none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from triton.runtime import interpreter

BY_ADDRESS = ("afserve.kernels.triton.symm", "afserve.kernels.triton.symm_exchange")


class Fence:
    """Of the launch that is interpreted; without a launch everything is inside."""

    def __init__(self) -> None:
        self.name = ""
        self._spans_N2: NDArray[np.uint64] | None = None

    @contextmanager
    def around(self, name: str, tensors: Iterator[torch.Tensor]) -> Iterator[None]:
        before = self.name, self._spans_N2
        spans = [(x.data_ptr(), x.data_ptr() + extent(x)) for x in tensors if x.numel()]
        self.name, self._spans_N2 = name, np.array(spans, np.uint64).reshape(-1, 2)
        try:
            yield
        finally:
            self.name, self._spans_N2 = before

    def check(self, address: NDArray[np.uint64], mask: NDArray[np.bool_], size: int, what: str) -> None:
        if self._spans_N2 is None:
            return
        touched_A = np.broadcast_to(address, np.broadcast(address, mask).shape)[mask.astype(bool)]
        if not touched_A.size:
            return
        first_N, end_N = self._spans_N2.T
        if ((first_N <= touched_A.min()) & (touched_A.max() + np.uint64(size) <= end_N)).any():
            return  # all in one tensor, as most are
        inside_A = np.zeros(touched_A.shape, bool)
        for first, end in self._spans_N2:
            inside_A |= (touched_A >= first) & (touched_A + np.uint64(size) <= end)
        if not inside_A.all():
            beyond = int(touched_A[~inside_A][0])
            gaps = [(abs(beyond - int(end)), int(end)) for _, end in self._spans_N2] or [(0, beyond)]
            raise IndexError(
                f"{self.name} {what} {size} bytes outside of all that it was given, {beyond - min(gaps)[1]} bytes from "
                f"the nearest end ({int((~inside_A).sum())} addresses)"
            )

    def check_claim(self, said_of: NDArray[Any], multiple: int) -> None:
        """Of numbers that rise by one it is said of the first."""
        if self._spans_N2 is None:
            return
        begins_A = np.append(True, np.diff(said_of) != 1)
        wrong_A = said_of[begins_A & (said_of % multiple != 0)]
        if wrong_A.size:
            raise ValueError(f"{self.name} says that {int(wrong_A[0])} is a multiple of {multiple}")


def extent(x: torch.Tensor) -> int:
    """Bytes from its first element to the end of its last."""
    return (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def given(args: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments."""
    for one in args:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, tuple | list):
            yield from given(one)


def fence_kernels() -> Fence:
    """From now on, in this process, once."""
    fence, builder = Fence(), interpreter.InterpreterBuilder
    run = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ in BY_ADDRESS:
            return run(self, *args, **kwargs)
        with fence.around(self.fn.__name__, given((*args, *kwargs.values()))):
            return run(self, *args, **kwargs)

    def checked(
        what: str, mask_at: int | None, plain: Callable[..., Any], ptr_at: int = 0
    ) -> Callable[..., Any]:
        def access(self: Any, *args: Any) -> Any:
            ptr = args[ptr_at]
            mask = np.ones_like(ptr.data, bool) if mask_at is None else args[mask_at].data
            fence.check(ptr.data, mask, max(1, ptr.get_element_ty().primitive_bitwidth // 8), what)
            return plain(self, *args)

        return access

    set_attr = interpreter.TensorHandle.set_attr

    def claim(self: Any, key: str, values: list[int]) -> None:
        if key == "tt.divisibility":
            fence.check_claim(self.data, *values)
        set_attr(self, key, values)

    interpreter.TensorHandle.set_attr = claim
    interpreter.GridExecutor.__call__ = launch
    builder.create_masked_load = checked("reads", 1, builder.create_masked_load)
    builder.create_masked_store = checked("writes", 2, builder.create_masked_store)
    builder.create_atomic_rmw = checked("changes", 3, builder.create_atomic_rmw, 1)
    builder.create_atomic_cas = checked("changes", None, builder.create_atomic_cas)
    return fence
