"""Memory that two ends of a connection give each other: it is checked before it is mapped, and fixed."""

import fcntl
import mmap
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.comm.kv import rooms
from afserve.comm.kv.forms import encode
from afserve.comm.kv.messages import Ack, Piece, Placed
from afserve.comm.kv.rooms import BUFFERS, NOWHERE, SLOTS, Buffers, OwnSlots, PeerSlots, share, slot_bytes
from afserve.comm.kv.stream import PeerStream
from afserve.errors import ProtocolError, RendezvousError
from tests.comm.kv_world import BLOCK

SIZE = 8192


def shared(size=SIZE, there=SIZE):
    """What both ends of a Unix connection got; the first end's error is raised."""
    one, other = socket.socketpair()
    with one, other, ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(share, other, there)
        try:
            return share(one, size), theirs.result()
        finally:
            theirs.exception()


def test_what_one_end_writes_the_other_reads_and_cannot_write():
    (own, theirs), (other, view) = shared()
    room = own.take(5000)
    room.view[:] = b"a" * 5000
    assert view.piece(room.slot, 5000) == b"a" * 5000
    with pytest.raises(TypeError, match="read-only"):
        view.piece(room.slot, 5000)[0] = 1
    assert other.free and theirs.piece(0, 1) == b"\0"


def test_each_end_knows_where_the_other_runs():
    (own, theirs), (other, view) = shared()
    assert (view.core, theirs.core) == (-1, -1)
    own.tell_core(3)
    other.tell_core(7)
    assert (view.core, theirs.core) == (3, 7)
    assert view.piece((SLOTS - 1) * SIZE, SIZE) == bytes(SIZE)


def test_memory_of_another_size_is_refused_by_name():
    with pytest.raises(RendezvousError, match=r"the other end's memory has \d+ bytes and the seals"):
        shared(SIZE, 2 * SIZE)


def test_memory_that_can_shrink_is_refused_and_its_descriptor_closed():
    file = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, SLOTS * SIZE)
    with pytest.raises(RendezvousError, match="cannot shrink"):
        PeerSlots(file, SIZE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_own_memory_cannot_change_its_size():
    file = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    OwnSlots(file, SIZE)
    assert fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    with pytest.raises(PermissionError):
        os.ftruncate(file, 1)
    os.close(file)


def test_a_descriptor_that_was_lost_on_the_way_is_no_memory_to_send_by():
    """It would be said to whoever cannot look there."""
    one, other = socket.socketpair()
    with one, other:
        other.sendall(b"+")
        with pytest.raises(RendezvousError, match="did not come with its greeting"):
            share(one, SIZE)


def test_the_other_end_cannot_map_it_to_write():
    one, other = socket.socketpair()
    with one, other:
        other.sendall(b"-")
        own, _ = share(one, SIZE)
        _, files, _, _ = socket.recv_fds(other, 1, 1)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(files[0], SLOTS * SIZE)
        own.take(3).view[:] = b"own"
    finally:
        os.close(files[0])


def test_room_of_a_connection_that_has_ended_goes_nowhere():
    (own, _), (_, view) = shared()
    own.close()
    room = own.take(3)
    room.view[:] = b"xyz"
    assert room.slot == NOWHERE and view.piece(0, 3) == bytes(3)


def test_without_memory_pieces_go_in_messages(monkeypatch):
    monkeypatch.setattr(rooms, "_own", lambda size: (None, NOWHERE))
    assert shared() == ((None, None), (None, None))


@pytest.mark.parametrize(("at", "size"), [(1, 10), (-SIZE, 10), (SLOTS * SIZE, 10), (0, SIZE + 1)])
def test_places_are_checked(at, size):
    (_, theirs), _ = shared()
    with pytest.raises(ProtocolError, match=f"{size} bytes at {at}, slots have {SIZE}"):
        theirs.piece(at, size)


@given(st.lists(st.booleans(), max_size=60), st.booleans())
def test_no_room_is_out_twice(turns, slots):
    if slots:
        file = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        source = OwnSlots(file, SIZE)
        os.close(file)
    else:
        source = Buffers(SIZE)
    most = SLOTS if slots else BUFFERS
    out = []
    for number, takes in enumerate(turns):
        if takes and source.free:
            room = source.take(100)
            room.view[:4] = number.to_bytes(4, "little")
            out.append((room, number))
        elif out:
            room, number = out.pop(0)
            source.give_back(room)
            source.give_back(room) if slots else None
        assert all(room.view[:4] == number.to_bytes(4, "little") for room, number in out)
        assert len(out) <= most and source.free == (len(out) < most)


def test_memory_of_others_is_not_kept():
    buffers = Buffers(SIZE, 1)
    buffers.take(10)
    buffers.give_back(rooms.Room(memoryview(b"strange")))
    assert not buffers.free


def test_a_piece_is_whole_pages():
    assert (slot_bytes(1), slot_bytes(4096), slot_bytes(4097)) == (4096, 4096, 8192)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=12), st.integers(1, 40_000))
def test_messages_come_out_as_they_went_in_however_they_are_cut(counts, cut):
    """Long bodies beside short ones, over a connection that takes a few bytes at a time."""
    one, other = socket.socketpair()
    end = PeerStream(1, other, (BLOCK, 700 * BLOCK))
    sent = [Piece(n, 0, count, n, bytes([n]) * count * BLOCK) for n, count in enumerate(counts, 1)]
    raw = b"".join(bytes(part) for piece in sent for part in encode(piece))
    found = []
    for at in range(0, len(raw), cut):
        one.sendall(raw[at : at + cut])
        found += end.read()
    while len(found) < len(sent):
        found += end.read()
    assert [(m.transfer, m.count, bytes(m.payload)) for m in found] == [
        (m.transfer, m.count, m.payload) for m in sent
    ]
    one.close()
    end.close()


def test_a_place_in_memory_that_was_not_shared_is_told_as_it_is():
    one, other = socket.socketpair()
    end = PeerStream(1, other, (BLOCK, SIZE))
    one.sendall(b"".join(encode(Placed(1, 0, 1, 2, SIZE, b""))))
    assert end.read() == [Placed(1, 0, 1, 2, SIZE, b"")]
    one.close()
    end.close()


def test_what_was_said_before_the_end_is_heard():
    one, other = socket.socketpair()
    end = PeerStream(1, other, (BLOCK, SIZE))
    one.sendall(b"".join(encode(Ack(1, 0, 2))) + b"".join(encode(Piece(2, 0, 1, 3, b"y" * BLOCK))))
    one.close()
    first, second = end.read()
    assert first == Ack(1, 0, 2) and bytes(second.payload) == b"y" * BLOCK
    assert isinstance(end.error, ConnectionResetError) or (end.read(), end.error)[1] is not None
    end.close()
    one, other = socket.socketpair()
    end = PeerStream(1, other, (BLOCK, SIZE))
    one.sendall(b"".join(encode(Ack(1, 0, 2))) + b"nonsense" * 20)
    assert end.read() == [Ack(1, 0, 2)] and isinstance(end.error, ProtocolError)
    one.close()
    end.close()
