"""Plain TCP between processes and hosts: who is gone or disagrees is named; any bytes from the wire are survived."""

import signal
import socket
import threading
import time
from dataclasses import replace
from functools import partial

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.comm.mailbox.wire import HEADER_BYTES
from afserve.comm.transport import Box, Connecting, WireType
from afserve.comm.transports import connect
from afserve.comm.transports.entrance import dial
from afserve.comm.transports.handshake import ask
from afserve.errors import PeerLost, RendezvousError
from tests.comm.begun import FORKED
from tests.comm.conformance import LAYOUT, PATIENCE, answer, arrive, content, send
from tests.open_files import open_files

BOX = Box(0, 0, 0)


def open_pair(layout=LAYOUT):
    end, address = connect.listen("tcp", expert=0, attention_nodes=2, layout=layout)
    return end, address, connect.connect([address], attention=0, layout=layout, timeout=PATIENCE)


def round_trip(front, end, box=BOX, rows=3):
    sent = send(front, box, 4, rows)
    got = arrive(end, box)
    assert got.header == sent.header
    answer(end, box, got.header, 5)
    assert (arrive(front, box).x_RH == content(5, rows, LAYOUT.hidden)).all()


def echo(pipe):
    end, address = connect.listen("tcp", expert=0, attention_nodes=2, layout=LAYOUT)
    pipe.send(address)
    while True:
        for box in end.wait(end.boxes(), 1.0):
            answer(end, box, end.take(box).header, 9)


def front(address, pipe):
    end = connect.connect([address], attention=0, layout=LAYOUT, timeout=PATIENCE)
    send(end, BOX, 1, 3)
    arrive(end, BOX)
    send(end, BOX, 40, 3)
    pipe.send("sent")
    signal.pause()


@pytest.fixture
def start():
    started = []

    def run(target, *args):
        mine, theirs = FORKED.Pipe()
        process = FORKED.Process(target=target, args=(*args, theirs), daemon=True)
        process.start()
        started.append(process)
        return process, mine

    yield run
    for process in started:
        process.kill()
        process.join()


@pytest.mark.process
def test_a_killed_expert_node_is_named(start):
    process, pipe = start(echo)
    assert pipe.poll(60)
    end = connect.connect([pipe.recv()], attention=0, layout=LAYOUT, timeout=PATIENCE)
    for turn in range(20):
        send(end, BOX, turn, 4)
        assert (arrive(end, BOX).x_RH == content(9, 4, LAYOUT.hidden)).all()
    process.kill()
    with pytest.raises(PeerLost, match="expert-0: its connection has ended"):
        end.wait([BOX], 60.0)
    with pytest.raises(PeerLost):
        send(end, BOX, 1, 1)
    end.close()


@pytest.mark.process
def test_a_killed_attention_nodes_place_can_be_taken(start):
    end, address = connect.listen("tcp", expert=0, attention_nodes=2, layout=LAYOUT)
    process, pipe = start(front, address)
    answer(end, BOX, arrive(end, BOX).header, 1)
    assert pipe.poll(60)
    unanswered = arrive(end, BOX)
    process.kill()
    with pytest.raises(PeerLost, match="attention-0: its connection has ended"):
        end.wait([BOX], 60.0)
    successor = connect.connect([address], attention=0, layout=LAYOUT, timeout=PATIENCE)
    sent = send(successor, BOX, 5, 2)
    answer(end, BOX, unanswered.header, 2)
    assert successor.wait([BOX], 0.05) == []
    got = arrive(end, BOX)
    assert got.header == sent.header
    answer(end, BOX, got.header, 3)
    assert (arrive(successor, BOX).x_RH == content(3, 2, LAYOUT.hidden)).all()
    successor.close()
    end.close()


@pytest.mark.slow
def test_messages_larger_than_the_kernel_takes_at_once():
    """Both ends in one thread, so neither can send without the other's reading in between."""
    layout = replace(LAYOUT, hidden=4096, max_rows=1024)
    end, _, front_end = open_pair(layout)
    sent = {}
    for m in range(2):
        sent[m] = send(front_end, Box(0, 0, m), m, 1000)
    for m in range(2):
        got = _both(end, front_end, Box(0, 0, m))
        assert (got.x_RH == sent[m].x_RH).all()
        answer(end, Box(0, 0, m), got.header, 7 + m)
    for m in range(2):
        assert (_both(front_end, end, Box(0, 0, m)).x_RH == content(7 + m, 1000, 4096)).all()
    front_end.close()
    end.close()


def _both(receiver, sender, box):
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        sender.ready([])
        if receiver.ready([box]):
            return receiver.take(box)
    raise AssertionError("nothing arrived")


