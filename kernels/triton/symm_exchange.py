"""Triton kernels of M2N between GPUs that read and write each other's memory: plan, put, signal, wait, take, sum.

No host is in the loop: numbers and counts are read on the device and grids are upper bounds, so a CUDA graph replays
them. A box is one region in each end's memory, known by its address; it knows no processes and no placement.

    region   flag (int32) | pad to HEAD | half of even numbers | half of odd numbers
    half     rows, layer, epoch (int32) | pad to 64 | the parts of a message at the offsets of its largest form

A message is written into the half of its number, then the number is released into the flag (system scope); its reader
acquires the flag. Flags only grow, so nothing is ever cleared, and what comes late lies in the other half.
Shapes: T rows, K choices per row, H hidden, N nodes or boxes, R most rows of a message, S scale blocks of 128.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from afserve.kernels.triton.launch import launched
from afserve.kernels.triton.quant import fp8_scale, to_fp8
from afserve.kernels.triton.symm import ABORT, ERROR, acquire, release, typed
from triton.language.extra.cuda import globaltimer

HEAD = tl.constexpr(256)
BLOCK = tl.constexpr(128)  # columns with one scale
MIX_FIRST, MIX_SECOND = (
    tl.constexpr(0x2545F4914F6CDD1D),
    tl.constexpr(0x1B873593CC9E2D51),
)  # as in comm/m2n/routes.py
MIX_LAST, KEYS = tl.constexpr(0x4CF5AD432745937F), tl.constexpr(1 << 24)


@triton.jit
def _half(region_N_ptr, box, number, half_bytes):
    """Address of the half of `number` in a box's region."""
    return tl.load(region_N_ptr + box) + HEAD + (number & 1).to(tl.int64) * half_bytes


@triton.jit
def _first_row(half, x_at, dtype: tl.constexpr):
    """Rows begin on 64 bytes, and whole vectors of them travel; an address that was a number does not say so itself."""
    return tl.multiple_of(typed(half + x_at, dtype), 16)


@triton.jit
def _row_number(x_ptr, row, exists, hidden, x_stride, ROWS: tl.constexpr):
    """`routes.row_number`, bit by bit the same: a row's first 16 bytes, mixed."""
    bits: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    each: tl.constexpr = 64 // bits
    c = tl.arange(0, each)[None, :]
    mixed = tl.zeros((ROWS,), dtype=tl.int64)
    for word in tl.static_range(2):
        column = word * each + c
        at = x_ptr + row.to(tl.int64)[:, None] * x_stride + column
        x = tl.load(at, mask=exists[:, None] & (column < hidden), other=0.0)
        if bits == 16:
            part = x.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
        else:
            part = x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        mixed += tl.sum(part << (c * bits).to(tl.int64), axis=1) * (MIX_FIRST if word == 0 else MIX_SECOND)
    mixed = (mixed ^ (mixed >> 29)) * MIX_LAST
    return ((mixed >> 40) & (KEYS - 1)).to(tl.float32) / KEYS


