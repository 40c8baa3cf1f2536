"""Before a node says that it is ready: one message each way between ends that are all here, over memory of its own.

So every kernel of the exchange is compiled, loaded and seen to bring rows there and back before anybody waits for it.
Kernels are compiled for widths, wires and how many boxes an end has, not for how many rows a message may have, so the
messages here are short. Shapes: T rows, N nodes, H hidden, K top-k.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from afserve.comm.device_exchange.ends import Boxes, Patience, SymmAttention, SymmExpert
from afserve.comm.device_exchange.region import region_bytes
from afserve.comm.m2n.routes import LayerRoutes
from afserve.comm.transport import NO_SLOT, Layout
from afserve.errors import ConfigError
from afserve.kernels.triton.ahead import compile_ahead

ROWS = 16
_NEAR = 0.07  # relative: rows may travel in FP8, which has 3 bits behind the first


def rehearse(
    layout: Layout, nodes: int, device: torch.device, dtype: torch.dtype, patience: Patience
) -> None:
    """As an attention node with so many expert nodes; an expert node has one at each of its boxes. `dtype` is that of
    the model's rows. Raises ConfigError where what comes back is not what went."""
    compile_ahead(partial(exchange_with_itself, layout, nodes, device, dtype, patience))
    x_TH, y_TH = exchange_with_itself(layout, nodes, device, dtype, patience)
    if not torch.allclose(y_TH, x_TH.float(), rtol=_NEAR, atol=1e-2):
        raise ConfigError(
            f"device_exchange: on {device} rows came back from the exchange that are not those that were sent, so "
            "nodes cannot use it here; leave --device-exchange out, and please report it",
            param="device_exchange",
        )


def exchange_with_itself(
    layout: Layout, nodes: int, device: torch.device, dtype: torch.dtype, patience: Patience
) -> tuple[Tensor, Tensor]:
    """x_TH and the sums that come back, which are alike: experts give what they get, and a row goes to one node. The
    sums are the mean of three, one by each kernel that makes them."""
    layout = replace(layout, max_rows=ROWS, micro_batches=1)
    memory = torch.zeros((2, nodes, region_bytes(layout)), dtype=torch.uint8, device=device)
    to_experts, to_attention = ([memory[way, node].data_ptr() for node in range(nodes)] for way in range(2))
    front = SymmAttention(layout, [Boxes.at(to_attention, to_experts, device, memory)], patience)
    x_TH = torch.arange(ROWS * layout.hidden, device=device).remainder_(7).view(ROWS, -1).to(dtype)
    expert_TK = torch.full((ROWS, layout.top_k), -1, dtype=torch.int32, device=device)
    expert_TK[:, 0] = torch.arange(ROWS, device=device) % nodes
    slot_E1 = torch.tensor([[n * layout.slots] for n in range(nodes)] + [[NO_SLOT]], dtype=torch.int32)
    routes = LayerRoutes(slot_E1, slot_E1.float(), nodes, layout.slots).to(
        device
    )  # experts that are not replicated
    weight_TK = torch.ones((ROWS, layout.top_k), dtype=torch.float32, device=device)
    stamp = torch.zeros(4, dtype=torch.int32, device=device)
    ticket = front.dispatch(x_TH, expert_TK, weight_TK, stamp, 0, routes)
    for own, peer in zip(to_experts, to_attention, strict=True):
        end = SymmExpert(layout, [Boxes.at([own], [peer], device, memory)], patience, dtype)
        arrival = end.receive(0)
        end.answer(arrival, arrival.x_NH.to(layout.combine_wire.dtype))
    y_TH = front.combine(ticket)
    for shared_TH in (None, torch.zeros_like(x_TH)):
        sum_TH = torch.zeros_like(x_TH)
        front.fold_sums(ticket, sum_TH, shared_TH, None, 0)
        y_TH += sum_TH
    return x_TH, y_TH / 3
