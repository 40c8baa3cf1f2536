"""Flag words, native and plain: what changed, waking up from another thread, time limits, numbers that wrap."""

import threading
import time

import pytest
import torch

from afserve.comm.mailbox import flags
from afserve.comm.mailbox.flags import BellWord, LaneWords, PlainBoard, open_board
from afserve.comm.mailbox.segment import Segment, SegmentMap
from afserve.comm.native import native_library
from afserve.comm.transport import Box, Kind
from afserve.comm.transports.local import LocalTransport
from afserve.errors import ConfigError
from tests.comm.conformance import LAYOUT, answer, arrive, send

BOARDS = [PlainBoard, open_board]


def two_ends(make, lanes=3, **options):
    """Boards of two ends over the same words; the second hears two bells, as an attention node of two segments.

    Boards use the memory without owning it, as their transports do: it is returned to be kept.
    """
    memory_B = torch.zeros(4096, dtype=torch.uint8)
    there = [LaneWords(memory_B, 128 * n, 128 * n + 64, 2048) for n in range(lanes)]
    bells = (2112, 2176)
    back = [LaneWords(memory_B, 128 * n + 64, 128 * n, bells[n % 2]) for n in range(lanes)]
    here = make(there, [BellWord(memory_B, bell) for bell in bells], **options)
    return here, make(back, [BellWord(memory_B, 2048)], **options), memory_B


@pytest.mark.parametrize("make", BOARDS)
def test_what_changed(make):
    here, other, _memory = two_ends(make)
    assert here.changed([0, 1, 2]) == []
    other.post(1, 7)
    assert here.changed([0, 1, 2]) == [1]
    assert here.changed([0, 2]) == []
    assert here.value(1) == 7
    here.settle(1, 7)
    assert here.changed([0, 1, 2]) == []
    other.post(1, (1 << 32) - 1)
    assert here.wait([1], 1.0) == [1]
    assert here.value(1) == (1 << 32) - 1


@pytest.mark.parametrize("make", BOARDS)
@pytest.mark.parametrize("spins", [True, False])
@pytest.mark.parametrize("lane", [0, 1, 2])
def test_a_sleeper_is_woken_through_either_bell(make, spins, lane):
    """Many turns with pauses of many lengths, so that the post falls before, into and after the spin."""
    here, other, _memory = two_ends(make, spins=spins)
    turns = 60

    def answer_all():
        for turn in range(1, turns + 1):
            while other.wait([lane], 5.0) == []:
                pass
            other.settle(lane, turn)
            time.sleep((turn % 7) * 1e-4)
            other.post(lane, turn)

    thread = threading.Thread(target=answer_all)
    thread.start()
    for turn in range(1, turns + 1):
        here.post(lane, turn)
        began = time.monotonic()
        while here.wait([0, 1, 2], 5.0) == []:
            assert time.monotonic() - began < 60, "a lost wake-up"
        assert here.changed([0, 1, 2]) == [lane]
        here.settle(lane, turn)
    thread.join()


@pytest.mark.parametrize("make", BOARDS)
def test_a_wait_ends_in_time(make):
    here, _, _memory = two_ends(make)
    began = time.monotonic()
    assert here.wait([0, 1], 0.05) == []
    assert 0.04 < time.monotonic() - began < 30
    assert here.wait([0], 0.0) == []


def test_other_bells_do_not_end_a_wait():
    here, other, _memory = two_ends(open_board)
    thread = threading.Thread(target=lambda: [other.post(2, n) for n in range(1, 50)])
    thread.start()
    assert here.wait([0], 0.05) == []
    thread.join()
    assert here.changed([0, 1, 2]) == [2]


def test_a_processor_that_reorders_stores_needs_the_native_library(monkeypatch):
    monkeypatch.setattr(flags, "native_library", lambda: None)
    monkeypatch.setattr(flags.platform, "machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match=r"needs the native library.*install a C\+\+ compiler.*or use"):
        open_board([], [])


def test_unaligned_and_null_words_are_refused():
    native = native_library()
    if native is None:
        pytest.skip("the native library is not built")
    for address in (0, 4097):
        with pytest.raises(ValueError, match="aligned address"):
            native.FlagBoard([(address, 64, 128)], [])


@pytest.mark.parametrize("start", [(1 << 32) - 3, (1 << 32) - 1, 0])
def test_sequence_numbers_wrap(start):
    segment = Segment.private(SegmentMap(LAYOUT, 0, 1))
    box = Box(0, 0, 1)
    for kind in (Kind.DISPATCH, Kind.COMBINE):
        segment.set_word(box, kind, start)
    expert, attention = LocalTransport([segment], None), LocalTransport([segment], 0)
    for turn in range(6):
        sent = send(attention, box, turn, 2)
        assert sent.header.sequence == (start + 1 + turn) % (1 << 32)
        answer(expert, box, arrive(expert, box).header, turn)
        assert arrive(attention, box).header.sequence == sent.header.sequence
    send(attention, box, 1, 2)
    old = arrive(expert, box)
    send(attention, box, 2, 2)
    answer(expert, box, old.header, 3)
    assert attention.ready([box]) == []
