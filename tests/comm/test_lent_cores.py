"""Two nodes of a host lend each other their cores while they wait: who is woken, by whom, and that no bit changes."""

import os
import signal
import threading
import time
import weakref

import psutil
import pytest
import torch

from afserve.comm.mailbox.flags import BellWord, LaneWords, open_board
from afserve.comm.mailbox.segment import Segment, SegmentMap
from afserve.comm.native import native_library
from afserve.comm.transport import Layout, WireType
from afserve.kernels.ops import open_ops
from tests.warm.interpreter import WARM

pytestmark = pytest.mark.skipif(native_library() is None, reason="the native library is not built")
LINE = 64
GUEST = 2  # of a loan's first word: kernels/native/lent_core.h
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


@pytest.mark.slow
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


@pytest.fixture
def shared_B(tmp_path):
    """A page that other processes map by the name of its file."""
    path = tmp_path / "page"
    path.write_bytes(bytes(4096))
    return path, torch.from_file(str(path), shared=True, size=4096, dtype=torch.uint8)


def started(page, *words):
    with open(os.devnull, "wb") as nothing:
        return WARM.run(["tests.comm.lent_ends", str(page), *map(str, words)], nothing)


def until(happened, seconds=100.0):
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.alone
@pytest.mark.process
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lender_that_dies_or_stops_holds_nobody_up(shared_B, how):
    """Its core is still lent then: the guest goes on there, and what it took is done."""
    path, memory_B = shared_B
    alone, ops = open_ops("cpu", 1), open_ops("cpu", 1)
    x, packed = long_product(ops)
    expected = alone.linear(*long_product(alone))
    board = open_board([LaneWords(memory_B, 0, 64, THERE)], [BellWord(memory_B, HERE)])
    board.lend(memory_B.data_ptr() + HERE, memory_B.data_ptr() + THERE)
    lender = started(path, "lend", HERE, THERE)
    try:
        assert ops.borrow_core(memory_B, THERE)
        until(lambda: torch.equal(ops.linear(x, packed), expected) and ops._backend._engine.borrowed)
        os.kill(lender.pid, how)
        before = time.monotonic()
        for _ in range(100):
            assert torch.equal(ops.linear(x, packed), expected)
        board.post(0, 1)
        assert board.wait([0], 0.2) == []
        assert ops.borrow_core(None), "it stops to wait for that core"
        assert torch.equal(ops.linear(x, packed), expected)
        assert time.monotonic() - before < 60.0
        if how == signal.SIGSTOP:
            os.kill(lender.pid, signal.SIGCONT)
            assert lender.wait(100.0) == 0, "it goes on where it was, and sees the message"
    finally:
        lender.kill()
        lender.wait(10.0)


@pytest.mark.alone
@pytest.mark.process
def test_a_guest_that_dies_keeps_its_lender_no_longer_than_a_look(shared_B):
    """Its lender is not woken by whoever rings, looks by itself as a transport does, and lends to the next one."""
    path, memory_B = shared_B
    loan_W = memory_B.view(torch.int32)[THERE // 4 + 4 :]
    here = open_board([LaneWords(memory_B, 0, 64, THERE)], [BellWord(memory_B, HERE)])
    there = open_board([LaneWords(memory_B, 64, 0, HERE)], [BellWord(memory_B, THERE)])
    for board, own, peer in ((here, HERE, THERE), (there, THERE, HERE)):
        board.lend(memory_B.data_ptr() + own, memory_B.data_ptr() + peer)
    found, looks = [], []

    def look():
        while not found and len(looks) < 1200:
            looks.append(found.extend(there.wait([0], 0.1)))

    waiter = threading.Thread(target=look)
    borrower = started(path, "borrow", THERE)
    waiter.start()
    try:
        until(lambda: stopped_as_a_guest(borrower, loan_W))
        borrower.kill()
        borrower.wait(10.0)
        ops = open_ops("cpu", 1)
        x, packed = long_product(ops)
        assert ops.borrow_core(memory_B, THERE)
        until(lambda: ops.linear(x, packed) is not None and ops._backend._engine.borrowed)
    finally:
        borrower.kill()
        borrower.wait(10.0)
        here.post(0, 1)
        waiter.join(150.0)
    assert found == [0]


def stopped_as_a_guest(borrower, loan_W):
    """Stops it; where it was not on the lent core it goes on."""
    os.kill(borrower.pid, signal.SIGSTOP)
    until(lambda: psutil.Process(borrower.pid).status() == psutil.STATUS_STOPPED)
    if int(loan_W[0]) == GUEST:
        return True
    os.kill(borrower.pid, signal.SIGCONT)
    time.sleep(0.002)
    return False


def test_whoever_takes_the_place_of_a_dead_guest_finds_nothing_of_it():
    segment = Segment.private(SegmentMap(Layout(64, 2, 8, 1, 2, 4, WireType.FLOAT32, WireType.FLOAT32), 0, 2))
    loan_W = segment.memory_B.view(torch.int32)[segment.bell(None).offset // 4 + 4 :][:4]
    loan_W.copy_(torch.tensor([GUEST, 1, 7, 1]))
    segment.claim(1, 1)
    assert loan_W.tolist() == [GUEST, 1, 7, 1], "only the first attention node computes there"
    segment.claim(0, 1)
    assert (int(loan_W[0]), int(loan_W[3])) == (0, 0)


def test_the_memory_of_a_core_is_kept_while_it_is_borrowed_and_no_longer():
    memory_B, other_B, ops = (
        torch.zeros(4096, dtype=torch.uint8),
        torch.zeros(4096, dtype=torch.uint8),
        open_ops("cpu", 1),
    )
    first, second = weakref.ref(memory_B), weakref.ref(other_B)
    assert ops.borrow_core(memory_B, THERE)
    del memory_B
    assert first() is not None
    assert ops.borrow_core(other_B, THERE)
    del other_B
    assert first() is None and second() is not None
    assert ops.borrow_core(None)
    assert second() is None and ops._backend._engine.threads == 1


def test_the_plain_backend_borrows_nothing():
    assert not open_ops("cpu", 1, "torch").borrow_core(torch.zeros(128, dtype=torch.uint8), 0)
