"""The data plane over TLS: who is let in, who is refused and where it says so, and that nobody else notices."""

import contextlib
import socket
import ssl
import time
from datetime import UTC, datetime, timedelta

import pytest

from afserve.comm.transport import Box, WireType
from afserve.comm.transports import connect, entrance
from afserve.credentials import Credentials
from afserve.errors import RendezvousError
from afserve.launch.sites.authority import issue, subject_of
from afserve.tls import Certificates
from tests.comm.conformance import LAYOUT, answer, arrive, content, send

BOX = Box(0, 0, 0)
SECONDS = 10.0


def round_trip(front, end, box=BOX, rows=3):
    sent = send(front, box, 4, rows)
    got = arrive(end, box)
    assert got.header == sent.header
    answer(end, box, got.header, 5)
    assert (arrive(front, box).x_RH == content(5, rows, front.layout.hidden)).all()


class Pair:
    """An expert node and an attention node that are connected, and what else knocks there."""

    def __init__(self, folder, layout=LAYOUT):
        self.certificates = None if folder is None else Certificates(folder)
        self.layout = layout
        self.end, self.address = connect.listen(
            "tcp",
            expert=0,
            attention_nodes=2,
            layout=layout,
            credentials=Credentials(certificates=self.certificates),
        )
        self.front = self.joined(self.certificates)

    @property
    def port(self):
        return int(self.address.rpartition(":")[2])

    def joined(self, certificates, attention=0, timeout=SECONDS):
        return connect.connect(
            [self.address],
            attention=attention,
            layout=self.layout,
            timeout=timeout,
            credentials=Credentials(certificates=certificates),
        )

    def close(self):
        self.front.close()
        self.end.close()


@pytest.fixture
def pair(issued):
    made = Pair(issued("attention", "expert"))
    round_trip(made.front, made.end)
    yield made
    round_trip(made.front, made.end)  # whatever happened beside it
    made.close()


def said(caplog, text):
    """A newcomer is refused in a thread of its own."""
    until = time.monotonic() + SECONDS
    while text not in caplog.text and time.monotonic() < until:
        time.sleep(0.01)
    return text in caplog.text


YEAR_AGO = datetime.now(UTC) - timedelta(days=365)


@pytest.mark.parametrize(
    ("roles", "how", "here", "there"),
    [
        (("attention",), {"by": "other"}, "self-signed certificate", "refuses"),
        (("attention",), {"now": YEAR_AGO}, "", "its certificate is refused here: certificate has expired"),
        (("expert",), {}, "", "not for attention.afserve.internal"),
        ((), {"addresses": ("attention",)}, "", "its certificate is for attention, not for"),
    ],
    ids=["unknown authority", "expired", "wrong role", "wrong name"],
)
def test_a_wrong_certificate_is_refused_and_logged(pair, issued, caplog, roles, how, here, there):
    with pytest.raises(RendezvousError, match=f"expert-0.*{here}"):
        pair.joined(
            Certificates(issued(*roles, **how)), attention=1, timeout=3.0
        )  # it tries again until then
    assert said(caplog, "127.0.0.1 was turned away") and there in caplog.text


def test_an_expert_node_with_a_certificate_of_another_role_is_refused(issued):
    end, address = connect.listen(
        "tcp",
        expert=0,
        attention_nodes=2,
        layout=LAYOUT,
        credentials=Credentials(certificates=Certificates(issued("attention"))),
    )
    with pytest.raises(RendezvousError, match=r"expert-0 at .*Hostname mismatch"):
        connect.connect(
            [address],
            attention=0,
            layout=LAYOUT,
            timeout=SECONDS,
            credentials=Credentials(certificates=Certificates(issued("attention"))),
        )
    end.close()


def test_tls_and_plain_text_do_not_meet(pair, issued):
    with pytest.raises(RendezvousError, match=r"this node has no certificates and .* asks for them"):
        pair.joined(None, attention=1)
    end, address = connect.listen("tcp", expert=0, attention_nodes=1, layout=LAYOUT)
    with pytest.raises(RendezvousError, match="give --certs on all hosts or on none"):
        connect.connect(
            [address],
            attention=0,
            layout=LAYOUT,
            timeout=SECONDS,
            credentials=Credentials(certificates=pair.certificates),
        )
    end.close()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"x" * 300, b""])
def test_garbage_is_refused_and_logged(pair, caplog, garbage):
    with socket.create_connection(("127.0.0.1", pair.port)) as knocking:
        knocking.sendall(garbage)
        with contextlib.suppress(OSError):  # it has hung up already
            knocking.shutdown(socket.SHUT_WR)
        assert said(caplog, "127.0.0.1 was turned away")


@pytest.mark.parametrize("secured", [True, False])
def test_who_says_nothing_keeps_nobody_waiting(issued, secured):
    made = Pair(issued("attention", "expert") if secured else None)
    silent = [socket.create_connection(("127.0.0.1", made.port)) for _ in range(8)]
    began = time.monotonic()
    other = made.joined(made.certificates, attention=1)
    assert time.monotonic() - began < 4 * entrance._GREETING_SECONDS  # not eight of them, one after the other
    round_trip(other, made.end, Box(1, 0, 0))
    round_trip(made.front, made.end)
    other.close()
    made.close()
    for connection in silent:
        connection.close()


def test_the_oldest_of_a_crowd_makes_room(monkeypatch):
    monkeypatch.setattr(entrance, "_AT_ONCE", 2)
    made = Pair(None)
    crowd = [socket.create_connection(("127.0.0.1", made.port)) for _ in range(4)]
    for connection in crowd[:2]:
        connection.settimeout(SECONDS)
        assert connection.recv(1) == b""
    round_trip(made.front, made.end)
    made.close()
    for connection in crowd:
        connection.close()


@pytest.mark.slow
def test_large_messages_pass_in_pieces(issued):
    from dataclasses import replace

    made = Pair(
        issued("attention", "expert"),
        replace(LAYOUT, hidden=4096, max_rows=512, dispatch_wire=WireType.FLOAT32),
    )
    round_trip(made.front, made.end, rows=512)
    made.close()


def test_a_renewed_certificate_is_shown_to_the_next_newcomer(pair):
    before = shown(pair)
    folder = pair.certificates.folder
    issue(folder.parent / "mine", subject_of(folder), folder, 0.5)
    assert shown(pair) != before
    other = pair.joined(pair.certificates, attention=1)
    round_trip(other, pair.end, Box(1, 0, 0))
    other.close()


def shown(pair):
    with (
        socket.create_connection(("127.0.0.1", pair.port)) as plain,
        pair.certificates.client().wrap_socket(plain, server_hostname="expert.afserve.internal") as secured,
    ):
        assert secured.version() == "TLSv1.3"
        return ssl.DER_cert_to_PEM_cert(secured.getpeercert(binary_form=True))
