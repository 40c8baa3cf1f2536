"""One direction of one box as bytes in memory: views that a sender fills in place, and a checked read of what arrived.

It knows how a message lies in its memory. It knows no flags, and therefore not whether a message is there. `handle` is
the native library's form of the same mailbox, which writes and checks whole messages.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from afserve.comm.mailbox.fp8 import quantise
from afserve.comm.mailbox.wire import (
    HEADER_BYTES,
    Codec,
    Frame,
    call_of,
    clear_call,
    encode_refusal,
    name,
    refusal,
    rows_of,
)
from afserve.comm.native import native_library
from afserve.comm.transport import NO_SLOT, Box, Header, Kind, Parcel
from afserve.errors import DispatchRefused, ProtocolError

_CACHED_SHAPES = 1024


class Mailbox:
    """`memory_B` is a flat uint8 tensor of at least `frame.capacity` bytes, 64-byte aligned. `progress` is the address
    of eight bytes in which a sender tells how much of a message is there already; 0 where there are none.
    """

    def __init__(self, box: Box, frame: Frame, memory_B: Tensor, progress: int = 0) -> None:
        self.box = box
        self.frame = frame
        self.memory_B = memory_B
        self._bytes = memory_B.numpy().data
        self._length = 0
        self._told = False
        self._codec = Codec(box, frame)
        self._dtype, self._hidden = frame.wire.dtype, frame.layout.hidden
        self._native = native_library() if memory_B.is_cpu else None
        self._parts: dict[int, tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, int]] = {}
        self.handle = self._open(progress) if progress and self._native is not None else None
        self._own: tuple[Tensor, Tensor] | None = None
        self._own_parts: dict[int, tuple[Tensor, Tensor]] = {}

    def stage(self, header: Header) -> Parcel:
        """Write the header; return views of the rows to be filled."""
        assert header.kind is self.frame.kind and header.wire is self.frame.wire
        if not 0 <= header.rows <= self.frame.layout.max_rows:
            raise ValueError(f"{header.rows} rows in one message, at most {self.frame.layout.max_rows}")
        x_RH, slot_RK, weight_RK, scale_RS, payload = self._views(header.rows)
        self._codec.write(self._bytes, header, payload)
        self._told = header.call > 0
        self._length = HEADER_BYTES + payload
        return Parcel(header, x_RH, slot_RK, weight_RK, scale_RS)

    def fits_native(self, x_RH: Tensor, slot_RK: Tensor | None, weight_RK: Tensor | None) -> bool:
        """Whether the native library can write these rows as they lie."""
        rows, hidden = x_RH.shape
        if x_RH.dtype is not self._dtype or hidden != self._hidden:
            return False
        if not x_RH.is_cpu or not x_RH.is_contiguous():
            return False
        if slot_RK is None or weight_RK is None:
            return self.frame.kind is Kind.COMBINE
        choices = rows * self.frame.layout.top_k
        return (
            not self.frame.scales
            and slot_RK.dtype is torch.int32
            and weight_RK.dtype is torch.float32
            and slot_RK.numel() == weight_RK.numel() == choices
            and slot_RK.is_contiguous()
            and weight_RK.is_contiguous()
        )

    @staticmethod
    def fill(parcel: Parcel, x_RH: Tensor, slot_RK: Tensor | None, weight_RK: Tensor | None) -> None:
        """The same in PyTorch, into what `stage` returned."""
        if parcel.scale_RS is None:
            parcel.x_RH.copy_(x_RH)
        else:
            quantise(x_RH, parcel.x_RH, parcel.scale_RS)
        for mine, given in ((parcel.slot_RK, slot_RK), (parcel.weight_RK, weight_RK)):
            if mine is not None and given is not None:
                mine.copy_(given)

    def read(self, sequence: int) -> Parcel:
        """The message that lies here. Raises DispatchRefused for a refusal, ProtocolError for what fits no layout."""
        reason = refusal(self._bytes, self.box, self.frame, sequence)
        if reason is not None:
            raise DispatchRefused(f"{name(self.box)}: refused by the expert node: {reason}")
        header = self._codec.read(self._bytes, sequence)
        x_RH, slot_RK, weight_RK, scale_RS, _ = self._views(header.rows)
        if slot_RK is None or weight_RK is None:
            return Parcel(header, x_RH)
        own = self._own_choices(slot_RK, weight_RK)
        return Parcel(header, x_RH, *own, scale_RS)

    def taken(self, epoch: int, sequence: int, layer: int, rows: int) -> Parcel:
        """The message that the native library has checked and whose slots and weights lie in `own`."""
        frame = self.frame
        x_RH, slot_RK, _, scale_RS, _ = self._views(rows)
        call = call_of(self._bytes) if slot_RK is None or not rows else 0  # no rows: it may open a step
        header = Header(frame.kind, epoch, sequence, layer, rows, frame.wire, call)
        if slot_RK is None:
            return Parcel(header, x_RH)
        own = self._own_parts.get(rows)
        if own is None:
            if len(self._own_parts) >= _CACHED_SHAPES:
                self._own_parts.clear()
            slot_RK, weight_RK = self.own
            own = self._own_parts[rows] = slot_RK[:rows], weight_RK[:rows]
        return Parcel(header, x_RH, *own, scale_RS)

    @property
    def own(self) -> tuple[Tensor, Tensor]:
        """Slots and weights in memory of the receiver's own. It never holds a slot that was not checked.

        Large ones take the memory that messages touch, as mailboxes do: calloc gives pages that nobody has written."""
        if self._own is None:
            shape = self.frame.layout.max_rows, self.frame.layout.top_k
            slot_RK, weight_RK = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
            self._own = torch.from_numpy(slot_RK), torch.from_numpy(weight_RK)
        return self._own

    @property
    def own_addresses(self) -> tuple[int, int]:
        slot_RK, weight_RK = self.own
        return slot_RK.data_ptr(), weight_RK.data_ptr()

    def tell_no_call(self) -> None:
        """Before answers are written natively: their headers have the fields alone."""
        if self._told:
            clear_call(self._bytes)
            self._told = False

    def last_answer(self) -> tuple[int, int]:
        """Rows of what came last, and of its call, unchecked."""
        return rows_of(self._bytes), call_of(self._bytes)

    def refuse(self, sequence: int, reason: str) -> None:
        self._length = encode_refusal(self._bytes, self.box, self.frame, sequence, reason)

    def message(self) -> Tensor:
        """The bytes of what was staged last."""
        return self.memory_B[: self._length]

    def _own_choices(self, slot_RK: Tensor, weight_RK: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of slots and weights. Raises ProtocolError unless every slot is NO_SLOT or one of this node's.

        On a device a slot that is not becomes NO_SLOT.
        """
        slots = self.frame.layout.slots
        if not slot_RK.is_cpu:
            # To name a wrong slot the host would have to wait for the device: nobody computes it instead.
            return slot_RK.masked_fill((slot_RK < 0) | (slot_RK >= slots), NO_SLOT), weight_RK.clone()
        if self._native is None:
            own_RK, factor_RK = slot_RK.clone(), weight_RK.clone()
            good = not own_RK.numel() or (int(own_RK.min()) >= NO_SLOT and int(own_RK.max()) < slots)
        else:
            own_RK, factor_RK = torch.empty_like(slot_RK), torch.empty_like(weight_RK)
            source = slot_RK.data_ptr(), weight_RK.data_ptr()
            count = own_RK.numel()
            good = self._native.copy_choices(*source, own_RK.data_ptr(), factor_RK.data_ptr(), count, slots)
        if not good:
            found = f"slot {int(own_RK.min())}..{int(own_RK.max())}"
            raise ProtocolError(f"{name(self.box)}: {found} is outside [{NO_SLOT}, {slots})")
        return own_RK, factor_RK

    def _open(self, progress: int) -> Any:
        assert self._native is not None
        frame, layout = self.frame, self.frame.layout
        choices = layout.top_k if frame.kind is Kind.DISPATCH else 0
        return self._native.Mailbox(
            self.memory_B.data_ptr(),
            self.memory_B.numel(),
            progress,
            *self._codec.constant,
            frame.row_bytes,
            choices,
            4 * frame.scales,
            layout.max_rows,
            layout.layers,
            layout.slots,
        )

    def _views(self, rows: int) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, int]:
        parts = self._parts.get(rows)
        if parts is None:
            if len(self._parts) >= _CACHED_SHAPES:
                self._parts.clear()
            parts = self._parts[rows] = self._cut(rows)
        return parts

    def _cut(self, rows: int) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, int]:
        layout, span = self.frame.layout, self.frame.span(rows)
        x_RH = self._part(span.x, span.end, self.frame.wire.dtype).view(rows, layout.hidden)
        payload = span.end - HEADER_BYTES
        if self.frame.kind is Kind.COMBINE:
            return x_RH, None, None, None, payload
        slot_RK = self._part(span.slot, span.scale, torch.int32).view(rows, layout.top_k)
        weight_RK = self._part(span.weight, span.slot, torch.float32).view(rows, layout.top_k)
        scales = self.frame.scales
        if not scales:
            return x_RH, slot_RK, weight_RK, None, payload
        end = span.scale + 4 * rows * scales
        return (
            x_RH,
            slot_RK,
            weight_RK,
            self._part(span.scale, end, torch.float32).view(rows, scales),
            payload,
        )

    def _part(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        return self.memory_B[start:end].view(dtype)
