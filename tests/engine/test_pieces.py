"""Prompts' messages in pieces beside decode: which comes first, how long a piece is, and what prompts get at least."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.comm.m2n.ticket import Ticket
from afserve.engine.pieces import OVERHEAD, PIECE_SECONDS, PieceSize, PromptShare
from afserve.engine.prompt_batch import WaitingPrompts
from afserve.member import AttentionPhase
from bench.phases import DECODE, Case, Node, run
from tests.engine.test_expert_node import LAYERS, Rig, TimedBank, one_message

CALL, ROW = 20e-6, 4e-6  # seconds


class PricedBank(TimedBank):
    """A call costs something, and each row does."""

    def forward(self, layer, x_RH, slot_RK, weight_RK, out_RH, add=False):
        self.seconds = CALL + ROW * len(x_RH)
        super().forward(layer, x_RH, slot_RK, weight_RK, out_RH, add)


def rig(share=1 / 16, **phases):
    made = Rig(attention=3, longest_hold=0.0, prompt_share=share, bank=PricedBank)
    made.node.in_phases({int(name[1:]): AttentionPhase(phase) for name, phase in phases.items()})
    return made


def decode(made, turns):
    """Node 2 decodes one message after the other, which are computed as they come; what was computed beside them."""
    for turn in range(turns):
        ticket = made.send(2, turn % LAYERS, rows=1 + turn % 3)
        made.node.poll()
        made.take(2, ticket, turn % LAYERS)


def learnt(share=1 / 16, **phases):
    made = rig(share, **phases)
    decode(made, 9)
    made.bank.calls.clear()
    return made


def test_what_a_call_and_a_row_cost_is_measured():
    size = PieceSize()
    size.ran(4, CALL + 4 * ROW)
    assert size.costs() == (0.0, 0.0) and size.rows(500) == 500, "one size tells nothing"
    for rows in (1, 4, 2, 300, 7):
        size.ran(rows, CALL + rows * ROW)
    assert size.costs() == pytest.approx((CALL, ROW))
    assert size.rows(500) == 32 and size.rows(20) == 20
    assert 32 * ROW + CALL <= PIECE_SECONDS


def test_a_piece_is_long_enough_for_what_a_call_costs():
    size = PieceSize()
    for rows in (16, 64, 200):
        size.ran(rows, 1e-3 + rows * ROW)
    pieces = size.rows(100_000)
    assert pieces * ROW * OVERHEAD == pytest.approx(1e-3, rel=0.02)
    for _ in range(400):
        size.ran(16, 0.1e-6 * 16)
        size.ran(32, 0.1e-6 * 32)
    assert size.rows(100_000) == pytest.approx(2000, abs=16), "calls cost nothing any more"


def test_messages_share_a_call_while_it_costs_much_and_beside_decode_fewer_do():
    size = PieceSize()
    assert size.enough(beside=False) == 0, "nothing is known"
    size.ran(100, 1e-3 + 100 * ROW)
    size.ran(100, 1e-3 + 100 * ROW)
    assert size.enough(beside=False) == pytest.approx(101), "calls of one size: two messages of it, to learn"
    size.ran(200, 1e-3 + 200 * ROW)
    assert size.enough(beside=False) * ROW * OVERHEAD == pytest.approx(1e-3)
    assert size.enough(beside=True) * ROW == pytest.approx(1e-3)


def test_a_piece_ends_where_a_decode_message_is_usually_there():
    size = PieceSize()
    for rows in (16, 64, 200):
        size.ran(rows, CALL + rows * ROW)
    usual = size.rows(1000)
    told = [size.rows(1000, quiet) for quiet in (0.0, 100e-6, 150e-6, 210e-6, 1.0)]
    assert told == sorted(told) and told[0] < usual < told[-1] <= 2 * (usual + 16)
    assert CALL + told[3] * ROW <= 210e-6 < CALL + (told[3] + 16) * ROW


def test_pieces_are_longer_where_decode_messages_follow_slowly():
    size = PieceSize()
    for rows in (16, 64, 200):
        size.ran(rows, CALL + rows * ROW)
    told = []
    for gap in (None, 0.0, 0.5e-3, 2e-3, 1.0):
        size.beside(gap)
        told.append(size.rows(1000) * ROW + CALL)
    assert told[0] == told[1] == told[2] <= PIECE_SECONDS
    assert told[2] < told[3] <= 2e-3 / 4 and told[3] < told[4] <= 3 * PIECE_SECONDS, "a pause is no rhythm"


def test_alone_a_prompts_message_is_one_call():
    made = learnt()
    made.clock.advance(1.0)
    chunk = made.send(0, 1, rows=300)
    assert made.node.poll() == 1 and made.bank.calls == [(1, 300)]
    made.take(0, chunk, 1)


def test_beside_decode_it_is_computed_in_pieces_and_decode_comes_first():
    made = learnt()
    chunk = made.send(0, 1, rows=300)
    order = []
    while not made.links[0].ready(chunk):
        ticket = made.send(2, 2, rows=2)
        waited = made.clock.now()
        made.node.poll()
        made.take(2, ticket, 2)
        order += made.bank.calls
        assert made.bank.calls[0] == (2, 2), "decode first"
        assert made.clock.now() - waited <= 2 * CALL + 2 * ROW + PIECE_SECONDS
        made.bank.calls.clear()
    made.take(0, chunk, 1)
    pieces = [rows for layer, rows in order if layer == 1]
    assert sum(pieces) == 300 and set(pieces[:-1]) == {32}
    assert made.node.stats().prompt_pieces == len(pieces)


@pytest.mark.slow
@pytest.mark.parametrize("least", [1 / 16, 1 / 2, 0.9])
def test_prompts_get_a_share_while_decode_never_ends(least):
    """Whenever the node looks, a decode message is there."""
    made = learnt(least)
    made.send(0, 1, rows=300)
    send, poll = made.send, made.node._port.poll
    ready: list[Ticket] = []

    def flooded():
        for ticket in list(ready):
            if made.links[2].ready(ticket):
                made.links[2].combine(ticket)
                ready.remove(ticket)
        if not ready:
            ready.append(send(2, 2, rows=2))
        return poll()

    made.node._port.poll = flooded
    began = made.clock.now()
    for _ in range(300):
        if made.node._prompts or not made.node.stats().prompt_pieces:
            made.node.poll()
    rows = sum(rows for layer, rows in made.bank.calls if layer == 1)
    share = made.node.stats().prompt_seconds / (made.clock.now() - began)
    assert rows == 300 or share == pytest.approx(least, rel=0.3)
    assert rows >= 96


def test_prompts_of_one_layer_share_a_call_until_it_costs_little():
    made = rig(n0="prefill", n1="prefill", n2="decode")
    decode(made, 9)
    made.clock.advance(1.0)
    made.bank.calls.clear()
    enough = int(CALL / OVERHEAD / ROW)
    sent = [(0, 1, 0, 10), (0, 1, 1, enough), (1, 3, 0, 30), (1, 1, 1, 50)]
    tickets = [(a, layer, made.send(a, layer, m, rows=rows)) for a, layer, m, rows in sent]
    while made.node.poll():
        pass
    assert made.bank.calls == [(1, 10 + enough), (3, 30), (1, 50)]
    for a, layer, ticket in tickets:
        made.take(a, ticket, layer)
    assert not made.node._prompts and made.node.stats().messages == 9 + 4


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, LAYERS - 1), st.integers(1, 300)), min_size=1, max_size=12
    ),
    st.booleans(),
)
def test_every_row_of_a_prompt_is_computed_once_whatever_shares_a_call(sent, decoding):
    made = rig(n0="prefill", n1="prefill", n2="decode")
    decode(made, 9)
    while sent:
        busy = set()
        now, sent = sent[:4], sent[4:]
        tickets = []
        for number, (a, layer, rows) in enumerate(now):
            if (a, number // 2) not in busy:
                busy.add((a, number // 2))
                tickets.append((a, layer, rows, made.send(a, layer, number // 2, rows=rows)))
        made.bank.calls.clear()
        beside = 0
        while not all(made.links[a].ready(ticket) for a, _, _, ticket in tickets):
            if decoding:
                ticket = made.send(2, 2, rows=1)
                beside += 1
            made.node.poll()
            if decoding:
                made.take(2, ticket, 2)
        for a, layer, _, ticket in tickets:
            made.take(a, ticket, layer)
        assert sum(rows for _, rows in made.bank.calls) == sum(rows for _, _, rows, _ in tickets) + beside
    assert not made.node._prompts


def test_what_a_prefill_node_sends_is_a_prompts_whatever_its_size():
    made = learnt(n0="prefill", n1="decode")
    few, many = made.send(0, 1, rows=5), made.send(1, 1, rows=200)
    assert made.node.poll() == 2
    assert made.bank.calls == [(1, 200), (1, 5)], "many that decode come first, and are not cut"
    made.take(0, few, 1)
    made.take(1, many, 1)


def test_a_node_that_leaves_in_the_middle_of_a_prompt():
    made = learnt()
    made.send(0, 1, rows=300)
    made.node.poll()
    assert made.node._prompts
    made.links[0].close()
    for _ in range(3):
        made.node.wait(0.0)
        made.node.poll()
    again = made.send(1, 1, rows=300)
    while not made.links[1].ready(again):
        made.node.poll()
    made.take(1, again, 1)


def test_a_newer_dispatch_replaces_one_of_which_a_part_is_done():
    made = learnt()
    made.send(0, 0, rows=300)
    made.node.poll()
    ticket = made.send(0, 2, rows=200)
    while not made.links[0].ready(ticket):
        made.node.poll()
    made.take(0, ticket, 2)


def test_a_share_is_of_the_time_in_which_prompts_wait():
    share = PromptShare(1 / 16)
    assert not share.is_due
    share.ran(1.0, prompt=False)
    assert share.is_due
    share.ran(0.1, prompt=True)
    assert not share.is_due
    share.none_waits()
    share.ran(0.1, prompt=True)
    assert not share.is_due


@pytest.mark.slow
@pytest.mark.parametrize("beside", [(), DECODE])
def test_prompts_of_several_nodes_are_faster_together_where_calls_cost_much(beside, monkeypatch):
    """As on GPUs, where a call reads the weights of all experts: 400 us, and 0.2 us a row."""
    flood = Case("dear calls", beside, (Node(512, 2.5e-3, 3),) * 4, call=400e-6, row=0.2e-6, period=0.5)
    together = run(flood)["prompt_tok_s"]
    monkeypatch.setattr(WaitingPrompts, "sharing", one_message)
    assert together > 1.4 * run(flood)["prompt_tok_s"]
