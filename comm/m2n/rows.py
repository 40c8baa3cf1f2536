"""Splits the rows of one dispatch by expert node, writes each node's rows into a mailbox, and adds its answer back.

In host memory this runs in the native library where that is built and takes the tensors, otherwise in PyTorch; both
give the same bits. On a GPU every node is sent all rows, because the host would have to wait to learn how many each one
gets. It knows slots and rows; it knows no boxes.

Shapes: T rows of a micro-batch, R rows that go to one node, H hidden size, K top-k.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from afserve.comm.m2n.routes import LayerRoutes
from afserve.comm.mailbox.fp8 import quantise
from afserve.comm.native import CODES
from afserve.comm.transport import NO_SLOT, MessageFiller, Parcel, WireType

_EXPERT_DTYPES = (torch.int32, torch.int64)
Fused = Callable[[LayerRoutes, int, Tensor, Tensor, Tensor, Parcel], None]
"""Rows of a dispatch, their experts and weights into the mailbox of a node."""


class RowSplit(MessageFiller, Protocol):
    def parts(self) -> list[tuple[int, int]]:
        """(node, number of rows) of every node that gets any, in order."""

    def add(self, node: int, part_RH: Tensor, y_TH: Tensor) -> None:
        """Add the node's partial sums to their rows, in float32."""


class DeviceSplit:
    """On a device: shapes do not depend on what the router chose, so the host launches everything without waiting.

    `fused` writes a message in one launch.
    A node is sent rows that hold none of its slots too. It computes nothing for those, and its zeros change no sum.
    With top-8 of 4 nodes 10 % of the rows are such, of 8 nodes 34 %; `device_exchange/ends.py` sends none of those.
    """

    def __init__(
        self,
        routes: LayerRoutes,
        x_TH: Tensor,
        expert_TK: Tensor,
        weight_TK: Tensor,
        fused: Fused | None = None,
    ) -> None:
        self._x_TH, self._weight_TK, self._routes, self._fused = x_TH, weight_TK, routes, fused
        if fused is None:
            self._slot_TK = routes.choose(x_TH, expert_TK)
        else:
            self._x_TH = x_TH if x_TH.stride(1) == 1 else x_TH.contiguous()
            self._expert_TK, self._weight_TK = expert_TK.contiguous(), weight_TK.float().contiguous()

    def parts(self) -> list[tuple[int, int]]:
        nodes = (node for node in range(self._routes.nodes) if node not in self._routes.absent)
        return [(node, len(self._x_TH)) for node in nodes]

    def fill(self, node: int, parcel: Parcel) -> None:
        assert parcel.slot_RK is not None and parcel.weight_RK is not None
        if self._fused is not None:
            self._fused(self._routes, node, self._x_TH, self._expert_TK, self._weight_TK, parcel)
            return
        slots = self._routes.slots
        slot_TK = self._slot_TK - node * slots
        parcel.slot_RK.copy_(slot_TK.masked_fill((slot_TK < 0) | (slot_TK >= slots), NO_SLOT))
        parcel.weight_RK.copy_(self._weight_TK)
        write_rows(self._x_TH, parcel)

    def native(self, wire: WireType) -> None:
        return None

    def add(self, node: int, part_RH: Tensor, y_TH: Tensor) -> None:
        y_TH += part_RH


