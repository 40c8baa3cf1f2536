"""The conformance battery: checks of what `transport.py` promises, as functions, which every transport passes.

A check is given `Open`, a function that makes all ends of one cluster in this process, and drives both sides from one
thread. A new transport is a file, a row in `connect.py`, and these checks (docs/add-a-transport.md).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from afserve.comm.transport import Box, Header, Kind, Layout, Parcel, Transport, WireType
from afserve.errors import PeerLost, ProtocolError
from afserve.member import NodeId, attention_node, expert_node

PATIENCE = 60.0  # seconds for what should take microseconds, on a machine that is busy with something else
LAYOUT = Layout(
    hidden=24,
    top_k=3,
    max_rows=6,
    micro_batches=2,
    layers=4,
    slots=5,
    dispatch_wire=WireType.FLOAT32,
    combine_wire=WireType.FLOAT32,
)


@dataclass(frozen=True, slots=True)
class Ends:
    """The ends of one cluster, by index."""

    attention: list[Transport]
    experts: list[Transport]

    def close(self) -> None:
        for end in (*self.attention, *self.experts):
            end.close()


class Open(Protocol):
    def __call__(self, attention: int, experts: int, layout: Layout) -> Ends: ...


def arrive(end: Transport, box: Box) -> Parcel:
    """Wait for the message on `box` and take it."""
    for _ in range(1000):
        if box in end.wait([box], PATIENCE / 1000):
            return end.take(box)
    raise AssertionError(f"nothing arrived on {box} within {PATIENCE} s")


def send(end: Transport, box: Box, seed: int, rows: int, *, layer: int = 0) -> Parcel:
    """Dispatch rows that follow from `seed`, or open a step of devices by none; returns copies of what was staged."""
    layout, call = end.layout, 0 if rows else 7
    header = Header(Kind.DISPATCH, seed, end.next_sequence(box), layer, rows, layout.dispatch_wire, call)
    parcel = end.stage(box, header)
    assert parcel.slot_RK is not None and parcel.weight_RK is not None
    parcel.x_RH.copy_(content(seed, rows, layout.hidden))
    parcel.slot_RK.copy_(torch.arange(rows * layout.top_k).view(rows, layout.top_k) % (layout.slots + 1) - 1)
    parcel.weight_RK.copy_(content(seed + 1, rows, layout.top_k))
    kept = Parcel(header, parcel.x_RH.clone(), parcel.slot_RK.clone(), parcel.weight_RK.clone())
    end.post(box)
    return kept


def answer(end: Transport, box: Box, header: Header, seed: int) -> None:
    """Reply to a dispatch with rows that follow from `seed`."""
    reply = header._replace(kind=Kind.COMBINE, wire=end.layout.combine_wire, call=seed)
    end.stage(box, reply).x_RH.copy_(content(seed, header.rows, end.layout.hidden))
    end.post(box)


def content(seed: int, rows: int, columns: int) -> Tensor:
    """Small whole numbers, exact in every wire type."""
    return ((torch.arange(rows * columns) + 7 * seed) % 16 - 8).float().view(rows, columns)


def check_round_trip(open_ends: Open) -> None:
    """Every wire type; no row, one row, all rows."""
    wires = (WireType.FLOAT32, WireType.BFLOAT16, WireType.FLOAT16)
    for out, back in itertools.product((*wires, WireType.FLOAT8), wires):
        ends = open_ends(1, 1, replace(LAYOUT, dispatch_wire=out, combine_wire=back))
        box = Box(0, 0, 1)
        for seed, rows in enumerate((0, 1, LAYOUT.max_rows)):
            sent = send(ends.attention[0], box, seed, rows, layer=seed)
            got = arrive(ends.experts[0], box)
            _same(got, sent)
            answer(ends.experts[0], box, got.header, seed + 5)
            reply = arrive(ends.attention[0], box)
            assert reply.header == sent.header._replace(kind=Kind.COMBINE, wire=back, call=seed + 5)
            assert torch.equal(reply.x_RH.float(), content(seed + 5, rows, LAYOUT.hidden))
        ends.close()


def check_taken_once(open_ends: Open) -> None:
    """A message is ready until it is taken; what was taken stays as it is until the next post."""
    ends, box = open_ends(1, 1, LAYOUT), Box(0, 0, 0)
    sent = send(ends.attention[0], box, 3, 2)
    assert ends.experts[0].wait([box], PATIENCE) == [box]
    assert ends.experts[0].ready([box]) == [box]
    got = ends.experts[0].take(box)
    assert ends.experts[0].ready([box]) == []
    assert ends.experts[0].wait([box], 0.001) == []
    _same(got, sent)
    ends.close()


def check_any_ratio(open_ends: Open) -> None:
    """A:F of 1:3, 3:1, 2:3: every box is its own; answers may come in any order."""
    for attention, experts in ((1, 3), (3, 1), (2, 3)):
        ends = open_ends(attention, experts, LAYOUT)
        boxes = [box for end in ends.attention for box in end.boxes()]
        assert boxes == sorted(Box(*n) for n in itertools.product(range(attention), range(experts), range(2)))
        sent = {box: send(ends.attention[box.attention], box, n, 1 + n % 5) for n, box in enumerate(boxes)}
        for n, box in reversed(list(enumerate(boxes))):
            got = arrive(ends.experts[box.expert], box)
            _same(got, sent[box])
            answer(ends.experts[box.expert], box, got.header, 50 + n)
        for n, box in enumerate(boxes):
            assert torch.equal(
                arrive(ends.attention[box.attention], box).x_RH, content(50 + n, 1 + n % 5, 24)
            )
        ends.close()


def check_quiet(open_ends: Open) -> None:
    """Nothing there: nothing ready, and a wait ends."""
    ends = open_ends(2, 2, LAYOUT)
    for end in (*ends.attention, *ends.experts):
        assert end.ready(end.boxes()) == []
        assert end.wait(end.boxes(), 0.01) == []
    ends.close()


def check_sequence(open_ends: Open) -> None:
    """Numbers go up by one per box; a second post of the same message changes nothing."""
    ends, box = open_ends(1, 1, LAYOUT), Box(0, 0, 0)
    first = ends.attention[0].next_sequence(box)
    for turn in range(4):
        sent = send(ends.attention[0], box, turn, 2)
        assert sent.header.sequence == (first + turn) % (1 << 32)
        ends.attention[0].post(box)
        got = arrive(ends.experts[0], box)
        answer(ends.experts[0], box, got.header, turn)
        ends.experts[0].post(box)
        assert arrive(ends.attention[0], box).header.sequence == sent.header.sequence
        assert ends.experts[0].wait([box], 0.001) == []
        assert ends.attention[0].wait([box], 0.001) == []
    ends.close()


def check_limit(open_ends: Open) -> None:
    """More rows than were laid out for are refused before anything is written."""
    ends, box = open_ends(1, 1, LAYOUT), Box(0, 0, 0)
    header = Header(Kind.DISPATCH, 0, ends.attention[0].next_sequence(box), 0, 7, WireType.FLOAT32)
    try:
        ends.attention[0].stage(box, header)
    except ValueError as error:
        assert "7 rows" in str(error) and "6" in str(error)
    else:
        raise AssertionError("7 rows were staged where 6 fit")
    _same_after(ends, box)
    ends.close()


def check_hostile_slot(open_ends: Open) -> None:
    """A slot that the expert node does not have is refused; the sender learns why; the box works on."""
    ends, box = open_ends(1, 1, LAYOUT), Box(0, 0, 0)
    for slot in (-2, LAYOUT.slots, 1 << 30):
        header = Header(Kind.DISPATCH, 0, ends.attention[0].next_sequence(box), 0, 2, WireType.FLOAT32)
        parcel = ends.attention[0].stage(box, header)
        assert parcel.slot_RK is not None
        parcel.slot_RK.fill_(slot)
        ends.attention[0].post(box)
        reason = _refused(lambda: arrive(ends.experts[0], box))
        assert str(slot) in reason
        ends.experts[0].refuse(box, reason)
        assert reason in _refused(lambda: arrive(ends.attention[0], box))
        _same_after(ends, box)
    ends.close()


def check_late_answer(open_ends: Open) -> None:
    """The answer to a dispatch that was given up is passed over, not taken for the next one's."""
    ends, box = open_ends(1, 1, LAYOUT), Box(0, 0, 0)
    send(ends.attention[0], box, 1, 2)
    old = arrive(ends.experts[0], box)
    sent = send(ends.attention[0], box, 2, 3)
    answer(ends.experts[0], box, old.header, 10)
    assert ends.attention[0].wait([box], 0.01) == []
    got = arrive(ends.experts[0], box)
    _same(got, sent)
    answer(ends.experts[0], box, got.header, 11)
    assert torch.equal(arrive(ends.attention[0], box).x_RH, content(11, 3, LAYOUT.hidden))
    ends.close()


