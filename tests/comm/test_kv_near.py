"""Connections that two threads have in turns: nothing is lost, late or out of order."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.clock import MonotonicClock
from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.messages import Ack, Piece
from afserve.comm.kv.reach import listen_here
from afserve.comm.kv.socket_wires import SocketWires
from afserve.comm.kv.stream import PeerStream
from afserve.comm.kv.wires import Closed, PeerMessage
from afserve.comm.transports.entrance import listen_on
from tests.comm.kv_world import BLOCK, Store, chain

SECONDS = 10.0


class Wired:
    """One end, whose messages a test takes when it likes; inside a host or not, both are to give the same."""

    def __init__(self, far=False) -> None:
        self.news = threading.Event()
        listener = listen_on("127.0.0.1") if far else listen_here()
        self.wires = SocketWires(listener, "t", {}, BLOCK, self.wake, shares=True)
        self.wires.start()
        self.heard, self.ended = [], []

    def wake(self):
        self.news.set()
        self.wires.ring()

    def look(self, keep=False):
        for event in self.wires.receive(keep):
            if isinstance(event, PeerMessage):
                message = event.message
                if isinstance(message, Piece):
                    assert bytes(message.payload) == bytes([message.transfer % 251]) * len(message.payload)
                self.heard.append((event.peer, message))
                self.wires.used(event)
            else:
                self.ended.append(event)

    def wait(self, done):
        """As a node does: it sleeps where nothing is kept, until it is woken."""
        until = time.monotonic() + SECONDS
        while not done():
            self.look()
            if not (self.wires.kept or done()):
                assert self.news.wait(until - time.monotonic()), (self.heard, self.ended)
                self.news.clear()

    def sleep(self, done):
        """As a node does that has nothing else to do, in its connections."""
        until = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < until, (self.heard, self.ended)
            self.wires.sleep(SECONDS)
            self.look(keep=True)


@pytest.fixture
def ends():
    made = [Wired(), Wired()]
    yield made
    for end in made:
        end.wires.close()


def numbers(end):
    return [message.transfer for _, message in end.heard]


def test_what_is_said_before_a_connection_stands_comes_first(ends, monkeypatch):
    """Also where who greets is slow to hand the connection over."""
    plain = SocketWires._serve

    def slow(self, *args):
        time.sleep(0.01)
        return plain(self, *args)

    monkeypatch.setattr(SocketWires, "_serve", slow)
    here, there = ends
    peer = here.wires.dial(there.wires.address)
    for number in range(200):
        here.wires.send(peer, Ack(number, 0, 1))
        time.sleep(0.0002)
    there.wait(lambda: len(there.heard) == 200)
    assert numbers(there) == list(range(200))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["here", "there", "here+", "there+", "look", "keep", "asleep", "sleep"]),
            st.integers(1, 40),
        ),
        max_size=30,
    ),
    st.booleans(),
)
def test_messages_come_in_order_whoever_reads(turns, far):
    """Short ones and pieces, which take a while between hosts."""
    here, there = made = Wired(far), Wired(far)
    try:
        peers = {"here": here.wires.dial(there.wires.address)}
        sent = {"here": 0, "there": 0}

        def say(whose, count):
            end = here if whose == "here" else there
            for _ in range(count):
                end.wires.send(peers[whose], Ack(sent[whose], 0, 1))
                sent[whose] += 1

        say("here", 1)
        there.wait(lambda: there.heard)
        peers["there"] = there.heard[0][0]

        def give(whose, blocks):
            end, number = here if whose == "here" else there, sent[whose]
            if end.wires.has_room(peers[whose]):
                room = end.wires.room(peers[whose], blocks * BLOCK)
                room.view[:] = bytes([number % 251]) * len(room.view)
                end.wires.send(peers[whose], Piece(number, 0, blocks, 0, room.view, room.slot))
                sent[whose] += 1

        for what, count in turns:
            if what in sent:
                say(what, count)
            elif what[:-1] in sent:
                give(what[:-1], 800 * count)
            elif what == "asleep":
                for end in made:
                    end.wires.sleep(0.0001)
            elif what == "sleep":
                time.sleep(count / 20_000)
            else:
                for end in made:
                    end.look(keep=what == "keep")
        for end in made:
            end.wires.leave()
        there.wait(lambda: len(there.heard) >= sent["here"])
        here.wait(lambda: len(here.heard) >= sent["there"])
        assert numbers(there) == list(range(sent["here"])) and numbers(here) == list(range(sent["there"]))
    finally:
        for end in made:
            end.wires.close()


def test_what_the_wires_thread_has_read_comes_before_what_the_node_reads(monkeypatch):
    """Also where that thread is slow to tell, between hosts, where both read: one after the other."""
    plain = PeerStream.read

    def slow(self):
        found = plain(self)
        if found and threading.current_thread().name == "kv-wires":
            time.sleep(0.0005)
        return found

    monkeypatch.setattr(PeerStream, "read", slow)
    here, there = Wired(far=True), Wired(far=True)
    try:
        peer = here.wires.dial(there.wires.address)
        here.wires.send(peer, Ack(0, 0, 1))
        there.wait(lambda: there.heard)
        for number in range(1, 400):
            here.wires.send(peer, Ack(number, 0, 1))
            if number % 7 == 0:
                there.wires.send(there.heard[0][0], Ack(number, 0, 1))  # an answer is expected
            if number % 3:
                there.look(keep=number % 20 > 4)
            time.sleep(0.0002)
        there.wait(lambda: len(there.heard) == 400)
        assert numbers(there) == list(range(400))
    finally:
        here.wires.close()
        there.wires.close()


@pytest.mark.parametrize("far", [False, True])
def test_who_sleeps_in_its_connections_is_woken_by_no_other_thread(far):
    here, there = Wired(far), Wired(far)
    try:
        peer = here.wires.dial(there.wires.address)
        here.wires.send(peer, Ack(0, 0, 1))
        there.wait(lambda: there.heard)
        there.wires.sleep(0.0)  # from now on its connections are its own
        there.news.clear()
        for number in range(1, 50):
            threading.Timer(0.002, here.wires.send, (peer, Ack(number, 0, 1))).start()
            there.sleep(lambda number=number: len(there.heard) > number)
        assert numbers(there) == list(range(50)) and not there.news.is_set()
        there.look()  # it has something else to do from now on
        assert not there.wires.kept
        here.wires.send(peer, Ack(50, 0, 1))
        there.wait(lambda: len(there.heard) == 51)
    finally:
        here.wires.close()
        there.wires.close()


def test_who_sleeps_wakes_when_it_is_rung_and_only_then(ends):
    here, _ = ends
    began = time.monotonic()
    here.wires.sleep(0.02)
    assert time.monotonic() - began > 0.015
    here.wires.ring()
    here.wires.sleep(SECONDS)  # rung before
    threading.Timer(0.01, here.wires.ring).start()
    here.wires.sleep(SECONDS)
    assert time.monotonic() - began < SECONDS
    here.wires.sleep(0.0)
    assert not here.heard


@pytest.mark.parametrize("far", [False, True])
def test_the_end_of_a_connection_wakes_who_sleeps_in_it(far):
    here, there = Wired(far), Wired(far)
    try:
        peer = here.wires.dial(there.wires.address)
        here.wires.send(peer, Ack(0, 0, 1))
        there.wait(lambda: there.heard)
        there.wires.close()
        here.sleep(lambda: here.ended)
        assert [event.peer for event in here.ended] == [peer]
    finally:
        here.wires.close()
        there.wires.close()


def test_a_connection_that_ends_while_it_is_kept_is_told_once(ends):
    here, there = ends
    peer = here.wires.dial(there.wires.address)
    here.wires.send(peer, Ack(1, 0, 1))
    there.wait(lambda: there.heard)
    there.wires.send(there.heard[0][0], Ack(1, 5, 1))
    here.wait(lambda: here.heard)
    here.look(keep=True)
    there.wires.close()
    here.wait(lambda: here.ended)
    here.wires.send(peer, Ack(1, 1, 1))  # to nobody
    time.sleep(0.05)
    here.look()
    assert here.ended == [Closed(peer, here.ended[0].why)] and "connection has ended" in here.ended[0].why
    assert not here.wires.kept


@pytest.mark.slow
def test_a_full_socket_keeps_what_it_does_not_take(ends):
    """Nobody reads there for a while; then all of it comes, as it went."""
    here, there = ends
    peer = here.wires.dial(there.wires.address)
    here.wires.send(peer, Ack(0, 0, 1))
    there.wait(lambda: there.heard)
    for number in range(1, 20_000):
        here.wires.send(peer, Ack(number, 0, 1))
    there.wait(lambda: len(there.heard) == 20_000)
    assert numbers(there) == list(range(20_000))


def test_who_lingers_does_not_do_so_for_ever():
    """A lease is open and nothing moves: the connection goes back, and the turn ends."""
    ends = []
    for _ in range(2):
        news = threading.Event()
        wires = SocketWires(listen_here(), "t", {}, BLOCK, news.set, shares=True)
        wires.start()
        ends.append((Exchange(Store(40), wires, MonotonicClock(), 3), wires, news))
    (here, _, _), (owner, owners_wires, owners_news) = ends
    try:
        here.pull(owners_wires.address, chain(1, 3), 5.0, request=0, generation=3)
        assert owners_news.wait(SECONDS)  # nobody turns the owner, nothing was computed
        rests, began = False, time.monotonic()
        while not rests and time.monotonic() < began + SECONDS / 2:
            here.turn(SECONDS, lingers=True)
            rests = here.busy and not here.eager  # the wires' thread may call it once more meanwhile
        assert rests
        while not here.ended:
            owner.turn(1.0, lingers=True)
            here.turn(1.0, lingers=True)
        assert here.ended.pop().received == 0
    finally:
        for exchange, _, _ in ends:
            exchange.close()
