"""KV blocks over real sockets: they arrive byte by byte, and whoever does not agree is refused by the field."""

import contextlib
import re
import socket
import threading

import pytest

from afserve.clock import MonotonicClock
from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.forms import HEAD_BYTES, decode, decode_head, encode
from afserve.comm.kv.messages import (
    MOST_ROW,
    Ack,
    Coming,
    EndTransfer,
    HandOn,
    Offer,
    Piece,
    Prefill,
    Row,
    Want,
)
from afserve.comm.kv.reach import connect, listen_here
from afserve.comm.kv.socket_wires import SocketWires
from afserve.comm.transports.entrance import listen_on
from afserve.errors import ProtocolError, RendezvousError
from afserve.tiles import PictureTile
from afserve.tls import Certificates
from tests.comm.kv_world import BLOCK, Store, chain, content

TERMS = {"protocol": "1", "dtype": "bfloat16", "block_size": "16"}


class End_:
    """A node's exchange over sockets, with a store; turned by the test."""

    def __init__(self, listener, token="secret", terms=TERMS, certificates=None, shares=True) -> None:
        self.news = threading.Event()
        self.wires = SocketWires(listener, token, terms, BLOCK, self.news.set, certificates, shares=shares)
        self.wires.start()
        self.store = Store(400)
        self.exchange = Exchange(self.store, self.wires, MonotonicClock(), 3)


@pytest.fixture
def opened():
    ends = []

    def make(listener=None, **fields):
        ends.append(End_(listener or listen_here(), **fields))
        return ends[-1]

    yield make
    for end in ends:
        end.exchange.close()
        assert not +end.store.held


def until(done, *ends):
    for _ in range(4000):
        for end in ends:
            end.exchange.turn(1.0)
        if done():
            return
        ends[0].news.wait(0.005)
        ends[0].news.clear()
    raise AssertionError("nothing comes")


def pulled(here, owner, names, generation=3):
    here.exchange.pull(owner.wires.address, names, 5.0, request=0, generation=generation)
    until(lambda: here.exchange.ended, here, owner)
    return here.exchange.ended.pop()


@pytest.mark.parametrize("listen", [listen_here, lambda: listen_on("127.0.0.1")], ids=["unix", "tcp"])
def test_blocks_arrive(opened, listen, monkeypatch):
    monkeypatch.setattr("afserve.comm.kv.messages.PIECE_BYTES", 7 * BLOCK)
    here, owner = opened(), opened(listen())
    names = chain(1, 300)
    owner.store.compute(names[:250])
    found = pulled(here, owner, names)
    assert (found.received, found.bytes) == (250, 250 * BLOCK)
    assert found.why == "its owner has no more of them"
    blocks = here.store.pool.match(names)
    assert [here.store.memory[block] for block in blocks] == [content(name) for name in names[:250]]
    again = pulled(here, owner, names[:250])
    assert again.complete and (again.here, again.received) == (250, 0)
    assert pulled(here, owner, chain(2, 3), generation=4).why == "this is life 3, compute the tokens again"


def test_copies_are_offered_and_kept(opened):
    here, buddy = opened(), opened()
    names = chain(1, 9)
    here.store.compute(names)
    offer = here.exchange.offer(buddy.wires.address, names[4:])
    until(lambda: here.exchange.settled, here, buddy)
    assert here.exchange.settled == [(offer, 5)] and buddy.store.pool.copies == 5
    assert len(buddy.store.pool.match(names[4:])) == 5


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"token": "another"}, "does not have this run's token"),
        ({"terms": {**TERMS, "dtype": "float16"}}, "dtype is float16 there and bfloat16 here"),
        ({"terms": {**TERMS, "more": "x"}}, "more is x there and nothing here"),
    ],
)
def test_who_does_not_agree_is_refused_by_the_field(opened, fields, why):
    here, owner = opened(), opened(**fields)
    owner.store.compute(chain(1, 3))
    assert why in pulled(here, owner, chain(1, 3)).why
    assert here.store.pool.match(chain(1, 3)) == []


def test_nobody_there(opened):
    here, owner = opened(), opened()
    owner.exchange.close()
    assert "nobody answers at unix:" in pulled(here, owner, chain(1, 3)).why
    with pytest.raises(RendezvousError, match="is not an address of the form"):
        connect("shm:1", 1.0)


def test_a_stranger_who_says_nothing_or_nonsense_stops_nobody(opened):
    here, owner = opened(), opened()
    silent, loud = (connect(owner.wires.address, 1.0) for _ in range(2))
    loud.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100)
    owner.store.compute(chain(1, 3))
    assert pulled(here, owner, chain(1, 3)).complete
    for stranger in (silent, loud):
        stranger.close()


def test_a_lost_owner_ends_the_pull(opened):
    here, owner = opened(), opened()
    assert pulled(here, owner, chain(1, 3)).received == 0
    here.exchange.pull(owner.wires.address, chain(2, 3), 5.0, request=0, generation=3)
    owner.exchange.close()
    until(lambda: here.exchange.ended, here)
    assert "ended" in here.exchange.ended.pop().why