def check_lost_expert(open_ends: Open) -> None:
    """An expert node that is gone is named, in wait and in post; the others go on."""
    ends = open_ends(1, 2, LAYOUT)
    ends.experts[1].close()
    assert _lost(lambda: ends.attention[0].wait([Box(0, 1, 0)], PATIENCE)) == expert_node(1)
    assert _lost(lambda: send(ends.attention[0], Box(0, 1, 1), 1, 1)) == expert_node(1)
    _same_after(ends, Box(0, 0, 0))
    ends.attention[0].close()
    ends.experts[0].close()


def check_lost_attention(open_ends: Open) -> None:
    """An attention node that is gone is named; the others go on."""
    ends = open_ends(2, 1, LAYOUT)
    _same_after(ends, Box(1, 0, 0))
    ends.attention[1].close()
    assert _lost(lambda: ends.experts[0].wait([Box(1, 0, 0)], PATIENCE)) == attention_node(1)
    _same_after(ends, Box(0, 0, 0))
    ends.attention[0].close()
    ends.experts[0].close()


def check_membership(open_ends: Open) -> None:
    """An attention node that has left every expert node waits for nobody; the other one goes on."""
    ends = open_ends(2, 2, LAYOUT)
    for expert in range(2):
        ends.attention[0].detach(expert)
        ends.attention[0].detach(expert)
        assert _lost(partial(ends.experts[expert].wait, [Box(0, expert, 0)], PATIENCE)) == attention_node(0)
    assert ends.attention[0].boxes() == []
    assert ends.attention[0].ready([]) == [] and ends.attention[0].wait([], 0.01) == []
    for expert in range(2):
        _same_after(ends, Box(1, expert, 0))
    ends.close()


