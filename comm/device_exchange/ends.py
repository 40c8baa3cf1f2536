"""M2N between GPUs of one host, where every step is a kernel and the host waits for none of them.

`SymmAttention` and `SymmExpert` launch the kernels of `kernels/triton/symm_exchange.py` over boxes in memory that both
ends map. If a peer stays silent, the waiting kernel gives up, writes an error word and puts NaN where the rows would
be; `check` names the peer. So it does at once when the host aborts. It knows addresses, no allocators. Shapes: T rows
of a dispatch, K top-k, H hidden, N peers, R most rows of a message.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from afserve.comm.device_exchange.region import Region
from afserve.comm.m2n.routes import LayerRoutes
from afserve.comm.mailbox.wire import Frame
from afserve.comm.transport import Kind, Layout, WireType
from afserve.errors import PeerLost
from afserve.kernels.devices.device import Queue
from afserve.kernels.devices.opened import device_of
from afserve.kernels.triton import symm_exchange as symm_kernels
from afserve.kernels.triton.config import FUSED
from afserve.kernels.triton.launch import PreparedLaunch, cdiv, power_of_two
from afserve.member import NodeId, Role

_COLUMNS = 1024
_ERROR, _ABORT = 0, 1  # words that host and device share
_PLAN_ROWS = 128
_WIRES = {
    WireType.FLOAT32: tl.float32,
    WireType.BFLOAT16: tl.bfloat16,
    WireType.FLOAT16: tl.float16,
    WireType.FLOAT8: tl.float8e4nv,
}


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a kernel waits for a peer: nanoseconds where the device has a clock, looks at the flag otherwise."""

    limit: int = 2_000_000_000
    timed: bool = True


@dataclass(frozen=True, slots=True)
class Boxes:
    """One micro-batch's regions at all peers: addresses on this end and, written by this end, on theirs (int64).

    `keeper` holds the memory that is there: kernels write to it for as long as an end has these boxes.
    """

    own_N: Tensor
    peer_N: Tensor
    keeper: object
    own: tuple[int, ...]

    @classmethod
    def at(cls, own: Sequence[int], peer: Sequence[int], device: torch.device, keeper: object) -> "Boxes":
        own_N, peer_N = (torch.tensor(side, dtype=torch.int64, device=device) for side in (own, peer))
        return cls(own_N, peer_N, keeper, tuple(own))

    def __len__(self) -> int:
        return len(self.own)


@dataclass(frozen=True, slots=True)
class SymmTicket:
    """A dispatch under way; place_NT is where each row lies in each node's message, -1 where it was not sent."""

    micro_batch: int
    place_NT: Tensor


