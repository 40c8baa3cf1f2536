"""Placements over a stream: whole once, then what changes; and what no correct peer says is refused."""

import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.control.wire import messages
from afserve.control.wire.placement_values import Adopt, FillSlots
from afserve.control.wire.placements import SaidLast, SaidPlacement, pack, unpack
from afserve.errors import ConfigError, ProtocolError
from afserve.placement.change import change, changed
from afserve.placement.placement import FREE, LayerPlacement, Placement

EXPERTS = 6
ONE = Placement.contiguous(layers=3, experts=EXPERTS, nodes=3, slots_per_node=3)


@st.composite
def layers(draw, nodes: int):
    """Every expert somewhere, further replicas in some of the free slots, shares that add up."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width = -(-EXPERTS // nodes) + 1
    rows = [[FREE] * width for _ in range(nodes)]
    for expert in range(EXPERTS):
        rows[expert % nodes][expert // nodes] = expert
    for row in rows:
        if random.random() < 0.5 and nodes > 1:
            row[-1] = int(random.choice([e for e in range(EXPERTS) if e not in row]))
    copies = {e: sum(e in row for row in rows) for e in range(EXPERTS)}
    share = [[0.0 if e == FREE else 1.0 / copies[e] for e in row] for row in rows]
    return LayerPlacement(tuple(map(tuple, rows)), tuple(map(tuple, share)), draw(st.floats(0, 9)), 0.5)


@st.composite
def placements(draw):
    nodes = draw(st.integers(1, 5))
    epoch = draw(st.integers(0, 1 << 30))
    return Placement(epoch, nodes, EXPERTS, tuple(draw(layers(nodes)) for _ in range(3)))


@settings(max_examples=60, deadline=None)
@given(st.lists(placements(), min_size=1, max_size=5))
def test_every_placement_arrives_as_it_was_said(said):
    here, there = SaidLast(), SaidLast()
    for placement in said:
        assert there.hear(here.say(placement)) == placement


@settings(max_examples=60, deadline=None)
@given(placements(), placements())
def test_a_change_leads_to_the_next_one(old, new):
    text = change(old, new)
    assert (text is None) == (new.nodes < old.nodes)
    if text is not None:
        assert changed(old, text) == new


def test_a_lost_node_of_a_large_placement_is_a_small_message():
    large = Placement.contiguous(layers=8, experts=256, nodes=128, slots_per_node=3)
    moved = [list(row) for row in large.layers[0].slots]
    moved[0][2] = 5
    share = [list(row) for row in large.layers[0].share]
    share[0][2] = share[2][1] = 0.5
    layer = LayerPlacement(tuple(map(tuple, moved)), tuple(map(tuple, share)))
    small = replace(large, epoch=1, layers=(layer, *large.layers[1:]))
    here = SaidLast()
    whole, said = here.say(large), here.say(small)
    assert whole.base is None and said.base == 0 and len(said.data) < 200 < len(whole.data)


def test_the_same_streams_work_is_done_once():
    first, second = SaidLast(), SaidLast()
    assert first.say(ONE).data is second.say(ONE).data
    later = ONE.with_epoch(4)
    assert first.say(later).data is second.say(later).data


@pytest.mark.parametrize(
    "said",
    [
        SaidPlacement(b"not compressed"),
        SaidPlacement(pack(ONE)[:-3]),
        SaidPlacement(zlib.compress(b"[" * (65 << 20), 1)),  # 64 MiB are read at most
        SaidPlacement(zlib.compress(b"{}")),
    ],
    ids=["no zlib", "cut short", "too much", "no placement"],
)
def test_what_is_no_placement_is_refused(said):
    with pytest.raises(ConfigError):
        SaidLast().hear(said)


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", '{"epoch":1,"nodes":2,"layers":{}}', '{"epoch":1,"nodes":3,"layers":{"7":{}}}',
     '{"epoch":1,"nodes":3,"layers":{"0":{"nodes":[9],"slots":[[1]],"share":[[1.0]]}}}',
     '{"epoch":1,"nodes":3,"layers":{"0":{"nodes":[0,1],"slots":[[1]],"share":[[1.0]]}}}',
     '{"epoch":1,"nodes":3,"layers":{"0":{"nodes":[0],"slots":[[-1,-1,-1]],"share":[[0,0,0]]}}}',
     '{"epoch":-1,"nodes":3,"layers":{}}', '{"epoch":1,"nodes":1e9,"layers":{}}'],
)  # fmt: skip
def test_what_is_no_change_is_refused(text):
    with pytest.raises(ConfigError):
        changed(ONE, text)


def test_a_change_of_what_is_not_known_is_refused():
    said = SaidPlacement(zlib.compress(b"{}"), base=0)
    with pytest.raises(ProtocolError, match="epoch 0 came where none is known"):
        SaidLast().hear(said)
    there = SaidLast()
    there.hear(SaidPlacement(pack(ONE.with_epoch(3))))
    with pytest.raises(ProtocolError, match="epoch 0 came where epoch 3 is known"):
        there.hear(said)


def test_over_messages():
    here, there = SaidLast(), SaidLast()
    for value in (FillSlots(ONE, urgent=True), Adopt(ONE.with_epoch(1)), FillSlots(ONE.with_epoch(2))):
        data = messages.encode_to_node(value, here)
        assert messages.decode_to_node(data, there) == value
    assert unpack(pack(ONE)) == ONE
