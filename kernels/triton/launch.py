"""Launches of Triton's kernels that cost the host little: what one was compiled to is found by a few words.

`JITFunction.run` binds and specialises each argument and makes a text of them, at every launch. Here the compiled
kernel is kept under what Triton would specialise on, and called as `JITFunction.run` calls it. A `PreparedLaunch` is
looked up by nothing but its tensors. It knows no kernel.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

from torch import Tensor

import triton
from triton.runtime import driver
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

MOST_KEPT = 1024  # of a kernel: a size that is a new one at each launch does not fill memory
_ALIGNED = 16  # bytes; Triton compiles pointers that are multiples of it apart
_hooks = triton.knobs.runtime
Launch = Callable[..., "Kept | None"]
Kept = tuple[Any, ...]
"""What is called, and with what: the driver's function, the kernel, its metadata, constants."""
planned = lru_cache(MOST_KEPT)
"""For functions of sizes, strides and dtypes that make `PreparedLaunch` launches."""


def launched(function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """`triton.jit` for a kernel that the host launches: `kernel[grid](*arguments, **constants)`, with a grid of one to
    three numbers, arguments by position, and constants (`tl.constexpr`) and options by name."""
    if function is None:
        return lambda decorated: launched(decorated, do_not_specialize=do_not_specialize)
    if _hooks.interpret:
        return triton.jit(function, do_not_specialize=list(do_not_specialize))
    return LaunchedKernel(function, do_not_specialize=list(do_not_specialize))


class LaunchedKernel(JITFunction):  # type: ignore[misc]
    """A kernel that keeps what its launches were compiled to."""

    def __init__(self, function: Callable[..., Any], do_not_specialize: list[str]) -> None:
        super().__init__(function, do_not_specialize=do_not_specialize)
        self._kept: dict[tuple[object, ...], Kept] = {}
        self._free = [at for at, param in enumerate(self.params) if param.do_not_specialize]

    def __getitem__(self, grid: tuple[int, ...]) -> Launch:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: object) -> Kept | None:
        """The key is whatever makes Triton compile another kernel. Numbers that it does not specialise are told apart
        by how many bits they take. None where nothing can be kept."""
        key: list[object] = []
        for each in arguments:
            kind = type(each)
            if kind is int or each is None:
                key.append(each)
            elif kind is Tensor:
                key.append(each.dtype if not each.data_ptr() % _ALIGNED else (each.dtype,))
            elif kind is float or kind is bool:
                key.append(kind)
            else:  # Triton has to look itself, as at tensors of other classes
                return self._first(None, grid, arguments, constants)
        for at in self._free:
            key[at] = arguments[at] >> 31
        active = driver.active
        device = active.get_current_device()
        whole = (device, *key, *constants, *constants.values())
        kept = self._kept.get(whole)
        if kept is None or _hooks.launch_enter_hook.calls or _hooks.launch_exit_hook.calls:
            return self._first(whole, grid, arguments, constants)
        run, function, metadata, rest = kept
        stream = active.get_current_stream(device)
        run(*_whole(grid), stream, function, metadata, None, None, None, *arguments, *rest)
        return kept

    def _first(
        self, key: tuple[object, ...] | None, grid: tuple[int, ...], arguments: tuple[object, ...],
        constants: dict[str, object],
    ) -> Kept | None:  # fmt: skip
        ahead = active_mode.get() is not None  # it is compiled, and not launched (ahead.py)
        kernel = self.run(*arguments, grid=grid, warmup=ahead, **constants)
        if (
            ahead or kernel is None or key is None
        ):  # nothing was launched where somebody only looks at launches
            return None
        rest = self.params[len(arguments) :]
        assert all(param.is_constexpr for param in rest), f"{self.__name__}: arguments are given by position"
        if len(self._kept) >= MOST_KEPT:
            self._kept.clear()
        constant = tuple(constants[param.name] for param in rest)
        kept = self._kept[key] = kernel.run, kernel.function, kernel.packed_metadata, constant
        return kept


class PreparedLaunch:
    """A launch that is made again and again: grid, numbers and constants stay, tensors are given each time.

    A kernel takes tensors (or None) before `numbers`. Which of these stands at `free`, if one does, is told with each
    launch: one that Triton does not specialise, of 31 bits.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[float, ...], free: int | None = None,
        **constants: object,
    ) -> None:  # fmt: skip
        self._launch = kernel[grid]
        self._grid, self._numbers, self._constants, self._free = _whole(grid), numbers, constants, free
        self._kept: dict[int, tuple[Any, ...]] = {}  # by device: for which tensors, and what is called

    def __call__(self, *tensors: Tensor | None, free: int = 0) -> None:
        if not self._kept or _hooks.launch_enter_hook.calls or _hooks.launch_exit_hook.calls:
            self._look_up(tensors, free)
            return
        active = driver.active
        device = active.get_current_device()
        kept = self._kept.get(device)
        if kept is None:
            self._look_up(tensors, free)
            return
        kinds, run, head, tail = kept
        low = 0
        for tensor, (dtype, behind) in zip(tensors, kinds, strict=True):
            if tensor is None:
                low |= dtype is not None
            elif tensor.dtype is dtype and type(tensor) is Tensor:
                low |= tensor.data_ptr() ^ behind
            else:
                low = 1
                break
        if low % _ALIGNED:
            self._look_up(tensors, free)
            return
        if self._free is not None:
            tail = (*tail[: self._free], free, *tail[self._free + 1 :])
        run(*self._grid, active.get_current_stream(device), *head, *tensors, *tail)

    def _look_up(self, tensors: tuple[Tensor | None, ...], free: int) -> None:
        numbers = list(self._numbers)
        if self._free is not None:
            numbers[self._free] = free
        kept = self._launch(*tensors, *numbers, **self._constants)
        if kept is not None:
            run, function, metadata, rest = kept
            # dtypes, and how many bytes each begins behind what is aligned
            kinds = [(None, 0) if x is None else (x.dtype, x.data_ptr() % _ALIGNED) for x in tensors]
            head, tail = (function, metadata, None, None, None), (*numbers, *rest)
            self._kept[driver.active.get_current_device()] = kinds, run, head, tail


def _whole(grid: tuple[int, ...]) -> tuple[int, ...]:
    return grid if len(grid) == 3 else (*grid, 1, 1)[:3]


def cdiv(count: int, size: int) -> int:
    """How many parts of at most `size`; Triton's own is a function of the compiler, ten times as long."""
    return -(-count // size)


@cache
def power_of_two(least: int) -> int:
    """The smallest that is not below `least`."""
    return 1 << max(0, least - 1).bit_length()