class _End:
    """`boxes` by micro-batch; `stamp` (layer, epoch) and all numbers live on the device, so a graph replays them."""

    def __init__(self, layout: Layout, boxes: Sequence[Boxes], patience: Patience, peer: Role) -> None:
        self._layout, self._boxes, self._patience, self._peer = layout, list(boxes), patience, peer
        self._dispatch, self._combine = Region.of(Kind.DISPATCH, layout), Region.of(Kind.COMBINE, layout)
        self._device = boxes[0].own_N.device
        self._number_MN = [self._words(len(one)) for one in boxes]
        self._count_MN = [self._words(len(one)) for one in boxes]
        self._error = self._words(1)
        self._place = device_of(self._device)
        self._queue: Queue | None = None  # where it waited last
        self._host = self._place.pinned(2, torch.int32)
        self._words_of_host = self._host.numpy()  # written also outside of inference mode
        self._begun = self._place.pinned(max(map(len, boxes)), torch.int32)
        self._fp8 = layout.dispatch_wire is WireType.FLOAT8
        self._columns = min(_COLUMNS, max(128, power_of_two(layout.hidden)))
        self._parts = cdiv(layout.hidden, self._columns)
        region = self._dispatch
        scales = Frame(Kind.DISPATCH, layout).scales
        self._rows = layout.slots, scales, region.half, region.weight, region.slot, region.scale, region.x
        self._moved = {
            "CHOICES": layout.top_k, "WIDTH": power_of_two(layout.top_k), "COLUMNS": self._columns,
            "WIRE": _WIRES[layout.dispatch_wire], "FP8": self._fp8, **FUSED,
        }  # fmt: skip

    def check(self) -> None:
        """Waits for the device. Raises PeerLost naming the first peer that stayed silent; this end is no use then."""
        silent = int(self._error.item())
        if silent:
            limit = f"{self._patience.limit / 1e9:g} s" if self._patience.timed else "its limit"
            raise PeerLost(NodeId(self._peer, silent - 1), f"it sent nothing within {limit}")

    def wait_failed(self, *, done: bool) -> bool:
        """Whether a wait was in vain, once the device has `done` what was launched."""
        if not done:
            self._finish()
        return bool(self._words_of_host[_ERROR])

    def _finish(self) -> None:
        if self._queue is not None:
            self._queue.wait()

    def abort(self) -> None:
        """Every wait ends now, as if its peer were silent, and every later one until `begin`."""
        self._words_of_host[_ABORT] = 1

    def begin(self, numbers: Sequence[int], micro_batch: int = 0) -> None:
        """The next message of each box has the number after this one (any integers; they wrap at 32 bits), at both
        ends. It waits until what was aborted is over."""
        if self._words_of_host[_ABORT]:
            self._finish()
        wrapped = [(number + (1 << 31)) % (1 << 32) - (1 << 31) for number in numbers]
        begun_N = self._begun[: len(wrapped)]
        begun_N.copy_(torch.tensor(wrapped, dtype=torch.int32))
        self._number_MN[micro_batch].copy_(begun_N, non_blocking=True)
        self._error.zero_()
        self._words_of_host.fill(0)

    def _arrived(self, micro_batch: int, ahead: int) -> bool:
        """In host memory, whether all flags have their numbers; a device waits by itself."""
        if self._device.type != "cpu":
            return True
        numbers = self._number_MN[micro_batch].tolist()
        flags = (ctypes.c_int32.from_address(address).value for address in self._boxes[micro_batch].own)
        return all(flag == number + ahead for flag, number in zip(flags, numbers, strict=True))

    def _flags(
        self, boxes: Boxes, awaited: Region, sent: Region, *, is_next: bool
    ) -> tuple[PreparedLaunch, PreparedLaunch]:
        """The launch that waits for messages, and the one that says that they are there."""
        grid, timed = (len(boxes),), self._patience.timed
        numbers = self._layout.max_rows, awaited.half, self._patience.limit
        return (
            PreparedLaunch(
                symm_kernels.wait_boxes, grid, numbers, NEXT=is_next, TIMED=timed, num_warps=1, **FUSED
            ),
            PreparedLaunch(symm_kernels.signal_boxes, grid, (sent.half,), TIMED=timed, num_warps=1, **FUSED),
        )

    def waits_here(self) -> None:
        """Its last wait is in the current queue."""
        self._queue = self._place.current()

    def _words(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._device)


