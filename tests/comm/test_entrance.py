"""Ports that strangers reach: floods, drips and half greetings keep nobody out, and only a later life takes a place."""

import contextlib
import errno
import itertools
import logging
import re
import socket
import threading
import time

import pytest

from afserve.comm.kv.socket_wires import SocketWires
from afserve.comm.transport import Box
from afserve.comm.transports import connect, entrance
from afserve.comm.transports.entrance import Entrance, listen_on
from afserve.comm.transports.refusals import Refusals
from afserve.credentials import Credentials
from afserve.errors import AuthError, PeerLost, RendezvousError
from tests.comm.conformance import LAYOUT, answer, arrive, content, send

SECONDS = 30.0
TOKEN = Credentials("secret")
KINDS = [kind for kind in ("tcp", "pairs", "dist") if kind in connect.kinds()]


def join(address, credentials=TOKEN, attention=0, seconds=SECONDS):
    if address.startswith("pairs:"):
        address = "pairs:another host" + address[address.index("|") :]
    return connect.connect(
        [address], attention=attention, layout=LAYOUT, timeout=seconds, credentials=credentials
    )


@pytest.fixture(params=KINDS)
def listening(request):
    end, address = connect.listen(
        request.param, expert=0, attention_nodes=4, layout=LAYOUT, credentials=TOKEN
    )
    yield end, address
    end.close()


def port_of(end):
    return getattr(end, "_far", end)._entrance._listener.getsockname()[1]


def round_trip(front, end, attention=0):
    box = Box(attention, 0, 0)
    sent = send(front, box, 4, 3)
    got = arrive(end, box)
    assert got.header == sent.header
    answer(end, box, got.header, 5)
    assert (arrive(front, box).x_RH == content(5, 3, LAYOUT.hidden)).all()


def test_the_right_terms_without_the_token_are_told_nothing(listening):
    end, address = listening
    for token in ("", "another", "secret ", "Secret"):
        with pytest.raises(AuthError, match="expert-0: who answers there does not have this run's token"):
            join(address, Credentials(token))
    first = join(address)
    round_trip(first, end)
    first.close()


@pytest.mark.parametrize(
    "said", [b"", b"afserve rows 2\n\n", b"afserve rows 2\n\n" + bytes(16), b"GET / HTTP/1.1\r\n\r\n"]
)
def test_a_flood_keeps_nobody_out(listening, said, caplog):
    """Each stranger says so much and then nothing; there are always more of them than places."""
    end, address = listening
    over, place, flood = threading.Event(), ("127.0.0.1", port_of(end)), []

    def come():
        while not over.is_set():
            with contextlib.suppress(OSError):
                flood.append(socket.create_connection(place, SECONDS))
                flood[-1].sendall(said)
            for old in flood[:-400]:
                old.close()
            over.wait(0.001)

    caplog.set_level(logging.WARNING, "afserve.comm")
    strangers = threading.Thread(target=come)
    strangers.start()
    try:
        while len(flood) <= entrance._AT_ONCE:
            over.wait(0.01)
        fronts = [join(address, attention=a) for a in range(3)]
    finally:
        over.set()
        strangers.join()
    for a, front in enumerate(fronts):
        round_trip(front, end, a)
        front.close()
    for connection in flood:
        connection.close()
    assert "127.0.0.1 was turned away" in caplog.text
    assert len(caplog.records) < 40


def test_a_flood_keeps_no_node_of_kv_blocks_out():
    ends = [SocketWires(listen_on("127.0.0.1"), "secret", {"dtype": "x"}, 64, lambda: None) for _ in range(2)]
    for end in ends:
        end.start()
    host, port = ends[1].address.rsplit(":", 2)[1:]
    flood = [socket.create_connection((host, int(port))) for _ in range(2 * entrance._AT_ONCE)]
    peer = ends[0].dial(ends[1].address)
    until = time.monotonic() + SECONDS
    while peer not in ends[0]._streams and time.monotonic() < until:
        assert not ends[0].receive()
        time.sleep(0.01)
    assert peer in ends[0]._streams
    for one in (*ends, *flood):
        one.close()


def test_a_drip_ends_at_its_deadline(listening, monkeypatch):
    """However it is cut into bytes: the deadline is of the whole greeting."""
    monkeypatch.setattr(entrance, "_GREETING_SECONDS", 0.2)
    end, _ = listening
    with socket.create_connection(("127.0.0.1", port_of(end)), SECONDS) as dripping:
        dripping.settimeout(0.02)
        for byte in itertools.chain(b"afserve rows 2\n\n" + bytes(16), itertools.repeat(0, 2000)):
            try:
                dripping.sendall(bytes([byte]))
                if dripping.recv(100) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("who drips bytes is let stay")


