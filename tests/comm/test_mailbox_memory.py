"""Memory of mailboxes: only addresses are reserved for those that nobody uses, and what large messages leave is given
back once it is more than may stay."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from afserve.comm.mailbox import lanes
from afserve.comm.mailbox.segment import PAGE, Segment, SegmentMap, unused_bytes
from afserve.comm.transport import Box, Kind
from afserve.comm.transports import connect
from tests.comm.conformance import LAYOUT, PATIENCE, answer, arrive, content, send

WIDE = replace(LAYOUT, hidden=PAGE // 4, max_rows=64)
BOX = Box(1, 0, 1)
KINDS = ("local", "shm", "tcp", *(["dist"] if "dist" in connect.kinds() else []))


@pytest.fixture
def pair(request):
    """An expert node and attention-1 of two."""
    end, address = connect.listen(request.param, expert=0, attention_nodes=2, layout=WIDE)
    front = connect.connect([address], attention=1, layout=WIDE, timeout=PATIENCE)
    yield front, end
    front.close()
    end.close()


def exchange(front, end, rows, seed=1):
    sent = send(front, BOX, seed, rows)
    got = arrive(end, BOX)
    assert got.header == sent.header and (got.x_RH == sent.x_RH).all()
    answer(end, BOX, got.header, seed + 1)
    assert (arrive(front, BOX).x_RH == content(seed + 1, rows, WIDE.hidden)).all()


def behind(end, kind, rows):
    """What lies in a mailbox behind a message of `rows` rows, up to the end of its pages."""
    lane = end._lanes._lanes[BOX]
    found = lane.incoming if lane.incoming.frame.kind is kind else lane.out
    return int(found.memory_B[-(-found.frame.span(rows).end // PAGE) * PAGE :].count_nonzero())


@pytest.mark.skipif(
    Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2", reason="this machine counts addresses"
)
def test_more_is_reserved_than_the_machine_has():
    memory_B = unused_bytes(1 << 40)
    memory_B[-1] = 7
    assert int(memory_B[-1]) == 7 and not memory_B[1 << 39]


def test_an_attention_node_between_hosts_keeps_its_own_mailboxes_only():
    own, every = SegmentMap(WIDE, 0, 1, 999), SegmentMap(WIDE, 0, 1000)
    assert list(own.boxes()) == list(every.boxes(999)) and own.total_bytes < every.total_bytes / 500
    segment = Segment.private(own, 999, turn=3)
    for box in own.boxes():
        for kind in Kind:
            assert own.mailbox(box, kind) + segment.mailbox(box, kind).memory_B.numel() <= own.total_bytes
            assert segment.word(box, kind)
    segment.claim(999, 1)
    assert segment.pid(999) == 1 and segment.pid(None) == 0


@pytest.mark.parametrize("pair", KINDS, indirect=True)
def test_pages_stay_while_there_are_few(pair):
    for rows in (64, 3, 64):
        exchange(*pair, rows)
    front, end = pair
    exchange(front, end, 3)
    assert behind(end, Kind.DISPATCH, 3) and behind(end, Kind.COMBINE, 3)
    assert 64 * WIDE.hidden * 8 <= end._lanes.kept < 64 * WIDE.hidden * 8 + 8 * PAGE


@pytest.mark.slow
@pytest.mark.parametrize("pair", KINDS, indirect=True)
def test_what_is_too_much_is_given_back_with_the_next_message(pair, monkeypatch):
    monkeypatch.setattr(lanes, "KEPT_BYTES", 0)
    front, end = pair
    exchange(front, end, 64)
    exchange(front, end, 3)
    assert not behind(end, Kind.DISPATCH, 3) and not behind(end, Kind.COMBINE, 3)
    assert end._lanes.kept < 3 * WIDE.hidden * 8 + 2 * PAGE
    for rows in (0, 1, 64, 17, 64):
        exchange(front, end, rows, seed=rows)


@pytest.mark.parametrize("pair", KINDS[2:], indirect=True)
def test_so_does_an_attention_node_with_its_own_memory(pair, monkeypatch):
    monkeypatch.setattr(lanes, "KEPT_BYTES", 0)
    front, end = pair
    exchange(front, end, 64)
    assert behind(front, Kind.COMBINE, 3)
    exchange(front, end, 3)
    assert not behind(front, Kind.DISPATCH, 3) and not behind(front, Kind.COMBINE, 3)


@pytest.mark.parametrize("pair", ["shm"], indirect=True)
def test_shared_pages_really_go(pair, monkeypatch):
    monkeypatch.setattr(lanes, "KEPT_BYTES", 0)
    front, end = pair

    def there():
        return 512 * os.fstat(end._fd).st_blocks

    before = there()
    exchange(front, end, 64)
    assert there() - before >= 64 * WIDE.hidden * 8
    exchange(front, end, 3)
    assert there() - before <= 3 * WIDE.hidden * 8 + 4 * PAGE


@pytest.mark.slow
@pytest.mark.parametrize("pair", KINDS, indirect=True)
def test_behind_the_limit_of_its_attention_node_nothing_stays(pair):
    front, end = pair
    exchange(front, end, 64)
    end.limit(0, 1)  # another node's
    exchange(front, end, 3)
    assert behind(end, Kind.DISPATCH, 10)
    end.limit(1, 10)
    exchange(front, end, 3)
    assert behind(end, Kind.DISPATCH, 3), "up to the limit it stays"
    assert not behind(end, Kind.DISPATCH, 10) and not behind(end, Kind.COMBINE, 10)
    exchange(front, end, 64)  # it was under way as the limit came
    exchange(front, end, 3)
    assert not behind(end, Kind.DISPATCH, 10)
    assert end._lanes.kept < 10 * WIDE.hidden * 8 + 2 * PAGE


@pytest.mark.parametrize("pair", ["tcp"], indirect=True)
def test_a_limit_holds_for_an_expert_node_that_comes_later(pair):
    front, _ = pair
    front.limit(1, 10)
    other, address = connect.listen("tcp", expert=1, attention_nodes=2, layout=WIDE)
    front.attach(front.dial(1, address, 10.0))
    assert {lane.most for lane in front._lanes._by_index} == {10}
    other.close()