class SymmAttention(_End):
    """An attention node's end; box n is expert node n's."""

    def __init__(self, layout: Layout, boxes: Sequence[Boxes], patience: Patience = Patience()) -> None:
        super().__init__(layout, boxes, patience, Role.EXPERT)
        self._flags_M = [self._flags(one, self._combine, self._dispatch, is_next=False) for one in boxes]
        self._sends: dict[tuple[object, ...], tuple[PreparedLaunch, PreparedLaunch]] = {}
        self._sums: dict[tuple[object, ...], PreparedLaunch] = {}

    def _sending(
        self, nodes: int, rows: int, stride: int, routed: tuple[int, int] | None
    ) -> tuple[PreparedLaunch, PreparedLaunch]:
        """A row's places, and where it goes; `routed` has how many experts and replicas."""
        layout = self._layout
        experts, replicas = routed or (0, 1)
        plan = PreparedLaunch(
            symm_kernels.plan_nodes, (nodes,), (rows, layout.slots, experts, replicas, layout.hidden, stride),
            CHOICES=layout.top_k, ROUTED=routed is not None, ROWS=_PLAN_ROWS, **FUSED,
        )  # fmt: skip
        numbers = rows, layout.hidden, stride, nodes, *self._rows
        return plan, PreparedLaunch(symm_kernels.put_rows, (rows, self._parts), numbers, **self._moved)

    def _summing(self, nodes: int, rows: int, stride: int, add: bool) -> PreparedLaunch:
        region, layout = self._combine, self._layout
        return PreparedLaunch(
            symm_kernels.sum_answers, (rows, self._parts),
            (rows, layout.hidden, stride, nodes, region.half, 0, region.x), 5, ADD=add, COLUMNS=self._columns,
            WIRE=_WIRES[layout.combine_wire], **FUSED,
        )  # fmt: skip

    def dispatch(
        self, x_TH: Tensor, slot_TK: Tensor, weight_TK: Tensor, stamp: Tensor, micro_batch: int,
        routes: LayerRoutes | None = None,
    ) -> SymmTicket:  # fmt: skip
        """Send each row once to every node that has one of its slots.

        slot_TK is int32 and counts through all nodes (node * slots + slot, -1: none), or has experts, of any integer
        type, that `routes` turn into such; rows without a slot stay here, so T may be an upper bound. `stamp` is int32
        (layer, epoch), on the device. T is at most the layout's most rows.
        """
        boxes, rows, (stride, step) = self._boxes[micro_batch], x_TH.shape[0], x_TH.stride()
        nodes, peer_N = len(boxes.own), boxes.peer_N
        assert rows <= self._layout.max_rows and step == 1, (
            "more rows than fit, or rows that are not contiguous"
        )
        number_N, count_N = self._number_MN[micro_batch], self._count_MN[micro_batch]
        place_NT = number_N.new_empty(nodes, rows)
        chosen_TK, slot_EP, below_EP, routed = slot_TK, None, None, None
        if routes is not None:
            slot_TK, slot_EP, below_EP = number_N.new_empty(*weight_TK.shape), routes.slot_EP, routes.below_EP
            experts, replicas = slot_EP.shape
            routed = experts - 1, replicas
        sizes = nodes, rows, stride, routed
        if sizes not in self._sends:
            self._sends[sizes] = self._sending(*sizes)
        plan, put = self._sends[sizes]
        plan(x_TH, chosen_TK, slot_EP, below_EP, slot_TK, place_NT, count_N, number_N)
        if rows:
            put(x_TH, slot_TK, weight_TK, place_NT, number_N, peer_N)
        self._flags_M[micro_batch][1](peer_N, number_N, count_N, stamp)
        return SymmTicket(micro_batch, place_NT)

    def is_there(self, micro_batch: int) -> bool:
        """Whether `combine` of what was dispatched last would wait for nobody; True on a device, which waits itself."""
        return self._arrived(micro_batch, 0)

    def combine(self, ticket: SymmTicket) -> Tensor:
        """y_TH, float32: the partial sums in the order of the nodes. NaN if one stayed silent: `check` says who."""
        shape = ticket.place_NT.shape[1], self._layout.hidden
        y_TH = torch.empty(shape, dtype=torch.float32, device=ticket.place_NT.device)
        self._combine_into(ticket, y_TH, None, None, 0, add=False)
        return y_TH

    def fold_sums(
        self, ticket: SymmTicket, x_TH: Tensor, shared_TH: Tensor | None, bad_T: Tensor | None, layer: int
    ) -> None:
        """`combine` whose sums are added to x_TH as by `Ops.add_sums`, behind `shared_TH` of the same dtype."""
        shared_TH = None if shared_TH is None else shared_TH.contiguous()
        bad_T = x_TH.new_empty(len(x_TH), dtype=torch.int32) if bad_T is None else bad_T
        self._combine_into(ticket, x_TH, shared_TH, bad_T, layer, add=True)

    def _combine_into(
        self, ticket: SymmTicket, y_TH: Tensor, shared_TH: Tensor | None, bad_T: Tensor | None, layer: int, *,
        add: bool,
    ) -> None:  # fmt: skip
        boxes, number_N = self._boxes[ticket.micro_batch], self._number_MN[ticket.micro_batch]
        own_N, error, rows = boxes.own_N, self._error, y_TH.shape[0]
        self.waits_here()
        self._flags_M[ticket.micro_batch][0](own_N, number_N, None, None, error, self._host)
        if rows:
            sizes = len(boxes.own), rows, y_TH.stride(0), add
            if sizes not in self._sums:
                self._sums[sizes] = self._summing(*sizes)
            self._sums[sizes](own_N, number_N, ticket.place_NT, error, y_TH, shared_TH, bad_T, free=layer)


