"""Keys of a file: what each opens, how much of it, and that a revoked one opens nothing, without a restart."""

import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from starlette.datastructures import Headers

from afserve.cli.main import run as command
from afserve.clock import FakeClock
from afserve.engine.scheduling.request import NO_TENANT, Tenant
from afserve.errors import AuthError, ConfigError
from afserve.launch.processes.http import settings_for
from afserve.server.access import key_file
from afserve.server.access.key_file import (
    KeyLimits,
    KeyRole,
    add_key,
    digest_of,
    read_key_file,
    revoke_key,
)
from afserve.server.access.keyring import LOOK_SECONDS, PAGE_PREFIX, AccessRules, ForbiddenError, Keyring
from afserve.server.access.ledger import Bucket
from afserve.server.http.settings import Listening, ServerSettings

ASK = {"prompt": "x", "max_tokens": 2}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys.toml"


def bearer(secret):
    return {"authorization": f"Bearer {secret}"}


def ask(server, secret, **fields):
    return httpx.post(
        f"{server.url}/v1/completions", json={**ASK, **fields}, headers=bearer(secret), timeout=60
    )


# ---- the file


def test_a_key_is_in_no_file(file):
    secret = add_key(file, "alice", KeyRole.USER, KeyLimits(concurrent=2))
    assert secret.startswith("afs_") and len(secret) > 40
    assert secret not in file.read_text() and file.stat().st_mode & 0o777 == 0o600
    (key,) = read_key_file(file)
    assert (key.name, key.digest, key.limits) == ("alice", digest_of(secret), KeyLimits(concurrent=2))
    with pytest.raises(ConfigError, match="take another name"):
        add_key(file, "alice", KeyRole.USER, KeyLimits())
    with pytest.raises(ConfigError, match="has no key 'bob'"):
        revoke_key(file, "bob")
    assert not list(file.parent.glob(".keys*"))


def test_a_file_is_refused_by_table_and_field(file):
    good = f'[a]\nsha256 = "{"0" * 64}"\n'
    for text, said in (
        ("x", "is not TOML"),
        ('a = "b"', "'a': is not a table"),
        ('["a b"]\nsha256 = ""', "'a b': is not a table"),
        ("[a]\nsha256 = 3", "sha256: 3 is not a text"),
        ('[a]\nsha256 = "ab"', "is not 64 digits"),
        (good + 'role = "king"', "role: 'king' is none of user, admin, scrape"),
        (good + "requests = 3", "requests: is none of"),
        (good + "concurrent = 0", r"\[a\] concurrent: 0 is not"),
        (good + "tokens_per_minute = true", "tokens_per_minute: True is not"),
        (good + good.replace("[a]", "[b]"), "b and a have the same hash"),
    ):
        file.write_text(text)
        file.chmod(0o600)
        with pytest.raises(ConfigError, match=said):
            read_key_file(file)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key_file(file)


def test_the_commands(file, capsys):
    limits = ("--requests-per-minute", "60", "--priority", "5", "--share", "7")
    assert command(["keys", "new", "alice", "--file", str(file), *limits]) == 0
    secret = capsys.readouterr().out.strip()
    assert command(["keys", "list", "--file", str(file)]) == 0
    shown = capsys.readouterr().out
    assert read_key_file(file)[0].limits.share == 7 and "SHARE" in shown and " 7 " in shown
    assert "alice" in shown and "60" in shown and secret not in shown and digest_of(secret) not in shown
    assert command(["keys", "revoke", "alice", "--file", str(file)]) == 0
    assert read_key_file(file)[0].revoked
    assert command(["keys", "new", "a/b", "--file", str(file)]) == 2
    assert command(["keys", "new", "bob", "--file", str(file), "--share", "0"]) == 2


def test_a_file_is_read_again_at_most_once_a_second(file, caplog):
    clock, secret = FakeClock(), add_key(file, "alice", KeyRole.USER, KeyLimits())
    ring = Keyring(path=str(file), clock=clock)
    revoke_key(file, "alice")
    assert ring.find_key(secret) is not None, "not looked at yet"
    clock.advance(LOOK_SECONDS)
    assert ring.find_key(secret) is None
    other = add_key(file, "bob", KeyRole.USER, KeyLimits())
    good = file.read_text()
    file.write_text("[broken")
    clock.advance(LOOK_SECONDS)
    assert ring.find_key(other) is None and "stay in force" in caplog.text
    file.write_text(good)
    clock.advance(LOOK_SECONDS)
    assert (
        ring.find_key(other) is not None
        and ring.key_named("bob") is not None
        and ring.key_named("alice") is None
    )


