"""Triton's interpreter, mended where it rounds unlike the chip, and where it does again what it has done: for
`conftest.py` and for processes of tests."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction


def interpret() -> None:
    """Interpret every kernel decorated from now on, and Triton's own functions that were decorated before."""
    if triton.knobs.runtime.interpret:
        return
    triton.knobs.propagate_env = (
        False  # or the knob sets TRITON_INTERPRET, and processes that tests start interpret too
    )
    triton.knobs.runtime.interpret = True
    for module in (tl, tl.standard, tl.random):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, name, interpreter.InterpretedFunction(value.fn))
    interpreter._convert_float = _rounding_as_the_chip(interpreter._convert_float)
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _dot_of_values(builder.create_dot)
    _leave_out_what_changes_nothing()


def _leave_out_what_changes_nothing() -> None:
    """Half of what the interpreter takes."""
    options = interpreter.interpreter_builder.options
    assert (
        not options.debug
    )  # then each sum of integers would be compared with their limits: they are made for it alone
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    interpreter._get_np_dtype = _kept_by_name(interpreter._get_np_dtype)
    function = interpreter.InterpretedFunction
    function.__call__ = _in_a_launch(function.__call__)
    tl.block_type.__init__ = _made_once_of_a_kind(tl.block_type.__init__)
    tl.tensor.__init__ = _like_others_of_its_type(tl.tensor.__init__)


def _kept_by_name(plain: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    kept: dict[str, np.dtype] = {}

    def np_dtype(kind: Any) -> np.dtype:
        name = kind.scalar.name
        if name not in kept:
            kept[name] = plain(kind)
        return kept[name]

    return np_dtype


def _in_a_launch(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a kernel calls: the launch has put the interpreter's operations into `triton.language`. Triton
    looks for them again among all names there."""
    languages: dict[Callable[..., Any], list[Any]] = {}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in languages:
            seen = {id(value) for value in self.fn.__globals__.values()}
            languages[self.fn] = [one for one in (tl, tl.core) if id(one) in seen]
        if any(one.range.__name__ != "_new_range" for one in languages[self.fn]):
            return plain(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    return call


def _made_once_of_a_kind(plain: Callable[..., None]) -> Callable[..., None]:
    """A type of blocks."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (size.value if isinstance(size, tl.constexpr) else size for size in shape)
        key = element_ty.name, getattr(element_ty, "address_space", 0), *sizes
        if key not in kept:
            plain(self, element_ty, shape)
            kept[key] = {**vars(self), "of_tensors": {}}
        vars(self).update(kept[key])

    return init


def _like_others_of_its_type(plain: Callable[..., None]) -> Callable[..., None]:
    """A tensor: `of_tensors` is what follows from its type."""

    def init(self: Any, handle: Any, type: Any) -> None:
        known = vars(type).setdefault("of_tensors", {})
        if not known:
            plain(self, handle, type)
            known.update(
                {name: value for name, value in vars(self).items() if name not in ("handle", "type")}
            )
        vars(self).update(known, handle=handle, type=type)

    return init


def _rounding_as_the_chip(convert: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """The interpreter truncates to bfloat16, loses the carry into e4m3's exponent and reads its NaN as 480; torch does
    as the chip."""
    rounded = {
        tl.bfloat16: (torch.bfloat16, torch.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
    }
    widened = {tl.float16: (torch.float16, torch.uint16), tl.float32: (torch.float32, torch.uint32)}

    def converted(value, source, target, rounding):  # type: ignore[no-untyped-def]
        if source == tl.float8e4nv and target in widened:
            dtype, bits = widened[target]
            stored = torch.from_numpy(np.array(value).view(np.uint8)).view(torch.float8_e4m3fn)
            return stored.to(dtype).view(bits).numpy()
        if source != tl.float32 or target not in rounded:
            return convert(value, source, target, rounding)
        dtype, bits = rounded[target]
        return torch.from_numpy(np.array(value, dtype=np.float32)).to(dtype).view(bits).numpy()

    return converted


def _dot_of_values(dot: Callable[..., object]) -> Callable[..., object]:
    """The interpreter keeps bfloat16 as uint16 and would multiply the bit patterns."""

    def multiply(self, a, b, *rest):  # type: ignore[no-untyped-def]
        wide = [self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *wide, *rest)

    return multiply
