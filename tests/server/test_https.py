"""HTTPS: who trusts the authority is answered, streams included; a renewed certificate is seen without a restart."""

import asyncio
import socket
import ssl
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from afserve.errors import ConfigError
from afserve.launch.processes.http import settings_for
from afserve.launch.sites.authority import issue, subject_of
from afserve.server.http import encryption
from afserve.server.http.encryption import renew, server_context
from afserve.server.http.settings import Listening, ServerSettings

SECONDS = 60.0
NAMES = ("localhost", "127.0.0.1")


@pytest.fixture
def folder(issued) -> Path:
    return issued(addresses=NAMES)


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "authority.pem"))


@pytest.fixture
def secured(run_server, make_backend, folder):
    path = str(folder / "node.pem")
    with run_server(make_backend(), certfile=path, keyfile=path) as server:
        yield server


def test_answers_and_streams(secured, folder):
    body = {"model": "m", "prompt": "the", "max_tokens": 4, "stream": True}
    with httpx.Client(base_url=f"https://127.0.0.1:{secured.port}", verify=trusting(folder)) as client:
        assert client.get("/health").status_code == 200
        body["model"] = client.get("/v1/models").json()["data"][0]["id"]
        said = client.post("/v1/completions", json=body, timeout=SECONDS).text
    assert said.count("data: ") > 2 and "[DONE]" in said, said


@pytest.mark.slow
def test_a_client_that_says_nothing_is_closed(run_server, make_backend, folder):
    path = str(folder / "node.pem")
    with run_server(make_backend(), certfile=path, keyfile=path, head_deadline=5.0) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=40) as silent:
            assert silent.recv(1) == b""
        url = f"https://localhost:{server.port}/health"
        assert httpx.get(url, verify=trusting(folder), timeout=SECONDS).status_code == 200


def test_a_handshake_takes_a_place(run_server, make_backend, folder):
    """The one that has been silent for longest makes room, and then nobody is counted who has gone."""
    path = str(folder / "node.pem")
    with (
        run_server(make_backend(), certfile=path, keyfile=path, max_connections=2) as server,
        ExitStack() as stack,
    ):
        connections = server.app.state.service.connections
        silent = []
        for count in (1, 2):
            silent.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), SECONDS)))
            wait_until(lambda count=count: len(connections) == count)
        answer = httpx.get(f"https://localhost:{server.port}/health", verify=trusting(folder))
        assert answer.status_code == 200
        assert silent[0].recv(1) == b"" and connections.closed >= 1
        silent[1].sendall(b"no TLS at all\r\n" * 8)
        wait_until(lambda: not len(connections))


def test_where_all_places_are_busy_a_handshake_does_not_begin(run_server, make_backend, folder):
    path, body = str(folder / "node.pem"), {"model": "nano", "prompt": "the", "max_tokens": 4}
    with run_server(make_backend(hold_at=1), certfile=path, keyfile=path, max_connections=1) as server:
        connections = server.app.state.service.connections
        with httpx.Client(base_url=f"https://localhost:{server.port}", verify=trusting(folder)) as client:
            body["model"] = client.get("/v1/models").json()["data"][0]["id"]
            with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answered:
                assert answered.status_code == 200
                with socket.create_connection(("127.0.0.1", server.port), SECONDS) as late:
                    assert late.recv(1) == b""
                assert len(connections) == 1 and not connections.closed


def wait_until(holds):
    until = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_who_does_not_trust_the_authority_is_not_answered(secured):
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"https://127.0.0.1:{secured.port}/health")


@pytest.mark.parametrize(
    "garbage", [b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b"\x16\x03\x01\xff\xff", b""]
)
def test_plain_text_and_garbage_disturb_nobody(secured, folder, garbage):
    with socket.create_connection(("127.0.0.1", secured.port)) as knocking:
        knocking.sendall(garbage)
        answer = httpx.get(f"https://localhost:{secured.port}/health", verify=trusting(folder))
    assert answer.status_code == 200


def test_a_head_over_the_limit_is_refused_in_words(secured, folder):
    with (
        socket.create_connection(("127.0.0.1", secured.port)) as plain,
        trusting(folder).wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"x" * 80_000)
        connection.settimeout(SECONDS)
        assert b" 431 " in connection.recv(64)


def test_a_renewed_certificate_is_seen_without_a_restart(folder, monkeypatch):
    monkeypatch.setattr(encryption, "_LOOK_SECONDS", 0.01)
    path = folder / "node.pem"

    async def scenario() -> None:
        context = server_context(str(path), str(path))
        renewing = asyncio.create_task(renew(context, str(path), str(path)))
        server = await asyncio.start_server(
            lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context
        )
        port = server.sockets[0].getsockname()[1]
        before = await asyncio.to_thread(shown, port, folder)
        issue(folder.parent / "mine", subject_of(folder), folder, 0.5)
        until = time.monotonic() + SECONDS
        while (now := await asyncio.to_thread(shown, port, folder)) == before and time.monotonic() < until:
            await asyncio.sleep(0.01)
        assert now != before
        path.write_text("half a file")
        await asyncio.sleep(0.05)
        assert await asyncio.to_thread(shown, port, folder) == now
        renewing.cancel()
        server.close()

    asyncio.run(scenario())


def shown(port: int, folder: Path) -> bytes:
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        trusting(folder).wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        found = connection.getpeercert(binary_form=True)
        assert found is not None
        return found


def test_plain_http_beyond_this_machine_has_to_be_asked_for(folder, tmp_path):
    limits, keys = ServerSettings(), tmp_path / "keys"
    keys.write_text("a-key\n")
    keys.chmod(0o600)
    for asked in (
        Listening(),
        Listening(host="0.0.0.0", insecure_http=True),
        Listening(host="0.0.0.0", ssl_certfile=folder / "node.pem", api_key_file=keys),
        Listening(host="0.0.0.0", ssl_certfile=folder / "node.pem", insecure_http=True),
    ):
        settings_for(asked, limits)
    with pytest.raises(
        ConfigError, match=r"--host 0.0.0.0: other machines .* --ssl-certfile, or --insecure-http"
    ):
        settings_for(Listening(host="0.0.0.0"), limits)
    with pytest.raises(ConfigError, match="--api-keys FILE, or --insecure-http"):
        settings_for(Listening(host="0.0.0.0", ssl_certfile=folder / "node.pem"), limits)
    with pytest.raises(ConfigError, match="--ssl-keyfile: is the key of --ssl-certfile"):
        settings_for(Listening(ssl_keyfile=folder / "node.pem"), limits)
    with pytest.raises(ConfigError, match="cannot be used with the key"):
        settings_for(Listening(ssl_certfile=folder / "authority.pem"), limits)