@launched(do_not_specialize=["rows", "slots", "experts", "replicas"])
def plan_nodes(
    x_ptr, expert_ptr, slot_EP_ptr, below_EP_ptr, slot_ptr, place_NT_ptr, count_N_ptr, number_N_ptr, rows, slots,
    experts, replicas, hidden, x_stride, CHOICES: tl.constexpr, ROUTED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One node: the place of each row that has a slot there (-1: none), how many there are, and the next number. The
    first node's program writes the slots of all choices too, where they are ROUTED: experts whose slots a table has."""
    node = tl.program_id(0)
    first = node * slots
    taken = tl.full((), 0, dtype=tl.int32)
    for start in range(0, rows, ROWS):
        t = start + tl.arange(0, ROWS)
        exists = t < rows
        here = tl.zeros((ROWS,), dtype=tl.int32)
        if ROUTED:
            number = _row_number(x_ptr, t, exists, hidden, x_stride, ROWS)
        for k in tl.static_range(CHOICES):
            slot = tl.load(expert_ptr + t * CHOICES + k, mask=exists, other=-1).to(tl.int32)
            if ROUTED:
                expert = tl.where((slot >= 0) & (slot < experts), slot, experts)  # whose row is that of none
                replica = tl.zeros((ROWS,), dtype=tl.int32)
                for p in range(replicas - 1):
                    replica += (number >= tl.load(below_EP_ptr + expert * (replicas - 1) + p)).to(tl.int32)
                slot = tl.load(slot_EP_ptr + expert * replicas + replica)
                if node == 0:
                    tl.store(slot_ptr + t * CHOICES + k, slot, mask=exists)
            here |= ((slot >= first) & (slot < first + slots) & exists).to(tl.int32)
        place = taken + tl.cumsum(here, axis=0) - here
        tl.store(place_NT_ptr + node * rows + t, tl.where(here > 0, place, -1), mask=exists)
        taken += tl.sum(here, axis=0)
    tl.store(count_N_ptr + node, taken)
    tl.store(number_N_ptr + node, tl.load(number_N_ptr + node) + 1)


@triton.jit
def _quantised(x, COLUMNS: tl.constexpr):
    """Columns of a row in e4m3, and the scales of their blocks."""
    x_SB = tl.reshape(x.to(tl.float32), (COLUMNS // BLOCK, BLOCK))
    scale_S = fp8_scale(tl.max(tl.abs(x_SB), axis=1))
    return tl.reshape(to_fp8(tl.div_rn(x_SB, scale_S[:, None])), (COLUMNS,)), scale_S


@launched(do_not_specialize=["first", "slots", "experts", "replicas", "scales"])
def fill_message(
    x_ptr, expert_ptr, weight_ptr, slot_EP_ptr, below_EP_ptr, x_RH_ptr, slot_RK_ptr, weight_RK_ptr, scale_RS_ptr,
    hidden, x_stride, first, slots, experts, replicas, scales,
    CHOICES: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """A whole message to the node whose slots begin at `first`, which goes by a mailbox: one block of one row, as it
    travels; the first block brings the row's weights and its slots there, of the experts that it chose."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < hidden, other=0.0)
    if FP8:
        value, scale_S = _quantised(x, COLUMNS)
        block = part * (COLUMNS // BLOCK) + tl.arange(0, COLUMNS // BLOCK)
        tl.store(scale_RS_ptr + row * scales + block, scale_S, mask=block < scales)
    else:
        value = x.to(x_RH_ptr.dtype.element_ty)
    tl.store(x_RH_ptr + row * hidden + column, value, mask=column < hidden)
    if part == 0:
        k = tl.arange(0, WIDTH)
        at, chosen = row * CHOICES + k, k < CHOICES
        expert_K = tl.load(expert_ptr + at, mask=chosen, other=-1).to(tl.int32)
        expert_K = tl.where(
            (expert_K >= 0) & (expert_K < experts), expert_K, experts
        )  # whose row is that of none
        row_1 = row + tl.arange(0, 1)
        number = tl.sum(_row_number(x_ptr, row_1, row_1 >= 0, hidden, x_stride, 1), axis=0)
        replica_K = tl.zeros((WIDTH,), dtype=tl.int32)
        for p in range(replicas - 1):
            replica_K += (number >= tl.load(below_EP_ptr + expert_K * (replicas - 1) + p)).to(tl.int32)
        own_K = tl.load(slot_EP_ptr + expert_K * replicas + replica_K) - first
        own_K = tl.where((own_K >= 0) & (own_K < slots), own_K, -1)
        tl.store(slot_RK_ptr + at, own_K, mask=chosen)
        tl.store(weight_RK_ptr + at, tl.load(weight_ptr + at, mask=chosen, other=0.0), mask=chosen)


@launched(do_not_specialize=["rows", "nodes", "slots", "scales", "slot_at", "scale_at"])
def put_rows(
    x_ptr, slot_ptr, weight_ptr, place_NT_ptr, number_N_ptr, peer_N_ptr, rows, hidden, x_stride, nodes, slots, scales,
    half_bytes, weight_at, slot_at, scale_at, x_at,
    CHOICES: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WIRE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One block of one row, read once, to every node that has a slot of it; the first block brings the slots."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + column, mask=column < hidden, other=0.0)
    if FP8:
        value, scale_S = _quantised(x, COLUMNS)
        block = part * (COLUMNS // BLOCK) + tl.arange(0, COLUMNS // BLOCK)
    else:
        value = x.to(WIRE)
    k = tl.arange(0, WIDTH)
    slot_K = tl.load(slot_ptr + row * CHOICES + k, mask=k < CHOICES, other=-1)
    weight_K = tl.load(weight_ptr + row * CHOICES + k, mask=k < CHOICES, other=0.0)
    for node in range(nodes):
        place = tl.load(place_NT_ptr + node * rows + row).to(tl.int64)
        if place >= 0:
            half = _half(peer_N_ptr, node, tl.load(number_N_ptr + node), half_bytes)
            tl.store(_first_row(half, x_at, WIRE) + place * hidden + column, value, mask=column < hidden)
            if FP8:
                tl.store(
                    typed(half + scale_at, tl.float32) + place * scales + block, scale_S, mask=block < scales
                )
            if part == 0:
                own_K = slot_K - node * slots
                own_K = tl.where((own_K >= 0) & (own_K < slots), own_K, -1)
                tl.store(typed(half + slot_at, tl.int32) + place * CHOICES + k, own_K, mask=k < CHOICES)
                tl.store(
                    typed(half + weight_at, tl.float32) + place * CHOICES + k, weight_K, mask=k < CHOICES
                )


@launched
def signal_boxes(peer_N_ptr, number_N_ptr, count_N_ptr, stamp_ptr, half_bytes, TIMED: tl.constexpr):
    """What the kernels before this one wrote into a peer's half is a message from now on."""
    box = tl.program_id(0)
    number = tl.load(number_N_ptr + box)
    header = typed(_half(peer_N_ptr, box, number, half_bytes), tl.int32)
    tl.store(header, tl.load(count_N_ptr + box))
    tl.store(header + 1, tl.load(stamp_ptr))
    tl.store(header + 2, tl.load(stamp_ptr + 1))
    tl.debug_barrier()
    release(typed(tl.load(peer_N_ptr + box), tl.int32), number, TIMED)


@launched(do_not_specialize=["most", "limit"])
def wait_boxes(
    own_N_ptr, number_N_ptr, count_N_ptr, header_N2_ptr, error_ptr, words_ptr, most, half_bytes, limit,
    NEXT: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """Until a box's flag has its number (NEXT: the one after the last), at most `limit` nanoseconds (not TIMED: looks),
    and no longer than the host does not abort.

    A box that stays silent leaves its index + 1 in the error word, which ends every other wait of this end as well, and
    in the host's.
    """
    box = tl.program_id(0)
    number = tl.load(number_N_ptr + box) + NEXT
    flag = typed(tl.load(own_N_ptr + box), tl.int32)
    seen = acquire(flag)
    used = tl.full((), 0, dtype=tl.int64)
    looks = tl.full((), 0, dtype=tl.int32)
    began = used
    if TIMED:
        began = globaltimer()
    while (seen != number) & (used < limit):
        looks += 1
        ended = tl.load(error_ptr, volatile=True)
        if looks % 64 == 1:
            ended = ended | tl.load(words_ptr + ABORT, volatile=True)
        if ended != 0:
            used = used * 0 + limit
        elif TIMED:
            used = globaltimer() - began
        else:
            used += 1
        seen = acquire(flag)
    rows = tl.full((), 0, dtype=tl.int32)
    if seen == number:
        header = typed(_half(own_N_ptr, box, number, half_bytes), tl.int32)
        rows = tl.minimum(tl.maximum(tl.load(header), 0), most)
        if NEXT:
            tl.store(number_N_ptr + box, number)
            tl.store(header_N2_ptr + 2 * box, tl.load(header + 1))
            tl.store(header_N2_ptr + 2 * box + 1, tl.load(header + 2))
    else:
        tl.atomic_cas(error_ptr, 0, box + 1)
        release(words_ptr + ERROR, box + 1, TIMED)
    if NEXT:
        tl.store(count_N_ptr + box, rows)


@triton.jit
def _rows_before(count_N_ptr, box, boxes, BOXES: tl.constexpr):
    """(rows of this box, rows of the boxes before it, rows of all)."""
    b = tl.arange(0, BOXES)
    count_N = tl.load(count_N_ptr + b, mask=b < boxes, other=0)
    return (
        tl.sum(tl.where(b == box, count_N, 0), axis=0),
        tl.sum(tl.where(b < box, count_N, 0), axis=0),
        tl.sum(count_N, axis=0),
    )


@launched(do_not_specialize=["boxes", "most", "slots", "scales", "slot_at", "scale_at"])
def take_rows(
    own_N_ptr, number_N_ptr, count_N_ptr, x_ptr, slot_ptr, weight_ptr, boxes, most, hidden, slots, scales,
    half_bytes, weight_at, slot_at, scale_at, x_at,
    CHOICES: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BOXES: tl.constexpr, WIRE: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """The rows of all boxes one after the other; behind them rows without slots, as many as there could have been."""
    box = tl.program_id(0) // most
    row = (tl.program_id(0) % most).to(tl.int64)
    part = tl.program_id(1)
    count, before, total = _rows_before(count_N_ptr, box, boxes, BOXES)
    k = tl.arange(0, WIDTH)
    if row < count:
        half = _half(own_N_ptr, box, tl.load(number_N_ptr + box), half_bytes)
        to = before + row
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        x = tl.load(_first_row(half, x_at, WIRE) + row * hidden + column, mask=column < hidden, other=0.0)
        if FP8:
            scale = tl.load(
                typed(half + scale_at, tl.float32) + row * scales + column // BLOCK, mask=column < hidden
            )
            x = x.to(tl.float32) * scale
        tl.store(x_ptr + to * hidden + column, x.to(x_ptr.dtype.element_ty), mask=column < hidden)
        if part == 0:
            slot_K = tl.load(typed(half + slot_at, tl.int32) + row * CHOICES + k, mask=k < CHOICES, other=-1)
            weight_K = tl.load(
                typed(half + weight_at, tl.float32) + row * CHOICES + k, mask=k < CHOICES, other=0.0
            )
            slot_K = tl.where(
                (slot_K >= 0) & (slot_K < slots), slot_K, -1
            )  # another end's numbers are not trusted
            tl.store(slot_ptr + to * CHOICES + k, slot_K, mask=k < CHOICES)
            tl.store(weight_ptr + to * CHOICES + k, weight_K, mask=k < CHOICES)
    elif part == 0:
        to = total + (box * most - before) + (row - count)
        tl.store(slot_ptr + to * CHOICES + k, tl.full((WIDTH,), -1, dtype=tl.int32), mask=k < CHOICES)
        tl.store(weight_ptr + to * CHOICES + k, tl.zeros((WIDTH,), dtype=tl.float32), mask=k < CHOICES)


@launched(do_not_specialize=["boxes", "most"])
def put_answers(
    y_ptr, count_N_ptr, number_N_ptr, peer_N_ptr, boxes, most, hidden, half_bytes, x_at,
    COLUMNS: tl.constexpr, BOXES: tl.constexpr, WIRE: tl.constexpr,
):  # fmt: skip
    """The partial sums back to where their rows came from, in the order in which they came."""
    box = tl.program_id(0) // most
    row = (tl.program_id(0) % most).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    count, before, _ = _rows_before(count_N_ptr, box, boxes, BOXES)
    if row < count:
        half = _half(peer_N_ptr, box, tl.load(number_N_ptr + box), half_bytes)
        y = tl.load(y_ptr + (before + row) * hidden + column, mask=column < hidden, other=0.0)
        tl.store(_first_row(half, x_at, WIRE) + row * hidden + column, y.to(WIRE), mask=column < hidden)


@launched(do_not_specialize=["rows", "nodes", "layer"])
def sum_answers(
    own_N_ptr, number_N_ptr, place_NT_ptr, error_ptr, y_ptr, shared_ptr, bad_ptr, rows, hidden, y_stride, nodes,
    half_bytes, layer, x_at, ADD: tl.constexpr, COLUMNS: tl.constexpr, WIRE: tl.constexpr,
):  # fmt: skip
    """Partial sums in float32, in the order of the nodes; NaN when an answer is missing: nobody can go on with it.

    ADD: they are added to what is there, behind `shared`, rounded each time; a row that is not finite then is marked
    with `layer`, where no lower one marked it."""
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for node in range(nodes):
        place = tl.load(place_NT_ptr + node * rows + row).to(tl.int64)
        if place >= 0:
            half = _half(own_N_ptr, node, tl.load(number_N_ptr + node), half_bytes)
            part = tl.load(_first_row(half, x_at, WIRE) + place * hidden + column, mask=inside, other=0.0)
            total += part.to(tl.float32)
    total = tl.where(tl.load(error_ptr) != 0, float("nan"), total)
    at = y_ptr + row.to(tl.int64) * y_stride + column
    if ADD:
        kind: tl.constexpr = y_ptr.dtype.element_ty
        y = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if shared_ptr is not None:
            shared = tl.load(shared_ptr + row.to(tl.int64) * hidden + column, mask=inside, other=0.0)
            y = (y + shared.to(tl.float32)).to(kind).to(tl.float32)
        total = tl.where(inside, y + total, 0.0)
        fine = tl.min((tl.abs(total.to(kind).to(tl.float32)) < float("inf")).to(tl.int32), axis=0)
        if (fine == 0) & (tl.load(bad_ptr + row) < 0):
            tl.store(bad_ptr + row, layer)
    tl.store(at, total.to(y_ptr.dtype.element_ty), mask=inside)
