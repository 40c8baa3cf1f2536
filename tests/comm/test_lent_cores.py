"""Two nodes of a host lend each other their cores while they wait: who is woken, by whom, and that no bit changes."""

import threading
import time

import pytest
import torch

from afserve.comm.mailbox.flags import BellWord, LaneWords, open_board
from afserve.comm.native import native_library
from afserve.kernels.ops import open_ops

pytestmark = pytest.mark.skipif(native_library() is None, reason="the native library is not built")
LINE = 64
HERE, THERE = 2048, 2048 + LINE  # lines of two nodes: bell, sleepers, and the loan behind them


class Pair:
    """Boards of two ends over one lane; each lends its core to the other."""

    def __init__(self) -> None:
        self.memory_B = torch.zeros(4096, dtype=torch.uint8)
        self.here = open_board([LaneWords(self.memory_B, 0, 64, THERE)], [BellWord(self.memory_B, HERE)])
        self.there = open_board([LaneWords(self.memory_B, 64, 0, HERE)], [BellWord(self.memory_B, THERE)])
        base = self.memory_B.data_ptr()
        self.here.lend(base + HERE, base + THERE)
        self.there.lend(base + THERE, base + HERE)


def long_product(ops, rows=64):
    """Tens of tasks, each long enough for a guest to take some."""
    generator = torch.Generator().manual_seed(3)
    packed = ops.pack_linear(torch.randn(4096, 256, generator=generator).bfloat16())
    return torch.randn(rows, 256, generator=generator).bfloat16(), packed


def test_a_waiting_core_computes_for_the_other_node_and_no_bit_changes():
    pair, alone, ops = Pair(), open_ops("cpu", 1), open_ops("cpu", 1)
    assert ops.borrow_core(pair.memory_B, THERE)
    engine = ops._backend._engine
    x, packed = long_product(ops)
    expected = alone.linear(*long_product(alone))
    found = []
    waiter = threading.Thread(target=lambda: found.append(pair.there.wait([0], 60.0)))
    waiter.start()
    deadline = time.monotonic() + 50.0
    while not engine.borrowed and time.monotonic() < deadline:
        assert torch.equal(ops.linear(x, packed), expected)
    assert engine.borrowed > 0, "the core that waited took no task"
    pair.here.post(0, 1)
    waiter.join(30.0)
    assert found == [[0]]


def test_a_core_that_is_not_lent_takes_no_task():
    pair, ops = Pair(), open_ops("cpu", 1)
    assert ops.borrow_core(pair.memory_B, THERE)
    x, packed = long_product(ops)
    for _ in range(20):
        ops.linear(x, packed)
    assert ops._backend._engine.borrowed == 0


def test_no_message_is_missed_while_cores_change_hands():
    """Both ends compute and wait in turns, with pauses of many lengths; every wait but the last is answered."""
    pair, turns, late = Pair(), 200, []

    def node(board, line, first):
        ops = open_ops("cpu", 1)
        assert ops.borrow_core(pair.memory_B, line)
        x, packed = long_product(ops, rows=1)
        expected = ops.linear(x, packed)
        for turn in range(1, turns + 1):
            if not first:
                if board.wait([0], 20.0) != [0]:
                    late.append(turn)
                    return
                board.settle(0, turn)
            for _ in range(turn % 7):
                assert torch.equal(ops.linear(x, packed), expected)
            if turn % 50 == 0:
                time.sleep(0.02)  # long enough for the guest to fall asleep
            board.post(0, turn)
            if first:
                if board.wait([0], 20.0) != [0]:
                    late.append(turn)
                    return
                board.settle(0, turn)

    ends = [
        threading.Thread(target=node, args=(pair.here, THERE, True)),
        threading.Thread(target=node, args=(pair.there, HERE, False)),
    ]
    for end in ends:
        end.start()
    for end in ends:
        end.join(120.0)
    assert not late
    assert not any(end.is_alive() for end in ends)


def test_a_borrowed_core_is_exchanged_for_another():
    pair, ops = Pair(), open_ops("cpu", 1)
    other = Pair()
    assert ops.borrow_core(pair.memory_B, THERE)
    assert ops.borrow_core(other.memory_B, THERE)
    x, packed = long_product(ops)
    waiter = threading.Thread(target=lambda: other.there.wait([0], 60.0))
    waiter.start()
    deadline = time.monotonic() + 50.0
    while not ops._backend._engine.borrowed and time.monotonic() < deadline:
        ops.linear(x, packed)
    other.here.post(0, 1)
    waiter.join(30.0)
    assert ops._backend._engine.borrowed > 0


def test_an_end_with_two_bells_lends_nothing():
    memory_B = torch.zeros(4096, dtype=torch.uint8)
    bells = [BellWord(memory_B, HERE), BellWord(memory_B, THERE)]
    board = open_board([LaneWords(memory_B, 0, 64, 2304)], bells)
    with pytest.raises(ValueError, match="one bell"):
        board.lend(memory_B.data_ptr() + HERE, memory_B.data_ptr() + 2304)


def test_the_plain_backend_borrows_nothing():
    assert not open_ops("cpu", 1, "torch").borrow_core(torch.zeros(128, dtype=torch.uint8), 0)