def test_only_the_given_address_listens_and_nothing_is_left():
    def listening():
        return {c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}

    files, before, threads = open_files(), listening(), set(threading.enumerate())
    end, address = connect.listen("tcp", expert=0, attention_nodes=1, layout=LAYOUT, host="127.0.0.2")
    other = connect.connect([address], attention=0, layout=LAYOUT, timeout=PATIENCE)
    round_trip(other, end)
    assert [found.ip for found in listening() - before] == ["127.0.0.2"]
    other.close()
    end.close()
    assert listening() <= before and not open_files() - files
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize("field", ["hidden", "slots", "model", "combine_wire"])
def test_a_mismatch_names_the_field(field):
    value = WireType.BFLOAT16 if field == "combine_wire" else getattr(LAYOUT, field) + 1
    end, address = connect.listen(
        "tcp", expert=0, attention_nodes=1, layout=replace(LAYOUT, **{field: value})
    )
    with pytest.raises(RendezvousError, match=f"expert-0 and attention-0 do not agree: {field} is "):
        connect.connect([address], attention=0, layout=LAYOUT, timeout=PATIENCE)
    end.close()


def test_a_missing_node_a_wrong_address_and_a_taken_place_are_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RendezvousError, match=rf"expert-0: nobody answers at 127\.0\.0\.1:{port} within 2 s"):
        connect.connect([f"tcp:127.0.0.1:{port}"], attention=0, layout=LAYOUT, timeout=2.0)
    with pytest.raises(RendezvousError, match="not an address of the form tcp:HOST:PORT"):
        connect.connect(["tcp:nowhere"], attention=0, layout=LAYOUT, timeout=2.0)
    with pytest.raises(RendezvousError, match=r"cannot listen on 203\.0\.113\.7"):
        connect.listen("tcp", expert=0, attention_nodes=1, layout=LAYOUT, host="203.0.113.7")
    end, address, first = open_pair()
    round_trip(first, end)
    with pytest.raises(RendezvousError, match="did not take attention-0 in: another node of that index"):
        connect.connect([address], attention=0, layout=LAYOUT, timeout=PATIENCE)
    with pytest.raises(RendezvousError, match="attention_nodes is 2 there and 3 here"):
        connect.connect([address], attention=2, layout=LAYOUT, timeout=PATIENCE)
    round_trip(first, end)
    first.close()
    end.close()


def test_somebody_else_answers():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 200)
            connection.recv(1000)
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(RendezvousError, match="expert-0: who answers there does not greet like a node"):
            connect.connect(
                [f"tcp:127.0.0.1:{server.getsockname()[1]}"], attention=0, layout=LAYOUT, timeout=5.0
            )
        thread.join()


@given(raw=st.binary(max_size=300), polite=st.booleans())
@settings(max_examples=25, deadline=None)
def test_any_bytes_from_a_stranger_or_a_member(raw, polite):
    """A stranger is not let in; a member that sends rubbish is dropped; the other member does not notice."""
    end, address = connect.listen("tcp", expert=0, attention_nodes=2, layout=LAYOUT)
    good = connect.connect([address], attention=1, layout=LAYOUT, timeout=PATIENCE)
    with joined(address) if polite else dial(address, "expert-0", 10.0, None) as bad:
        try:
            bad.sendall(raw)
            bad.shutdown(socket.SHUT_WR)
        except OSError:
            assert not polite  # who is not let in may find, between the two, that the other end has hung up
        for _ in range(3):
            end.ready(end.boxes())
        round_trip(good, end, Box(1, 0, 1))
        if polite:
            with pytest.raises(PeerLost, match=r"attention-0: (its connection has ended|it sent a header)"):
                for _ in range(100):
                    end.wait([BOX], 0.1)
    good.close()
    end.close()


def joined(address, attention=0):
    """A connection that was taken in as an attention node's."""
    call = partial(dial, address, "expert-0", certificates=None)
    return ask(call, 0, Connecting({}, attention, LAYOUT, PATIENCE)).connection


@pytest.mark.parametrize("kind", [kind for kind in ("tcp", "dist") if kind in connect.kinds()])
def test_who_has_left_is_no_longer_polled(kind):
    """A closed connection is always ready: an end that still polled it would never park again."""
    end, address = connect.listen(kind, expert=0, attention_nodes=2, layout=LAYOUT)
    fronts = [connect.connect([address], attention=a, layout=LAYOUT, timeout=PATIENCE) for a in range(2)]
    for a, one in enumerate(fronts):
        round_trip(one, end, Box(a, 0, 0))
    fronts[0].close()
    with pytest.raises(PeerLost, match="attention-0"):
        end.wait([BOX], 10.0)
    assert end._poll.poll(0) == []
    round_trip(fronts[1], end, Box(1, 0, 0))
    fronts[1].close()
    end.close()


def test_half_a_message_is_nothing():
    end, address = connect.listen("tcp", expert=0, attention_nodes=1, layout=LAYOUT)
    with joined(address) as bad:
        bad.sendall(b"\0" * (HEADER_BYTES - 1))
        assert end.wait(end.boxes(), 0.05) == []
    end.close()
