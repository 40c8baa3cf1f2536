"""Triton kernels by which a GPU says that it has written into another one's memory: a flag is raised and awaited.

No host is in the loop. A number is released into the flag (system scope), and its reader acquires it. Flags only grow,
so nothing is ever cleared, and numbers wrap at 32 bits: both ends count on the device. Each flag has one writer, so a
plain store releases it: PCIe between two GPUs has no atomics.

Words of the host, at one address: an error that the device reports, and an abort by which the host ends every wait.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from afserve.kernels.triton.launch import launched
from triton.language.extra.cuda import globaltimer

ERROR, ABORT = tl.constexpr(0), tl.constexpr(1)
_LOOKS = tl.constexpr(64)  # at a flag between two at the host's word, which lies across the bus


@triton.jit
def typed(address, dtype: tl.constexpr):
    """A pointer to `dtype` from an address that is a number, of 32 bits where it is a low one of a host."""
    return address.to(tl.int64).to(tl.pointer_type(dtype))


@triton.jit
def release(word_ptr, number, CHIP: tl.constexpr):
    """What this program, and the kernels before it, wrote is to be seen by whoever acquires `number` there, on any
    device or host. Not on a CHIP: as the interpreter can."""
    if CHIP:
        tl.inline_asm_elementwise(
            "st.release.sys.global.b32 [$1], $2; mov.b32 $0, $2;", "=r,l,r", [word_ptr.to(tl.int64), number],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.atomic_xchg(word_ptr, number, sem="release", scope="sys")


@triton.jit
def acquire(word_ptr):
    """The number in a word of this device's memory. An atomic, so that all threads of the program see the same one."""
    return tl.atomic_add(word_ptr, 0, sem="acquire", scope="sys")


@triton.jit
def _next_number(count_ptr):
    """All threads have read the last one before it is another one."""
    number = tl.load(count_ptr) + 1
    tl.debug_barrier()
    tl.store(count_ptr, number)
    return number


@launched(do_not_specialize=["flag", "box"])
def raise_flag(flag, count_ptr, box, CHIP: tl.constexpr):
    """What was launched before this is to be seen by whoever finds the next number at the address `flag`. `count_ptr`
    has the numbers of all boxes, 64 words apart."""
    number = _next_number(count_ptr + box * 64)
    release(typed(flag, tl.int32), number, CHIP)


@launched(do_not_specialize=["flag", "box", "size", "limit"])
def await_flag(
    flag, count_ptr, box, payload_ptr, size, words, limit, CHIP: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Until the flag has the next number, at most `limit` nanoseconds (not on a CHIP: looks), and no longer than the
    host does not abort. A payload that did not come becomes all ones, which is no number in any wire type and no slot,
    and the error word at the address `words` says so to the host."""
    flag_ptr, words_ptr = typed(flag, tl.int32), typed(words, tl.int32)
    number = _next_number(count_ptr + box * 64)
    seen = acquire(flag_ptr)
    used = tl.full((), 0, dtype=tl.int64)
    looks = tl.full((), 0, dtype=tl.int32)
    began = used
    if CHIP:
        began = globaltimer()
    while (seen != number) & (used < limit):
        looks += 1
        if looks % _LOOKS == 1:  # noqa: SIM102, for `and` would read the word at every look
            if tl.load(words_ptr + ABORT, volatile=True) != 0:
                limit = limit * 0
        if CHIP:
            used = globaltimer() - began
        else:
            used += 1
        seen = acquire(flag_ptr)
    if seen != number:
        release(words_ptr + ERROR, tl.full((), 1, dtype=tl.int32), CHIP)
        for start in range(0, size, BYTES):
            at = start + tl.arange(0, BYTES)
            tl.store(payload_ptr + at, tl.full((BYTES,), 255, dtype=tl.uint8), mask=at < size)
