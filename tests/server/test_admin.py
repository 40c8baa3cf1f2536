"""The admin routes: who may, what is passed on, what is refused. The placements themselves are the backend's."""

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

ROUTES = (
    ("GET", "/admin/placement"),
    ("POST", "/admin/placement"),
    ("POST", "/admin/routing/start"),
    ("POST", "/admin/routing/stop"),
    ("GET", "/admin/routing/dump"),
)


@pytest.fixture(scope="module")
def guarded(make_backend: Callable, run_server: Callable) -> Iterator:
    with run_server(make_backend(), admin_keys=("root",)) as server:
        yield server


@pytest.fixture
def admin(guarded) -> Iterator[httpx.Client]:
    guarded.backend.applied.clear()
    guarded.backend.is_ready = True
    headers = {"authorization": "Bearer root"}
    with httpx.Client(base_url=guarded.url, headers=headers, timeout=20) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_only_with_the_admin_key(admin, guarded, method, path):
    for headers in ({"authorization": ""}, {"authorization": "Bearer user"}, {"authorization": "Basic root"}):
        answer = admin.request(method, path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["message"]
    assert not guarded.backend.applied and not guarded.backend.recording


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_closed_where_no_admin_key_is_configured(http, method, path):
    answer = http.request(method, path, headers={"authorization": "Bearer root"})
    assert answer.status_code == 401
    assert "--admin-key-file" in answer.json()["error"]["message"]


def test_an_api_key_is_no_admin_key(make_backend, run_server):
    with (
        run_server(make_backend(), api_keys=("user",), admin_keys=("root",)) as server,
        httpx.Client(base_url=server.url, timeout=20) as client,
    ):
        for key, status in (("user", 401), ("root", 200)):
            answer = client.get("/admin/placement", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status


def test_a_placement_is_passed_on(admin, guarded):
    standing = admin.get("/admin/placement")
    assert standing.headers["content-type"] == "application/json"
    answer = admin.post(
        "/admin/placement", content=standing.content, headers={"content-type": "application/json"}
    )
    assert (answer.status_code, answer.json()) == (202, {"status": "moving"})
    assert [json.loads(text) for text in guarded.backend.applied] == [standing.json()]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b"null", b"\xff", b'{"nodes": 1}', b'{"a": NaN}'])
def test_what_is_no_placement_is_refused(admin, guarded, body):
    answer = admin.post("/admin/placement", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert not guarded.backend.applied


def test_nothing_moves_before_the_run_is_ready(admin, guarded):
    guarded.backend.is_ready = False
    assert admin.post("/admin/placement", json={"layers": []}).status_code == 503
    assert not guarded.backend.applied


def test_other_methods_are_refused(admin):
    assert admin.delete("/admin/placement").status_code == 405
    assert admin.get("/admin/routing/start").status_code == 405
    assert admin.get("/admin/nothing").status_code == 404


def test_a_recording_is_started_looked_at_and_ended(admin, guarded):
    assert admin.post("/admin/routing/start").json() == {"status": "recording"}
    assert guarded.backend.recording
    assert admin.get("/admin/routing/dump").content == b"AFROUTE1 so far"
    assert guarded.backend.recording
    ended = admin.post("/admin/routing/stop")
    assert ended.content == b"AFROUTE1 whole"
    assert ended.headers["content-type"] == "application/octet-stream"
    assert not guarded.backend.recording


def test_status_shows_balance_and_decisions(admin):
    status = admin.get("/status").json()
    assert status["balance"] == [1.25, 1.0] and status["moves"] == 4
    assert "4 moves reach 1.020" in status["decisions"][0]