CHANGES = {
    "read by others": lambda file: file.chmod(0o644),
    "garbage": lambda file: file.write_text("[broken"),
    "binary": lambda file: file.write_bytes(bytes(range(256))),
    "removed": lambda file: file.unlink(),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "too long": lambda file: file.write_text("#" * (key_file.MOST_BYTES + 1)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_that_cannot_be_used_any_more_is_logged_once(file, caplog, change):
    clock, secret = FakeClock(), add_key(file, "alice", KeyRole.USER, KeyLimits())
    ring = Keyring(path=str(file), clock=clock)
    change(file)
    for _ in range(5):
        clock.advance(LOOK_SECONDS)
        ring.read_changes()
    assert ring.find_key(secret) is not None
    assert caplog.text.count("the keys that were read before stay in force") == 1


def test_a_file_that_is_private_again_is_read_again(file, caplog):
    clock, secret = FakeClock(), add_key(file, "alice", KeyRole.USER, KeyLimits())
    ring = Keyring(path=str(file), clock=clock)
    for mode in (0o644, 0o600, 0o640, 0o600):
        file.chmod(mode)
        clock.advance(LOOK_SECONDS)
        ring.read_changes()
    assert ring.find_key(secret) is not None
    assert caplog.text.count("stay in force") == caplog.text.count("read again") == 2


def test_who_may_listen_where(file):
    add_key(file, "alice", KeyRole.USER, KeyLimits())
    settings = settings_for(Listening(host="0.0.0.0", insecure_http=True, api_keys=file), ServerSettings())
    assert settings.keys_file == str(file)
    assert settings_for(Listening(host="0.0.0.0", insecure_http=True), ServerSettings())
    with pytest.raises(ConfigError, match="plain text"):
        settings_for(Listening(host="0.0.0.0", api_keys=file), ServerSettings())
    with pytest.raises(ConfigError, match="afserve keys new"):
        settings_for(Listening(host="0.0.0.0", ssl_certfile=file), ServerSettings())


# ---- what a key opens


@pytest.mark.slow
def test_roles(make_backend, run_server, file):
    user = add_key(file, "u", KeyRole.USER, KeyLimits())
    admin = add_key(file, "a", KeyRole.ADMIN, KeyLimits())
    with (
        run_server(make_backend(), keys_file=str(file)) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):

        def status(path, secret):
            return http.get(path, headers=bearer(secret) if secret else {}).status_code

        for path, wanted in (
            ("/v1/models", (401, 401, 200, 200)),
            ("/metrics", (401, 401, 200, 200)),
            ("/status", (401, 401, 403, 200)),
            ("/admin/placement", (401, 401, 403, 200)),
            ("/health", (200, 200, 200, 200)),
        ):
            assert tuple(status(path, key) for key in (None, "afs_none", user, admin)) == wanted, path
        refused = http.get("/status", headers=bearer(user)).json()["error"]
        assert refused["type"] == "permission_error" and "this key is one for user" in refused["message"]
        scrape = add_key(file, "s", KeyRole.SCRAPE, KeyLimits())
        until = time.monotonic() + 60
        while status("/metrics", scrape) != 200:
            assert time.monotonic() < until
            time.sleep(0.1)
        assert [status("/metrics", key) for key in (user, admin)] == [403, 200], "it has a key of its own now"
        assert [status(path, scrape) for path in ("/v1/models", "/status")] == [403, 403]


def test_a_revoked_key_opens_nothing_to_others(file):
    user = bearer(add_key(file, "u", KeyRole.USER, KeyLimits()))
    add_key(file, "a", KeyRole.ADMIN, KeyLimits())
    add_key(file, "s", KeyRole.SCRAPE, KeyLimits())
    for name in ("a", "s"):
        revoke_key(file, name)
    door = AccessRules(Keyring(path=str(file)), open_metrics=False)
    assert door.pass_by("/v1/models", Headers(user)).name == "u"
    for path in ("/status", "/live", "/metrics"):
        with pytest.raises(ForbiddenError, match="this key is one for user"):
            door.pass_by(path, Headers(user))


def test_a_key_that_opens_both_is_asked_for_everywhere():
    """As a container without arguments has it: one file for --api-key-file and --admin-key-file."""
    door = AccessRules(Keyring(["k"], ["k"]), open_metrics=False)
    for path in ("/v1/completions", "/v1/models", "/status", "/admin/scale", "/metrics"):
        with pytest.raises(AuthError, match="an API key is needed"):
            door.pass_by(path, Headers())
        assert door.pass_by(path, Headers({"authorization": "Bearer k"})).role is KeyRole.ADMIN


def test_a_file_never_grows_beyond_what_is_read(file, monkeypatch):
    monkeypatch.setattr(key_file, "MOST_BYTES", 700)
    with pytest.raises(ConfigError, match="remove the tables of revoked keys"):
        for number in range(9):
            add_key(file, f"k{number}", KeyRole.USER, KeyLimits())
    assert read_key_file(file)


def test_every_route_needs_a_key(make_backend, run_server, file):
    add_key(file, "u", KeyRole.USER, KeyLimits())
    with (
        run_server(make_backend(), keys_file=str(file)) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        held = [route for route in server.app.routes if not route.path.startswith(PAGE_PREFIX)]
        for route in held:
            path = route.path.replace("{", "").replace("}", "").replace(":path", "")
            for method in route.methods - {"HEAD"}:
                status = http.request(method, path).status_code
                open_ = path in ("/health", "/ping", "/ready", "/", "/docs")
                assert (status == 200) if open_ else (status == 401), (method, path, status)


# ---- how much of it


def test_a_bucket():
    bucket = Bucket.full(60, 100.0).less(60)
    assert bucket.remaining == 0 and bucket.seconds_until(1) == 1.0
    assert bucket.filled(110.0).remaining == 10 and bucket.filled(9e9).remaining == 60
    assert bucket.filled(50.0).level == 0.0, "a clock that was set back"


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_requests_per_minute(make_backend, run_server, file, tmp_path, shared):
    secret = add_key(file, "u", KeyRole.USER, KeyLimits(requests_per_minute=2))
    other = add_key(file, "v", KeyRole.USER, KeyLimits())
    state = {"state_dir": str(tmp_path)} if shared else {}
    with (
        run_server(make_backend(), keys_file=str(file), **state) as one,
        run_server(make_backend(), keys_file=str(file), **state) as two,
    ):
        replies = [ask(one, secret), ask(two if shared else one, secret), ask(one, secret)]
        assert [reply.status_code for reply in replies] == [200, 200, 429]
        assert replies[0].headers["x-ratelimit-limit-requests"] == "2"
        assert [reply.headers["x-ratelimit-remaining-requests"] for reply in replies] == ["1", "0", "0"]
        refused = replies[2]
        assert 1 <= int(refused.headers["retry-after"]) <= 31
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert "requests_per_minute" in refused.json()["error"]["message"]
        assert (
            ask(one, other).status_code == 200 and "x-ratelimit-limit-requests" not in ask(one, other).headers
        )
        assert ask(two, secret).status_code == (429 if shared else 200)


def test_tokens_per_minute(make_backend, run_server, file):
    secret = add_key(file, "u", KeyRole.USER, KeyLimits(tokens_per_minute=6))
    with run_server(make_backend(eos=False), keys_file=str(file)) as server:
        first = ask(server, secret, max_tokens=200)  # known once they were used: it may go over
        assert first.status_code == 200
        used = first.json()["usage"]["total_tokens"]
        second = ask(server, secret)
        assert second.status_code == 429 and second.headers["x-ratelimit-remaining-tokens"] == "0"
        assert int(second.headers["retry-after"]) > 60 * (used - 6) / 6 - 60


def test_concurrent_requests(make_backend, run_server, file):
    secret = add_key(file, "u", KeyRole.USER, KeyLimits(concurrent=1))
    with run_server(make_backend(hold_at=1), keys_file=str(file)) as server:
        said = []
        running = threading.Thread(target=lambda: said.append(ask(server, secret).status_code))
        running.start()
        assert server.backend.holding.wait(60)
        refused = ask(server, secret)
        assert refused.status_code == 429 and "concurrent" in refused.json()["error"]["message"]
        server.backend.release.set()
        running.join()
        assert said == [200] and ask(server, secret).status_code == 200


def test_a_request_that_outlives_its_connection_is_still_one(make_backend, run_server, file):
    secret = add_key(file, "u", KeyRole.USER, KeyLimits(concurrent=1))
    backend = make_backend(hold_at=1)
    with run_server(backend, keys_file=str(file)) as server:
        url, body = f"{server.url}/v1/completions", {**ASK, "resume": 60, "stream": True}
        with httpx.stream("POST", url, json=body, headers=bearer(secret), timeout=60) as reply:
            assert reply.status_code == 200 and backend.holding.wait(60)
        until = time.monotonic() + 60
        while 'reason="left"' not in httpx.get(f"{server.url}/metrics", headers=bearer(secret)).text:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert ask(server, secret).status_code == 429, "it is computed"
        backend.release.set()
        while ask(server, secret).status_code != 200:
            assert time.monotonic() < until
            time.sleep(0.05)


@contextmanager
def adopting(make_backend, run_server, file, secret, **script):
    """A second server, where the client of a request comes back of which the first server has told 9 tokens."""
    first = make_backend(eos=False, hold_at=9)
    second = make_backend(eos=False, nodes_kept=first.nodes_kept, **script)
    with run_server(first, keys_file=str(file)) as one, run_server(second, keys_file=str(file)) as two:
        body = {**ASK, "max_tokens": 40, "resume": 60, "stream": True, "request_id": "ab" * 16}
        url = f"{one.url}/v1/completions"
        with httpx.stream("POST", url, json=body, headers=bearer(secret), timeout=60) as begun:
            assert begun.status_code == 200 and first.holding.wait(60)
            yield two, f"{two.url}/v1/requests/cmpl-{'ab' * 16}"


@pytest.mark.slow
def test_a_request_that_another_gateway_goes_on_with_counts_there(make_backend, run_server, file):
    secret = add_key(file, "u", KeyRole.USER, KeyLimits(concurrent=1))
    stranger = add_key(file, "v", KeyRole.USER, KeyLimits())
    with adopting(make_backend, run_server, file, secret, hold_at=20) as (server, url):
        for path in ("", "/events", "/answer"):
            assert httpx.get(url + path, headers=bearer(stranger)).status_code == 404
        assert httpx.delete(url, headers=bearer(stranger)).status_code == 404
        assert ask(server, secret).status_code == 200, "nobody has come back for it"
        with httpx.stream("GET", f"{url}/events", headers=bearer(secret), timeout=60) as rest:
            assert rest.status_code == 200 and server.backend.holding.wait(60)
            assert ask(server, secret).status_code == 429
            assert ask(server, stranger).status_code == 200
            server.backend.release.set()
            assert "[DONE]" in rest.read().decode()
        until = time.monotonic() + 60
        while ask(server, secret).status_code != 200:
            assert time.monotonic() < until
            time.sleep(0.05)


@pytest.mark.slow
def test_a_key_pays_at_the_next_gateway_for_what_none_has_charged(make_backend, run_server, file):
    secret = add_key(file, "u", KeyRole.USER, KeyLimits())
    with adopting(make_backend, run_server, file, secret, per_event=4) as (server, url):
        server.backend.nodes_kept.unheard = 3
        assert httpx.get(f"{url}/answer", headers=bearer(secret), timeout=60).status_code == 200
        accounts = server.app.state.service.accounts
        assert accounts.account_for(accounts.ring.find_key(secret)).spent == 40 - (9 - 3)


def test_the_earliest_turn(make_backend, run_server, file):
    secret = add_key(file, "u", KeyRole.USER, KeyLimits(priority=10))
    with run_server(make_backend(), keys_file=str(file)) as server:
        for asked in ({}, {"priority": -5}, {"priority": 20}):
            assert ask(server, secret, **asked).status_code == 200
        assert [request.priority for request in server.backend.requests] == [10, 10, 20]


def test_without_keys_all_are_one_tenant(make_backend, run_server):
    with run_server(make_backend()) as server:
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=60).status_code == 200
        assert [request.tenant for request in server.backend.requests] == [NO_TENANT]


def test_requests_are_of_their_key_and_have_its_share(make_backend, run_server, file):
    heavy = add_key(file, "heavy", KeyRole.USER, KeyLimits(share=4))
    plain = add_key(file, "plain", KeyRole.USER, KeyLimits())
    with run_server(make_backend(), keys_file=str(file)) as server:
        for secret in (heavy, plain):
            assert ask(server, secret).status_code == 200
        assert ask(server, heavy, tenant="plain").status_code in (200, 400)
        found = [request.tenant for request in server.backend.requests]
    assert found[:2] == [Tenant("heavy", 4), Tenant("plain")] and Tenant("plain") not in found[2:]