class TorchSplit:
    """In host memory, any dtype. With one node all rows go there in order, and no index is made."""

    def __init__(self, routes: LayerRoutes, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> None:
        self._x_TH, self._weight_TK, self._slots = x_TH, weight_TK, routes.slots
        self._slot_TK = routes.choose(x_TH, expert_TK)
        self._row_R: dict[int, Tensor | None] = (
            {0: None} if routes.nodes == 1 and not routes.absent else self._by_node(routes.nodes)
        )

    def parts(self) -> list[tuple[int, int]]:
        rows = len(self._x_TH)
        return [(node, rows if row_R is None else row_R.numel()) for node, row_R in self._row_R.items()]

    def fill(self, node: int, parcel: Parcel) -> None:
        assert parcel.slot_RK is not None and parcel.weight_RK is not None
        row_R = self._row_R[node]
        if row_R is None:
            parcel.slot_RK.copy_(self._slot_TK)
            parcel.weight_RK.copy_(self._weight_TK)
            write_rows(self._x_TH, parcel)
            return
        slot_RK = self._slot_TK[row_R] - node * self._slots
        slot_RK.masked_fill_((slot_RK < 0) | (slot_RK >= self._slots), NO_SLOT)
        parcel.slot_RK.copy_(slot_RK)
        parcel.weight_RK.copy_(self._weight_TK[row_R])
        write_rows(self._x_TH[row_R], parcel)

    def native(self, wire: WireType) -> None:
        return None

    def add(self, node: int, part_RH: Tensor, y_TH: Tensor) -> None:
        row_R = self._row_R[node]
        if row_R is None:
            y_TH += part_RH
        else:
            y_TH.index_add_(0, row_R, part_RH.float())

    def _by_node(self, nodes: int) -> dict[int, Tensor | None]:
        node_TK = torch.div(self._slot_TK, self._slots, rounding_mode="floor")
        row_R = {node: (node_TK == node).any(1).nonzero()[:, 0] for node in range(nodes)}
        return {node: row_R for node, row_R in row_R.items() if row_R.numel()}


class NativeSplit:
    """In host memory. Keeps the tensors whose addresses it uses."""

    def __init__(
        self, native: Any, routes: LayerRoutes, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor
    ) -> None:
        self._x_TH, self._weight_TK = x_TH, weight_TK
        size = x_TH.element_size()
        rows, choices = expert_TK.shape
        self._split = native.RowSplit(
            routes.handle,
            x_TH.data_ptr(),
            x_TH.shape[1] * size,
            x_TH.stride(0) * size,
            expert_TK.data_ptr(),
            expert_TK.dtype is torch.int64,
            rows,
            choices,
        )

    def native(self, wire: WireType) -> tuple[object, int] | None:
        if wire.dtype is not self._x_TH.dtype:
            return None
        return self._split, self._weight_TK.data_ptr()

    def parts(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = self._split.parts()
        return found

    def fill(self, node: int, parcel: Parcel) -> None:
        assert parcel.slot_RK is not None and parcel.weight_RK is not None
        alike = parcel.x_RH.dtype is self._x_TH.dtype
        self._split.fill(
            node,
            self._weight_TK.data_ptr(),
            parcel.x_RH.data_ptr() if alike else 0,
            parcel.slot_RK.data_ptr(),
            parcel.weight_RK.data_ptr(),
        )
        if not alike:
            write_rows(self._x_TH[self._rows(node)], parcel)

    def add(self, node: int, part_RH: Tensor, y_TH: Tensor) -> None:
        code = CODES.get(part_RH.dtype)
        if code is None:
            y_TH.index_add_(0, self._rows(node), part_RH.float())
        else:
            self._split.add(node, part_RH.data_ptr(), code, y_TH.data_ptr(), y_TH.shape[1])

    def _rows(self, node: int) -> Tensor:
        return torch.tensor(self._split.rows(node))


class Splitter:
    """Makes the split of a dispatch where its rows lie, in the native library where that is possible."""

    def __init__(self, native: Any | None, fused: Fused | None = None) -> None:
        self._native, self._fused = native, fused

    def split(self, routes: LayerRoutes, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> RowSplit:
        if not x_TH.is_cpu:
            return DeviceSplit(routes, x_TH, expert_TK, weight_TK, self._fused)
        if self._native is None or routes.handle is None or not _plain(x_TH, expert_TK, weight_TK):
            return TorchSplit(routes, x_TH, expert_TK, weight_TK)
        return NativeSplit(self._native, routes, x_TH, expert_TK, weight_TK)


def fused_on(device: torch.device) -> Fused | None:
    """What writes a message there in one launch; None where Triton's kernels do not run."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from afserve.comm.m2n.fused_message import fill

    return fill


def _plain(x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> bool:
    return (
        x_TH.stride(1) == 1
        and expert_TK.dtype in _EXPERT_DTYPES
        and expert_TK.is_contiguous()
        and weight_TK.dtype is torch.float32
        and weight_TK.is_contiguous()
    )


def write_rows(x_RH: Tensor, parcel: Parcel) -> None:
    """Rows into a mailbox's views, as they travel."""
    if parcel.scale_RS is None:
        parcel.x_RH.copy_(x_RH)
    else:
        quantise(x_RH, parcel.x_RH, parcel.scale_RS)
