"""Triton kernels by which a GPU says that it has written into another one's memory: a flag is raised and awaited.

No host is in the loop. A number is released into the flag (system scope), and its reader acquires it; flags only grow,
so nothing is ever cleared.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def typed(address, dtype: tl.constexpr):
    """A pointer to `dtype` from an address that is a number."""
    return address.to(tl.pointer_type(dtype))


@triton.jit
def raise_flag(flag, number):
    """What was launched before this is to be seen by whoever finds `number` at the address `flag`."""
    tl.atomic_xchg(typed(flag, tl.int32), number, sem="release", scope="sys")


@triton.jit
def await_flag(
    flag, number, payload_ptr, size, error, limit, TIMED: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Until the flag has `number`, at most `limit` nanoseconds (not TIMED: looks). Then the payload becomes all ones,
    which is no number in any wire type and no slot, and the word at the address `error` says so to the host."""
    flag_ptr = typed(flag, tl.int32)
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    used = tl.full((), 0, dtype=tl.int64)
    began = used
    if TIMED:
        began = globaltimer()
    while (seen != number) & (used < limit):
        if TIMED:
            used = globaltimer() - began
        else:
            used += 1
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    if seen != number:
        tl.atomic_xchg(typed(error, tl.int32), 1, sem="release", scope="sys")
        for start in range(0, size, BYTES):
            at = start + tl.arange(0, BYTES)
            tl.store(payload_ptr + at, tl.full((BYTES,), 255, dtype=tl.uint8), mask=at < size)