def test_messages_come_back_as_they_went_and_others_are_refused():
    names = tuple(chain(1, 3))
    for message in (
        Want(7, 9, 3, names),
        Offer(7, 3, names),
        HandOn(7, 3, ((names[0], 1 << 63), (names[1], 0))),
        Ack(7, 1, 2),
        EndTransfer(7, "why"),
        Piece(7, 1, 2, 5, bytes(2 * BLOCK)),
        Prefill(7, 9, 3, (1, 2, 1 << 31), -5, "salt ü", "tenant é", 1000),
        Prefill(7, 9, 3, (1, 2), 0, "salt", tiles=(PictureTile(0, 1, b"red"), PictureTile(1, 2, b""))),
        Coming(7, 100_000, 25, 3),
        Row(7, 5, bytes(range(24))),
    ):
        head, body = encode(message)
        assert len(head) == HEAD_BYTES
        assert decode(decode_head(head, BLOCK), bytes(body)) == message
    head, body = encode(Prefill(7, 9, 3, (1, 2), 0, "tenant"))
    with pytest.raises(ProtocolError, match="a Prefill of 2 tokens has 4 bytes behind a salt of 6"):
        decode(decode_head(head, BLOCK), bytes(body)[:-4])
    head, body = encode(Prefill(7, 9, 3, (1, 2), tiles=(PictureTile(1, 1, b"red"),)))
    with pytest.raises(
        ProtocolError, match="a Prefill with tiles: 7 bytes of pixels are told and 3 are there"
    ):
        decode(decode_head(head, BLOCK), bytes(body).replace(b"\3\0\0\0red", b"\7\0\0\0red"))
    head, _ = encode(Piece(7, 1, 2, 5, bytes(2 * BLOCK)))
    with pytest.raises(
        ProtocolError, match="a Piece of 2 blocks from 1 on with 128 bytes; blocks have 65 bytes"
    ):
        decode_head(head, BLOCK + 1)
    head, _ = encode(Row(7, 5, bytes(MOST_ROW + 1)))
    with pytest.raises(ProtocolError, match=f"a Row of 0 blocks from 0 on with {MOST_ROW + 1} bytes"):
        decode_head(head, BLOCK)
    with pytest.raises(ProtocolError, match="begins with"):
        decode_head(bytes(HEAD_BYTES), BLOCK)
    head, _ = encode(Ack(7, 1, 2))
    with pytest.raises(ProtocolError, match="Ack of version 2; this node has version 1"):
        decode_head(head[:5] + b"\2" + head[6:], BLOCK)


def test_sockets_listen_where_they_are_told():
    with listen_here() as here, listen_on("127.0.0.1") as there:
        assert here.family == socket.AF_UNIX and there.getsockname()[0] == "127.0.0.1"
    with pytest.raises(RendezvousError, match=r"cannot listen on 192\.0\.2\.1"):
        listen_on("192.0.2.1")


@pytest.fixture
def encrypted(opened, issued):
    """Makes ends that listen between hosts, each with a certificate of its own."""

    def make(*roles, **how):
        certificates = Certificates(issued(*(roles or ("attention",)), **how))
        return opened(listen_on("127.0.0.1"), certificates=certificates)

    return make


def test_blocks_arrive_over_tls(encrypted, monkeypatch):
    """In pieces above a record's and a read's size, of which nothing stays behind in the layer of TLS."""
    monkeypatch.setattr("afserve.comm.kv.messages.PIECE_BYTES", 5000 * BLOCK)
    monkeypatch.setattr("afserve.comm.kv.stream._READS", 1)
    here, owner = encrypted(), encrypted("attention", "expert")
    assert owner.wires.address.startswith("tcp+tls:127.0.0.1:")
    names = chain(1, 390)
    owner.store.compute(names)
    assert pulled(here, owner, names).received == 390
    blocks = here.store.pool.match(names)
    assert [here.store.memory[block] for block in blocks] == [content(name) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("roles", "how", "why"),
    [
        (("expert",), {}, "Hostname mismatch"),
        (("attention",), {"by": "other"}, "self-signed certificate"),
        (None, {}, "asks for them|has none"),
    ],
    ids=["wrong role", "unknown authority", "no certificate"],
)
def test_blocks_go_only_to_attention_nodes_of_the_same_authority(opened, encrypted, roles, how, why):
    here, owner = encrypted(), encrypted(*roles, **how) if roles else opened(listen_on("127.0.0.1"))
    owner.store.compute(chain(1, 3))
    assert re.search(why, pulled(here, owner, chain(1, 3)).why)
    assert here.store.pool.match(chain(1, 3)) == []
    here.store.compute(chain(2, 3))
    assert not pulled(owner, here, chain(2, 3)).complete and not owner.store.pool.match(chain(2, 3))


def test_plain_text_at_an_encrypted_entrance_stops_nobody(encrypted):
    here, owner = encrypted(), encrypted()
    with connect(owner.wires.address.replace("+tls", ""), 1.0) as stranger:
        stranger.sendall(b"afserve-kv 1\n" + bytes(64))
        owner.store.compute(chain(1, 3))
        assert pulled(here, owner, chain(1, 3)).complete
        stranger.settimeout(10.0)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(100):
                pass  # why, in TLS's words