def test_strangers_hold_no_thread_once_they_are_dropped(listening, monkeypatch):
    monkeypatch.setattr(entrance, "_AT_ONCE", 4)
    end, _ = listening
    before = threading.active_count()
    crowd = [socket.create_connection(("127.0.0.1", port_of(end))) for _ in range(40)]
    for connection in crowd[:-4]:
        connection.settimeout(SECONDS)
        assert connection.recv(1) == b""
    until = time.monotonic() + SECONDS
    while threading.active_count() > before + 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before + 4
    for connection in crowd:
        connection.close()


class Refusing:
    """A listening socket whose first connections cannot be taken."""

    def __init__(self, listener, errors):
        self._listener, self._errors = listener, iter(errors)

    def accept(self):
        if (number := next(self._errors, None)) is not None:
            raise OSError(number, "as it is")
        return self._listener.accept()

    def __getattr__(self, name):
        return getattr(self._listener, name)


@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED]
)
def test_an_entrance_goes_on_where_a_connection_cannot_be_taken(number):
    """A process that may open no more files has room again later; a newcomer may have hung up meanwhile."""
    greeted = threading.Event()
    listener = listen_on("127.0.0.1")
    entered = Entrance(Refusing(listener, [number] * 3), None)
    entered.start(lambda newcomer: (newcomer.proven(), newcomer.plain.close(), greeted.set()))
    with socket.create_connection(listener.getsockname()):
        assert greeted.wait(SECONDS)
    entered.close()


def test_only_a_later_generation_takes_a_place_that_is_held(listening, caplog):
    end, address = listening
    held = join(address, Credentials("secret", generation=4))
    round_trip(held, end)
    for generation in (0, 3, 4):
        with pytest.raises(RendezvousError, match="did not take attention-0 in: another node of that index"):
            join(address, Credentials("secret", generation=generation))
    round_trip(held, end)
    later = join(address, Credentials("secret", generation=5))
    assert re.search("attention-0: generation 5 takes the place of 4", caplog.text)
    round_trip(later, end)
    with pytest.raises(PeerLost, match="expert-0"):
        held.wait([Box(0, 0, 0)], SECONDS)
    held.close()
    round_trip(later, end)
    later.close()


def test_a_place_that_was_left_is_anybodys_with_the_token(listening):
    end, address = listening
    for generation in (7, 3):
        front = join(address, Credentials("secret", generation=generation))
        round_trip(front, end)
        front.close()
        with pytest.raises(PeerLost, match="attention-0"):
            end.wait([Box(0, 0, 0)], SECONDS)


def test_a_host_that_floods_only_takes_its_own_places(monkeypatch):
    """The newcomer of another address, though it came first, is not dropped for them."""
    monkeypatch.setattr(entrance, "_AT_ONCE", 8)
    let_go = threading.Event()

    def greet(newcomer):
        if newcomer.name == "127.0.0.2":
            assert let_go.wait(SECONDS)
            newcomer.proven()
            newcomer.plain.sendall(b"!")
        newcomer.plain.recv(1)
        newcomer.plain.close()

    listener = listen_on("127.0.0.1")
    entered = Entrance(listener, None)
    entered.start(greet)
    place = listener.getsockname()
    with socket.create_connection(place, SECONDS, ("127.0.0.2", 0)) as other:
        crowd = [socket.create_connection(place) for _ in range(50)]
        for connection in crowd[:-8]:
            connection.settimeout(SECONDS)
            assert connection.recv(1) == b""
        let_go.set()
        assert other.recv(1) == b"!"
    for connection in crowd:
        connection.close()
    entered.close()


def test_what_is_refused_is_said_at_a_bounded_rate(caplog):
    now = [0.0]
    refusals = Refusals(logging.getLogger("afserve.comm"), "port 7", lambda: now[0])
    for _ in range(1000):
        refusals.log_refusal("127.0.0.1", "why")
    assert len(caplog.records) == 5
    now[0] = 10.0
    refusals.say_unsaid()
    assert caplog.records[-1].getMessage() == "port 7: 995 more were turned away within 10 s"
    now[0] = 30.0
    refusals.say_unsaid()
    refusals.log_refusal("127.0.0.1", "again")
    assert [record.getMessage() for record in caplog.records[6:]] == [
        "port 7: 127.0.0.1 was turned away: again"
    ]
