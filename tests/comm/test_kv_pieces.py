"""How large pieces are, and the one answer that each gets."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from afserve.comm.kv.lender import Lender
from afserve.comm.kv.messages import Ack, Fetched, Piece, Want
from afserve.comm.kv.puller import Instead, Puller
from afserve.comm.kv.rooms import NOWHERE, SLOTS, Room, share
from afserve.comm.kv.stream import PeerStream, parts_of
from tests.comm.kv_world import BLOCK, Store, chain


class Wires:
    def __init__(self) -> None:
        self.sent, self.left = [], []

    def send(self, peer, message):
        self.sent.append(message)

    def has_room(self, peer):
        return True

    def apart(self, peer):
        self.left.append(peer)

    def takes_large(self, peer):
        return peer == 1

    def room(self, peer, size):
        return Room(memoryview(bytearray(size)))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr("afserve.comm.kv.messages.PIECE_BYTES", 6 * BLOCK)
    monkeypatch.setattr("afserve.comm.kv.lender._LEAST_BYTES", BLOCK)


@pytest.mark.parametrize(
    ("peer", "idle", "counts"),
    [
        (1, True, [1, 2, 4, 8, 12, 12, 1]),
        (1, False, [1, 2, 4, *[6] * 5, 3]),
        (2, True, [1, 2, 4, *[6] * 5, 3]),
    ],
)
def test_pieces_grow_and_are_large_only_for_who_takes_them_from_who_is_idle(peer, idle, counts):
    store, wires = Store(60), Wires()
    lender, names = Lender(store, wires), chain(1, 40)
    store.compute(names)
    lender.heard(peer, Want(7, 0, 0, tuple(names)), 0.0)
    while lender.send(large=idle):
        pass
    pieces = [message for message in wires.sent if isinstance(message, Piece)]
    assert [piece.count for piece in pieces] == counts
    assert [piece.first for piece in pieces] == [sum(counts[:at]) for at in range(len(counts))]
    for piece in pieces:
        lender.heard(peer, Ack(7, piece.first, piece.count), 0.0)
    assert not lender.busy and not +store.held


@pytest.mark.parametrize(("blocks", "left"), [(3, []), (4, [1])])
def test_a_lender_leaves_the_other_ends_core_for_what_takes_long(monkeypatch, blocks, left):
    monkeypatch.setattr("afserve.comm.kv.lender._MUCH_BYTES", 4 * BLOCK)
    store, wires = Store(60), Wires()
    store.compute(chain(1, blocks))
    Lender(store, wires).heard(1, Want(7, 0, 0, tuple(chain(1, 9))), 0.0)
    assert wires.left == left


@pytest.fixture
def streams():
    """Two ends in a host that have given each other memory."""
    sockets, size = socket.socketpair(), 4096
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(share, sockets[1], size)
        slots = [share(sockets[0], size), theirs.result()]
    made = [PeerStream(1, one, (BLOCK, size), *found) for one, found in zip(sockets, slots, strict=True)]
    yield made
    for stream in made:
        stream.close()


def _placed(here, blocks, number):
    room = here.room(blocks * BLOCK)
    room.view[:] = bytes([number]) * len(room.view)
    here.write(parts_of(Piece(number, 0, blocks, number, room.view, room.slot)))


def test_a_slot_comes_back_with_the_acknowledgement_and_only_once(streams):
    here, there = streams
    for number in range(1, 3 * SLOTS):
        _placed(here, 3, number)
        (piece,) = there.read()
        ack = Ack(piece.transfer, piece.first, piece.count, piece.slot)
        there.answered(ack)
        assert there.used(piece) is None and piece.slot != NOWHERE
        there.write(parts_of(ack))
        assert here.read() == [ack]
        assert not here.fetched(ack)  # the lender hears of it too
        assert len({here.room(1).slot for _ in range(SLOTS)}) == SLOTS and not here.has_room
        for slot in range(SLOTS):
            here.fetched(Ack(0, 0, 0, slot * 4096))


def test_a_piece_that_is_not_acknowledged_gives_its_slot_back_too(streams):
    here, there = streams
    _placed(here, 2, 1)
    (piece,) = there.read()
    assert there.used(piece) == Fetched(1, piece.slot) and there.used(piece) is None
    assert here.fetched(Fetched(1, piece.slot)) and here.has_room


def test_a_puller_says_both_in_one_message():
    store, said = Store(20), []
    puller, names = Puller(store, lambda peer, message: said.append(message)), chain(1, 3)
    transfer = puller.start(1, names, 0.0, 1.0)
    source = Store(20)
    source.compute(names)
    payload = memoryview(bytearray(3 * BLOCK))
    checksum = source.take(source.find(names), names, payload)
    puller.heard(1, Piece(transfer, 0, 3, checksum, payload, 8192), 0.0)
    assert said[-1] == Ack(transfer, 0, 3, 8192) and puller.ended[0].complete


@pytest.mark.parametrize(
    ("instead", "came", "ends"),
    [
        (Instead(2.0, 0.2), [], 0.2),
        (
            Instead(2.0, 0.2),
            [0.18],
            0.68,
        ),  # then two thirds of both are left
        (Instead(2.0, 0.2), [0.18, 0.6], 1.34),
        (Instead(2.0, 0.2), [0.18, 0.6, 1.2], 1.2),  # all
        (Instead(0.1, 0.9), [0.18, 0.6], 0.9),  # nobody looks before
        (None, [0.18, 0.6, 1.2], 1.2),  # nobody knows how long it takes
    ],
)
def test_what_comes_more_slowly_than_it_is_computed_is_given_up(instead, came, ends):
    """Three blocks, which come at these seconds."""
    source, store = Store(20), Store(20)
    puller, names = Puller(store, lambda peer, message: None), chain(1, 3)
    source.compute(names)
    transfer = puller.start(1, names, 0.0, 20.0, instead=instead)
    have = 0
    for hundredth in range(2, 200, 2):
        now = hundredth / 100
        while have < len(came) and came[have] <= now:
            payload, one = memoryview(bytearray(BLOCK)), names[have : have + 1]
            checksum = source.take(source.find(names)[have : have + 1], one, payload)
            puller.heard(1, Piece(transfer, have, 1, checksum, payload, 8192), now)
            have += 1
        puller.tick(now)
        if puller.ended:
            break
    assert (now, puller.ended[0].received) == (ends, len(came))
    assert puller.ended[0].complete == (len(came) == 3)
