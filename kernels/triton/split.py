"""Triton split-KV: how many parts a context is cut into, and the softmax-weighted sum that joins them.

Every part leaves its own softmax (largest score, sum, weighted values), in base 2. The cut depends on a sequence's
own context and on a number of parts that the host fixed, never on other sequences. An absent part has sum 0.
Shapes: R rows (sequences or tokens), A query heads, P parts, D value columns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
from torch import Tensor

import triton
import triton.language as tl
from afserve.kernels.triton.config import FUSED
from afserve.kernels.triton.launch import PreparedLaunch, launched, planned, power_of_two

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # a finite "nothing seen yet": differences with it never become NaN


Scratch = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of one split attention: values_RAPD unscaled, largest_RAP and sum_RAP in base 2, all float32; none for one part."""


def split_scratch(rows: int, heads: int, parts: int, columns: int, device: torch.device) -> Scratch:
    if parts == 1:
        return None, None, None
    values = torch.empty(rows, heads, parts, columns, dtype=torch.float32, device=device)
    return values, values.new_empty(rows, heads, parts), values.new_empty(rows, heads, parts)


def parts_for(programs: int, keys: int, shortest: int, multiprocessors: int) -> int:
    """Enough parts that `programs` x parts fill the chip twice, none shorter than `shortest` of `keys` positions."""
    wanted = -(-2 * multiprocessors // max(programs, 1))
    return max(1, min(wanted, -(-keys // shortest)))


@triton.jit
def part_span(keys, part, parts, SHORTEST: tl.constexpr, KEYS: tl.constexpr):
    """[begin, end) of this part of `keys` positions: equal parts in whole tiles of KEYS, at least SHORTEST long."""
    length = tl.maximum(tl.cdiv(tl.cdiv(keys, parts), KEYS) * KEYS, SHORTEST)
    return tl.minimum(part * length, keys), tl.minimum(part * length + length, keys)


@launched(do_not_specialize=["parts"])
def _join(
    values_ptr, largest_ptr, sum_ptr, out_ptr, sink_ptr, query_start_ptr, heads, parts, columns,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = row
    if query_start_ptr is not None:
        token = tl.load(query_start_ptr + row)
        if tl.load(query_start_ptr + row + 1) - token != 1:
            return
    d = tl.arange(0, COLUMNS)
    at = (row * heads + head).to(tl.int64) * parts
    largest = tl.full((), LOWEST, dtype=tl.float32)
    total = tl.full((), 0.0, dtype=tl.float32)
    values = tl.zeros((COLUMNS,), dtype=tl.float32)
    if sink_ptr is not None:
        largest = tl.load(sink_ptr + head).to(tl.float32) * LOG2E
        total += 1.0
    for start in range(0, parts, PARTS):
        p = start + tl.arange(0, PARTS)
        sums = tl.load(sum_ptr + at + p, mask=p < parts, other=0.0)
        seen = sums != 0  # a sum that is no number was seen too, and makes the whole one
        peaks = tl.load(largest_ptr + at + p, mask=(p < parts) & seen, other=LOWEST)
        higher = tl.maximum(largest, tl.max(peaks, axis=0))
        weight = tl.where(seen, tl.exp2(peaks - higher), 0.0)
        old = tl.exp2(largest - higher)
        tile = tl.load(
            values_ptr + (at + p)[:, None] * columns + d[None, :],
            mask=seen[:, None] & (d < columns)[None, :],
            other=0.0,
        )
        values = values * old + tl.sum(tile * weight[:, None], axis=0)
        total = total * old + tl.sum(sums * weight, axis=0)
        largest = higher
    values = values / tl.where(total != 0, total, 1.0)
    to = out_ptr + (token.to(tl.int64) * heads + head) * columns + d
    tl.store(to, values.to(out_ptr.dtype.element_ty), mask=d < columns)


def join_parts(
    scratch: Scratch, sink_A: Tensor | None, query_start_S1: Tensor | None, out_TAD: Tensor
) -> None:
    """out = sum of the parts' values under one softmax, `sink_A` a logit that takes weight and gives no value; as it is
    where there was one part.

    With query_start_S1, row s is sequence s and only sequences of one query are written, at their token.
    """
    if scratch[0] is not None and len(scratch[0]):
        _joining(scratch[0].shape)(*scratch, out_TAD, sink_A, query_start_S1)


@planned
def _joining(shape: tuple[int, int, int, int]) -> PreparedLaunch:
    rows, heads, count, columns = shape
    constants = {"PARTS": 8, "COLUMNS": power_of_two(columns), **FUSED}
    return PreparedLaunch(_join, (rows, heads), (heads, count, columns), **constants)
