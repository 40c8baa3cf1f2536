"""The control plane's port over TLS: who is refused, how each end says it, and that nobody else notices."""

import asyncio
import contextlib
import logging
import socket
from datetime import UTC, datetime, timedelta

import pytest

from afserve import __version__
from afserve.clock import MonotonicClock
from afserve.config import ModelSource
from afserve.control.controller import Controller
from afserve.control.node.stream import ControlStream
from afserve.control.wire.values import Assigned, Register
from afserve.errors import AfserveError, AuthError
from afserve.families.table import load_spec
from afserve.launch.plan.machine import this_machine
from afserve.launch.plan.models import CONFIGS
from afserve.launch.plan.topology import choose
from afserve.launch.plan.wishes import Wishes
from afserve.launch.sites.authority import issue, subject_of
from afserve.tls import Certificates

TOKEN = "t"
YEAR_AGO = datetime.now(UTC) - timedelta(days=365)


def run_of_nano():
    folder = CONFIGS / "nano"
    wishes = Wishes(1, 2, kv_tokens=8192, threads=1)
    return choose(load_spec(folder), ModelSource(str(folder), "nano"), this_machine(), wishes).deployment


def join(address, certificates, role="expert", token=TOKEN):
    """What a node of that role is assigned. Raises what keeps it out."""
    with ControlStream(address, token, certificates) as stream:
        stream.send(Register(role, None, 1, "here", __version__))
        assigned = stream.expect(Assigned, 20.0, "an assignment")
        assert isinstance(assigned, Assigned)
        return str(assigned.node)


def with_controller(scenario, folder):
    """`scenario(address)` in a thread, while a controller with these certificates is there."""

    async def run():
        controller = Controller(run_of_nano(), TOKEN, MonotonicClock())
        address = await controller.start(certificates=Certificates(folder))
        try:
            return await asyncio.to_thread(scenario, address)
        finally:
            await controller.stop()

    return asyncio.run(run())


def test_a_node_of_the_same_authority_joins(issued):
    found = with_controller(lambda at: join(at, Certificates(issued("expert"))), issued("controller"))
    assert found == "expert-0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("roles", "how", "said"),
    [
        (("expert",), {"by": "other"}, "its certificate is refused here: "),
        (("expert",), {"now": YEAR_AGO}, "it refuses the certificate in --certs; .*still valid"),
        (("attention",), {}, "its certificate is for attention.afserve.internal, not for expert"),
    ],
    ids=["unknown authority", "expired", "wrong role"],
)
def test_a_wrong_certificate_is_refused_and_nobody_else_notices(issued, caplog, roles, how, said):
    def scenario(address):
        with pytest.raises(AuthError, match=said):
            join(address, Certificates(issued(*roles, **how)))
        return join(address, Certificates(issued("expert")))

    with caplog.at_level(logging.WARNING):
        assert with_controller(scenario, issued("controller")) == "expert-0"
    assert not how or "was refused" not in caplog.text  # gRPC's own log says it
    assert how or "host (ipv4:127.0.0.1" in caplog.text


def test_a_controller_with_a_nodes_certificate_is_refused(issued):
    def scenario(address):
        with pytest.raises(AuthError, match=r"as controller.afserve.internal: .*Hostname mismatch"):
            join(address, Certificates(issued("expert")))

    with_controller(scenario, issued("expert"))


def test_a_wrong_token_is_refused_and_logged(issued, caplog):
    def scenario(address):
        with pytest.raises(AuthError, match="--token-file"):
            join(address, Certificates(issued("expert")), token="guessed")

    with caplog.at_level(logging.WARNING):
        with_controller(scenario, issued("controller"))
    assert "was refused: the token is not this run's" in caplog.text


def test_garbage_on_the_port_disturbs_nobody(issued):
    def scenario(address):
        host, _, port = address.rpartition(":")
        knocking = []
        for garbage in (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x00\xff" + b"y" * 4096):
            knocking.append(socket.create_connection((host, int(port))))
            with contextlib.suppress(OSError):
                knocking[-1].sendall(garbage)
        found = join(address, Certificates(issued("expert")))
        for connection in knocking:
            connection.close()
        return found

    assert with_controller(scenario, issued("controller")) == "expert-0"


def test_a_renewed_certificate_is_shown_without_a_restart(issued):
    folder, node = issued("controller"), Certificates(issued("expert"))
    authority = folder.parent / "mine"
    late = issued("controller", now=YEAR_AGO)

    def scenario(address):
        with pytest.raises(AuthError, match="certificate has expired"):
            join(address, node)
        issue(authority, subject_of(late), late, 1)
        return join(address, node)

    assert with_controller(scenario, late) == "expert-0"


def test_plain_text_and_tls_do_not_meet(issued):
    async def scenario():
        controller = Controller(run_of_nano(), TOKEN, MonotonicClock())
        address = await controller.start()
        try:
            with pytest.raises(AfserveError, match=r"does not speak TLS .*started without --certs"):
                await asyncio.to_thread(join, address, Certificates(issued("expert")))
        finally:
            await controller.stop()

    asyncio.run(scenario())