BATTERY: tuple[Callable[[Open], None], ...] = (
    check_round_trip,
    check_taken_once,
    check_any_ratio,
    check_quiet,
    check_sequence,
    check_limit,
    check_hostile_slot,
    check_late_answer,
    check_lost_expert,
    check_lost_attention,
    check_membership,
)


def _same(got: Parcel, sent: Parcel) -> None:
    assert got.header == sent.header
    assert torch.equal(got.x_RH.float(), sent.x_RH.float())
    assert got.slot_RK is not None and sent.slot_RK is not None and torch.equal(got.slot_RK, sent.slot_RK)
    assert got.weight_RK is not None and sent.weight_RK is not None
    assert torch.equal(got.weight_RK, sent.weight_RK)


def _same_after(ends: Ends, box: Box) -> None:
    """The box still carries a round trip."""
    sent = send(ends.attention[box.attention], box, 4, 2)
    got = arrive(ends.experts[box.expert], box)
    _same(got, sent)
    answer(ends.experts[box.expert], box, got.header, 9)
    assert torch.equal(arrive(ends.attention[box.attention], box).x_RH, content(9, 2, LAYOUT.hidden))


def _refused(act: Callable[[], object]) -> str:
    try:
        act()
    except ProtocolError as error:
        return error.message
    raise AssertionError("nothing was refused")


def _lost(act: Callable[[], object]) -> NodeId | str:
    for _ in range(3):
        try:
            act()
        except PeerLost as error:
            return error.peer
    raise AssertionError("nobody was missed")
