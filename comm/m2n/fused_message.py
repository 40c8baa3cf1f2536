"""A dispatch's message on a device as one launch: rows as they travel, the slots of the chosen experts, and weights.

Kernels are imported by who has such a device. Shapes as in `rows.py`.
"""

import torch
from torch import Tensor

from afserve.comm.m2n.routes import LayerRoutes
from afserve.comm.mailbox.wire import Frame
from afserve.comm.transport import Header, Kind, Layout, Parcel
from afserve.kernels.triton.config import FUSED
from afserve.kernels.triton.launch import PreparedLaunch, cdiv, planned, power_of_two
from afserve.kernels.triton.symm_exchange import fill_message

_COLUMNS = 1024


def fill(
    routes: LayerRoutes, node: int, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, parcel: Parcel
) -> None:
    """All rows, into a mailbox that was staged for as many."""
    below_EP = routes.below_EP
    sizes = x_TH.shape, x_TH.stride(0), expert_TK.shape[1], node, routes.slots, routes.slot_EP.shape
    _filling(*sizes, 0 if parcel.scale_RS is None else parcel.scale_RS.shape[1])(
        x_TH, expert_TK, weight_TK, routes.slot_EP, below_EP, parcel.x_RH, parcel.slot_RK, parcel.weight_RK,
        parcel.scale_RS,
    )  # fmt: skip


@planned
def _filling(
    shape: tuple[int, int],
    stride: int,
    choices: int,
    node: int,
    slots: int,
    table: tuple[int, int],
    scales: int,
) -> PreparedLaunch:
    (rows, hidden), (experts, replicas) = shape, table
    columns = min(_COLUMNS, max(128, power_of_two(hidden)))
    return PreparedLaunch(
        fill_message, (rows, cdiv(hidden, columns)),
        (hidden, stride, node * slots, slots, experts - 1, replicas, scales),
        CHOICES=choices, WIDTH=power_of_two(choices), COLUMNS=columns, FP8=scales > 0, **FUSED,
    )  # fmt: skip


def rehearse_message(layout: Layout, device: torch.device, dtype: torch.dtype, rows: int = 1) -> Parcel:
    """One that nobody is sent, so that the kernel is compiled before one waits for it: `dtype` is that of the rows."""
    scales, wire = Frame(Kind.DISPATCH, layout).scales, layout.dispatch_wire

    def memory(columns: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros((rows, columns), dtype=kind, device=device)

    slot_RK, x_TH = memory(layout.top_k, torch.int32), memory(layout.hidden, dtype)
    routes = LayerRoutes(slot_RK[:, :1], memory(1), 1, layout.slots)
    x_RH, scale_RS = memory(layout.hidden, wire.dtype), memory(scales) if scales else None
    parcel = Parcel(Header(Kind.DISPATCH, 0, 0, 0, rows, wire), x_RH, slot_RK, memory(layout.top_k), scale_RS)
    fill(routes, 0, x_TH, slot_RK.clone(), memory(layout.top_k), parcel)
    return parcel