@dataclass(frozen=True, slots=True)
class SymmArrival:
    """What all attention nodes sent for one micro-batch, A * R rows at most; those behind the last have slots -1.

    header_N2 is (layer, epoch) of each attention node's message, until the next one of the micro-batch.
    """

    micro_batch: int
    x_NH: Tensor
    slot_NK: Tensor
    weight_NK: Tensor
    header_N2: Tensor


class SymmExpert(_End):
    """An expert node's end; box n is attention node n's. `dtype` is what rows become that travel in FP8."""

    def __init__(
        self,
        layout: Layout,
        boxes: Sequence[Boxes],
        patience: Patience = Patience(),
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(layout, boxes, patience, Role.ATTENTION)
        self._dtype = dtype if self._fp8 else layout.dispatch_wire.dtype
        self._header_MN2 = [self._words(2 * len(one)).view(-1, 2) for one in boxes]
        self._flags_M = [self._flags(one, self._dispatch, self._combine, is_next=True) for one in boxes]
        self._moves_M = [self._moves(len(one)) for one in boxes]

    def _moves(self, boxes: int) -> tuple[PreparedLaunch, PreparedLaunch]:
        """Of rows that came, and of answers."""
        layout, region, padded = self._layout, self._combine, power_of_two(boxes)
        grid, numbers = (boxes * layout.max_rows, self._parts), (boxes, layout.max_rows, layout.hidden)
        take = PreparedLaunch(
            symm_kernels.take_rows, grid, (*numbers, *self._rows), BOXES=padded, **self._moved
        )
        return take, PreparedLaunch(
            symm_kernels.put_answers, grid, (*numbers, region.half, region.x), COLUMNS=self._columns, BOXES=padded,
            WIRE=_WIRES[layout.combine_wire], **FUSED,
        )  # fmt: skip

    def is_there(self, micro_batch: int) -> bool:
        """Whether `receive` would wait for nobody; True on a device, which waits itself."""
        return self._arrived(micro_batch, 1)

    def receive(self, micro_batch: int, into: SymmArrival | None = None) -> SymmArrival:
        """Wait, on the device, for the next message of every attention node, and put their rows together, `into` the
        memory of an earlier one that was answered."""
        arrival = into or self._arrival(micro_batch)
        known = self._boxes[micro_batch].own_N, self._number_MN[micro_batch], self._count_MN[micro_batch]
        self.waits_here()
        self._flags_M[micro_batch][0](*known, arrival.header_N2, self._error, self._host)
        self._moves_M[micro_batch][0](*known, arrival.x_NH, arrival.slot_NK, arrival.weight_NK)
        return arrival

    def _arrival(self, micro_batch: int) -> SymmArrival:
        layout, device = self._layout, self._device
        most = len(self._boxes[micro_batch]) * layout.max_rows
        x_NH = torch.empty((most, layout.hidden), dtype=self._dtype, device=device)
        slot_NK = torch.empty((most, layout.top_k), dtype=torch.int32, device=device)
        weight_NK = torch.empty((most, layout.top_k), dtype=torch.float32, device=device)
        return SymmArrival(micro_batch, x_NH, slot_NK, weight_NK, self._header_MN2[micro_batch])

    def answer(self, arrival: SymmArrival, y_NH: Tensor) -> None:
        """Send each row's weighted partial sum back; y_NH is contiguous, of any float dtype, rows as in `arrival`."""
        micro_batch = arrival.micro_batch
        peer_N, number_N = self._boxes[micro_batch].peer_N, self._number_MN[micro_batch]
        count_N = self._count_MN[micro_batch]
        self._moves_M[micro_batch][1](y_NH, count_N, number_N, peer_N)
        self._flags_M[micro_batch][1](peer_N, number_N, count_N, arrival.header_N2)
