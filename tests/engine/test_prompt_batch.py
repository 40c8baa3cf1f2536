"""Pieces between experts: the same bits as one call, each expert read once, decode first, and nothing kept of a node
that left."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from afserve.comm.m2n.bank import Bank
from afserve.comm.m2n.port import Arrival
from afserve.comm.transport import Box, Header, Kind, WireType
from afserve.engine.pieces import OVERHEAD, PIECE_SECONDS, PieceSize
from afserve.engine.prompt_batch import BatchedPrompt, PromptBatch, WaitingPrompts
from afserve.kernels.ops import open_ops
from bench.phases import FEW, READING, SLOW, Case, OfRows, run
from tests.engine.test_expert_node import Rig, TimedBank, one_message
from tests.kernels.packing import pack_experts

SLOTS, TOP_K, HIDDEN, INNER = 6, 3, 96, 64
CALL, READ, ROW = 10e-6, 150e-6, 4e-6  # seconds


class Experts(Bank):
    """A bank of one layer with real kernels."""

    def __init__(self, backend, dtype):
        draw = torch.Generator().manual_seed(3)
        gate_up = torch.randn(SLOTS, 2 * INNER, HIDDEN, generator=draw).to(dtype)
        down = torch.randn(SLOTS, HIDDEN, INNER, generator=draw).to(dtype)
        self.ops = open_ops(backend=backend)
        self.weights = pack_experts(self.ops, gate_up, down)

    def forward(self, layer, x_RH, slot_RK, weight_RK, out_RH, add=False):
        self.ops.expert_ffn(x_RH, slot_RK, weight_RK, self.weights, out_RH, add)


def prompt(rows, seed, reply, dtype, done=0):
    draw = torch.Generator().manual_seed(seed)
    chance = torch.rand(rows, SLOTS, generator=draw)
    slot = chance.topk(TOP_K).indices.int().where(chance.topk(TOP_K).values > 0.6, -1)
    x = torch.randn(rows, HIDDEN, generator=draw).to(dtype)
    header = Header(Kind.DISPATCH, 0, 0, 0, rows, WireType.BFLOAT16)
    arrival = Arrival(Box(seed, 0, 0), header, x, slot, torch.rand(rows, TOP_K, generator=draw))
    return BatchedPrompt(arrival, torch.full((rows, HIDDEN), float("nan"), dtype=reply), done)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    ("dtype", "reply"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
)
def test_bits_are_those_of_one_call(backend, dtype, reply):
    """For all rows; of the native kernels also for each message, whose rows they compute alike whoever is beside them.
    PyTorch multiplies few rows of float32 another way than many on some CPUs."""
    bank = Experts(backend, dtype)
    for slots in (1, 2, SLOTS):
        prompts = [prompt(40, 1, reply, dtype, done=7), prompt(33, 2, reply, dtype)]
        batch = PromptBatch(prompts)
        assert batch.rows == 66
        batch.cut(50)
        while batch.left:
            batch.compute(bank, min(slots, len(batch.left)))
        batch.finish()
        assert [one.done for one in prompts] == [40, 17]
        parts = [(one.arrival, rows) for one, rows in zip(prompts, (slice(7, 40), slice(0, 17)), strict=True)]
        told_RH = torch.cat([one.reply_RH[rows] for one, (_, rows) in zip(prompts, parts, strict=True)])
        calls = [parts] if backend == "torch" else [parts, parts[:1], parts[1:]]
        for call, start in zip(calls, (0, 0, 33), strict=False):
            x_RH = torch.cat([arrival.x_RH[rows] for arrival, rows in call])
            slot_RK = torch.cat([arrival.slot_RK[rows] for arrival, rows in call])
            weight_RK = torch.cat([arrival.weight_RK[rows] for arrival, rows in call])
            whole_RH = torch.empty(x_RH.shape, dtype=reply)
            bank.forward(0, x_RH, slot_RK, weight_RK, whole_RH)
            assert torch.equal(told_RH[start : start + len(x_RH)], whole_RH)
        for one, (_, rows) in zip(prompts, parts, strict=True):
            untouched = len(one.reply_RH) - (rows.stop - rows.start)
            assert one.reply_RH.isnan().any(1).sum() == untouched, "no other rows"


def test_rows_that_chose_no_expert_here_are_zero():
    one = prompt(20, 1, torch.float32, torch.float32)
    one.arrival.slot_RK.fill_(-1)
    batch = PromptBatch([one])
    assert not batch.pairs and PieceSize().batch(20, batch.pairs) == 20
    batch.compute(Experts("torch", torch.float32), 0)
    batch.finish()
    assert not one.reply_RH.any() and not one.left


def learnt_size(call):
    size = PieceSize()
    for rows in (16, 64, 200):
        size.ran(rows, call + rows * ROW)
    return size


def test_experts_are_cut_where_a_call_costs_more_than_a_piece_of_rows_bears():
    bound = PIECE_SECONDS / (1 + 1 / OVERHEAD)
    assert not PieceSize().whole_experts and not learnt_size(0.9 * bound).whole_experts
    assert learnt_size(1.1 * bound).whole_experts


@given(st.lists(st.integers(0, 400), min_size=1, max_size=40), st.none() | st.floats(0, 1))
def test_pieces_of_experts_take_all_of_them_once_and_are_no_longer_than_asked(pairs, quiet):
    size = learnt_size(1e-3)
    rows = max(1, sum(pairs) // 2)
    seconds = size.by_expert(rows, pairs)
    assert sum(seconds) == pytest.approx((1e-3 + rows * ROW) if any(pairs) else 0.0)
    while seconds:
        taken = size.experts(seconds, quiet)
        piece, seconds = seconds[:taken], seconds[taken:]
        assert taken and (sum(piece) <= 2 * PIECE_SECONDS or sum(map(bool, piece)) == 1)
        assert any(piece) or not any(pairs), "no piece without work"


def test_so_many_rows_that_the_fullest_expert_is_a_piece():
    size = learnt_size(1e-3)
    even = [10] * 20
    assert size.by_expert(size.batch(10**6, even), even)[0] == pytest.approx(
        1e-3 / 20 / OVERHEAD * 1.2, rel=0.1
    )
    assert size.batch(10**6, [*even, 1000]) < size.batch(10**6, even) / 5
    assert size.batch(30, even) == 30
    assert size.batch(10**6, [7]) == size.rows(10**6), "of one expert, as pieces of rows"


class ReadingBank(TimedBank):
    """A call costs something, each row does, and each expert that is read."""

    def forward(self, layer, x_RH, slot_RK, weight_RK, out_RH, add=False):
        used = slot_RK >= 0
        self.read = sorted(set(slot_RK[used].tolist()))
        self.seconds = CALL + READ * len(self.read) + ROW * float(used.sum()) / slot_RK.shape[1]
        self.calls.append((layer, len(x_RH), self.read))
        self.clock.advance(self.seconds)
        part_RH = x_RH * used.sum(1, keepdim=True)
        out_RH.copy_(out_RH + part_RH if add else part_RH)


def rig():
    """Node 2 decodes; what calls cost is known."""
    made = Rig(attention=3, longest_hold=0.0, bank=ReadingBank)
    for turn in range(9):
        decode(made, rows=1 + 5 * (turn % 3))
    made.bank.calls.clear()
    assert made.node._pieces.sizes.whole_experts
    return made


def decode(made, layer=2, rows=2):
    ticket = made.send(2, layer, rows=rows)
    made.node.poll()
    made.take(2, ticket, layer)


def test_decode_comes_first_at_every_expert_and_each_is_read_once():
    made = rig()
    chunk = made.send(0, 1, rows=150)
    while not made.links[0].ready(chunk):
        began = made.clock.now()
        decode(made)
        order = made.bank.calls[-2:]
        assert order[0][0] == 2, "decode first"
        assert made.clock.now() - began <= 2 * CALL + 3 * READ + (2 + 75) * ROW + 1e-9
    made.take(0, chunk, 1)
    pieces = [call[1:] for call in made.bank.calls if call[0] == 1]
    assert pieces == [(150, [0]), (150, [3])]
    stats = made.node.stats()
    assert stats.prompt_pieces == 2 and stats.rows == 9 * 6 + 2 * 2 + 150 and not made.node._prompts


def test_the_rest_is_one_call_where_nobody_decodes_any_more():
    made = rig()
    chunk = made.send(0, 1, rows=150)
    made.node.poll()
    made.clock.advance(1.0)
    made.node.poll()
    made.take(0, chunk, 1)
    assert [read for layer, _, read in made.bank.calls if layer == 1] == [[0], [3]]


def test_messages_of_a_batch_whose_other_node_leaves_are_computed_again():
    made = rig()
    made.send(0, 1, rows=150)
    other = made.send(1, 1, rows=140)
    made.node.poll()
    assert made.node._prompts.batch is not None and len(made.node._prompts.batch.prompts) == 2
    made.links[0].close()
    for _ in range(3):
        made.node.wait(0.0)
    assert made.node._prompts.batch is None
    while not made.links[1].ready(other):
        made.node.poll()
    made.take(1, other, 1)
    assert not made.node._prompts


def test_a_newer_dispatch_replaces_one_of_which_some_experts_are_done():
    made = rig()
    made.send(0, 1, rows=150)
    made.node.poll()
    assert made.node._prompts.batch is not None
    ticket = made.send(0, 3, rows=130)
    while not made.links[0].ready(ticket):
        made.node.poll()
    made.take(0, ticket, 3)
    assert not made.node._prompts and made.node._prompts.batch is None


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_decoding_waits_less_than_with_pieces_of_rows_and_prompts_do_not_pay(nodes):
    flood = Case("reading", FEW, SLOW * nodes, period=0.3, **READING)
    alone, ours = run(Case("alone", FEW, period=0.3, **READING)), run(flood)
    of_rows = run(Case("rows", FEW, SLOW * nodes, period=0.3, cut=OfRows, **READING))
    assert ours["token_p99_ms"] <= 1.08 * alone["token_p99_ms"]
    assert of_rows["token_p99_ms"] >= 1.2 * alone["token_p99_ms"]
    assert ours["prompt_tok_s"] >= of_rows["prompt_tok_s"]


@pytest.mark.slow
def test_prompts_of_several_nodes_share_each_read_of_an_expert_and_decoding_does_not_pay(monkeypatch):
    """Although the rows of one message are enough for a call."""
    flood = Case("reading", FEW, SLOW * 3, period=0.5, **READING)
    together = run(flood)
    monkeypatch.setattr(WaitingPrompts, "sharing", one_message)
    apart = run(flood)
    assert together["prompt_tok_s"] > 1.1 * apart["prompt_tok_s"]
    assert together["token_p99_ms"] < 1.02 * apart["token_p99_ms"]
