"""The admin routes: who may, what is passed on, what is refused. The placements themselves are the backend's."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import pytest
from click.testing import CliRunner

from afserve import AsyncClient, Client
from afserve.cli.scale import scale
from afserve.control.wire.change_values import (
    VERBS,
    Changed,
    DrainOne,
    Fault,
    NewPhase,
    NewRole,
    Restart,
    ScaleTo,
    Verb,
)
from afserve.control.wire.changes import decode_change, decode_changed, encode_change, encode_changed
from afserve.errors import ProtocolError

ROUTES = (
    ("GET", "/admin/placement"),
    ("POST", "/admin/placement"),
    ("POST", "/admin/scale"),
    ("POST", "/admin/drain"),
    ("POST", "/admin/restart"),
    ("POST", "/admin/role"),
    ("POST", "/admin/phase"),
    ("POST", "/admin/fault"),
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
    guarded.backend.changes.clear()
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
    backend = guarded.backend
    assert not backend.applied and not backend.recording and not backend.changes


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
        for key, status in (("user", 403), ("root", 200)):
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


CHANGES = (
    ("scale", {"attention": "+1", "experts": 1}, ScaleTo({"attention": "+1", "experts": "1"})),
    ("drain", {"node": "expert-1"}, DrainOne("expert-1")),
    ("restart", {"nodes": ["expert-1", "attention-0"]}, Restart(("expert-1", "attention-0"))),
    ("restart", {"all": True}, Restart()),
    ("role", {"node": "expert-1", "role": "attention"}, NewRole("expert-1", "attention")),
    ("phase", {"node": "attention-1", "phase": "decode"}, NewPhase("attention-1", "decode")),
    ("scale", {"prefill": "+1", "decode": 2}, ScaleTo({"prefill": "+1", "decode": "2"})),
    ("fault", {"node": "expert-1", "fault": "stop", "seconds": 2.5}, Fault("expert-1", "stop", 2.5)),
)


@pytest.mark.parametrize(("path", "body", "change"), CHANGES)
def test_a_change_is_passed_on_and_says_who_comes_and_goes(admin, guarded, path, body, change):
    answer = admin.post(f"/admin/{path}", json=body)
    assert answer.status_code == 202 and guarded.backend.changes == [change]
    assert answer.json() == {
        "counts": {"attention": 2, "experts": 1, "gateways": 0},
        "coming": ["attention-1"],
        "going": ["expert-1"],
        "notes": ["a note"],
    }


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("scale", {}, 400, "names no pool"),
        ("scale", {"attention": None}, 400, "attention"),
        ("scale", {"attention": True}, 400, "attention"),
        ("scale", {"attention": 1.5}, 400, "attention"),
        ("scale", {"attention": [1]}, 400, "attention"),
        ("drain", {}, 400, "node: is missing"),
        ("phase", {"node": "attention-1"}, 400, "its new phase"),
        ("drain", {"node": 1}, 400, "node"),
        ("drain", {"node": "expert-9"}, 404, "none of this run"),
        ("fault", {"node": "expert-1"}, 400, "say which node and how"),
        ("fault", {"node": "expert-1", "fault": "stop", "seconds": -1}, 400, "seconds"),
        ("fault", {"node": "expert-1", "fault": 3}, 400, "fault"),
        ("role", {"node": "expert-1"}, 400, "its new role"),
        ("role", {"node": "expert-1", "role": 1}, 400, "role"),
        ("restart", {}, 400, "say which"),
        ("restart", {"nodes": ["a"], "all": True}, 400, "say which"),
        ("restart", {"nodes": [1]}, 400, "nodes"),
    ],
)
def test_a_change_that_is_none_is_refused(admin, guarded, path, body, status, said):
    answer = admin.post(f"/admin/{path}", json=body)
    assert answer.status_code == status and said in answer.json()["error"]["message"]
    assert not guarded.backend.changes


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("scale", {"attention": "+1"}),
        ("drain", {"node": "expert-1"}),
        ("restart", {"all": True}),
        ("role", {"node": "expert-1", "role": "attention"}),
    ],
)
def test_what_repairs_is_taken_while_the_run_is_not_ready(admin, guarded, path, body):
    guarded.backend.changes.clear()
    guarded.backend.is_ready = False
    try:
        assert admin.post(f"/admin/{path}", json=body).status_code == 202
    finally:
        guarded.backend.is_ready = True
    assert len(guarded.backend.changes) == 1


def test_the_client_has_a_method_for_each_change(guarded):
    guarded.backend.changes.clear()
    guarded.backend.is_ready = True
    with Client(guarded.url, api_key="root") as client:
        client.scale(attention="+1", experts=1)
        client.drain("expert-1")
        client.restart("expert-1", "attention-0")
        assert client.restart()["notes"] == ["a note"]
        client.change_role("expert-1", "attention")
        client.change_phase("attention-1", "decode")
        client.scale(prefill="+1", decode=2)
        client.fault("expert-1", "stop", 2.5)
    assert guarded.backend.changes == [change for _, _, change in CHANGES]


def test_so_has_the_async_client(guarded):
    guarded.backend.changes.clear()

    async def all_of_them():
        async with AsyncClient(guarded.url, api_key="root") as client:
            await client.scale(attention="+1", experts=1)
            await client.drain("expert-1")
            await client.restart("expert-1", "attention-0")
            await client.restart()
            await client.change_role("expert-1", "attention")
            await client.change_phase("attention-1", "decode")
            await client.scale(prefill="+1", decode=2)
            await client.fault("expert-1", "stop", 2.5)

    asyncio.run(all_of_them())
    assert guarded.backend.changes == [change for _, _, change in CHANGES]


@pytest.mark.parametrize("change", [change for _, _, change in CHANGES])
def test_changes_travel_to_the_controller_and_back(change):
    assert decode_change(encode_change(change)) == change
    changed = Changed({"attention": 1}, ("a",), (), ("n",))
    assert decode_changed(encode_changed(changed)) == changed


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"kind": "ScaleTo"}', b'{"kind": "Restart"}', b"\xff"])
def test_bytes_that_are_no_change_are_refused(data):
    for decode in (decode_change, decode_changed):
        with pytest.raises(ProtocolError):
            decode(data)


@dataclass(frozen=True, slots=True)
class Nap:
    node: str
    seconds: float = field(default=1.0, metadata={"most": 60.0})


@pytest.fixture
def napping(monkeypatch, make_backend, run_server):
    """A server of an afserve that has one verb more."""
    monkeypatch.setitem(VERBS, "nap", Verb("nap", Nap, "Let a node rest.", "node: say who is tired"))
    with run_server(make_backend(), admin_keys=("root",)) as server:
        yield server


def test_a_new_verb_is_declared_once(napping):
    """Route, body, refusals, document, both clients and the message to the controller follow."""
    with Client(napping.url, api_key="root") as client:
        assert client.change(Nap("expert-1", 2.5))["notes"] == ["a note"]

    async def once_more():
        async with AsyncClient(napping.url, api_key="root") as client:
            await client.change(Nap("expert-1"))

    asyncio.run(once_more())
    assert napping.backend.changes == [Nap("expert-1", 2.5), Nap("expert-1", 1.0)]
    assert decode_change(encode_change(Nap("expert-1", 2.5))) == Nap("expert-1", 2.5)
    with httpx.Client(base_url=napping.url, headers={"authorization": "Bearer root"}, timeout=20) as direct:
        for body, said in (
            ({}, "node: say who is tired"),
            ({"node": "a", "seconds": 61}, "seconds: 61 is outside [0.0, 60.0]"),
        ):
            answer = direct.post("/admin/nap", json=body)
            assert answer.status_code == 400 and said in answer.json()["error"]["message"]
        assert direct.get("/admin/nap").status_code == 405
        document = direct.get("/openapi.json").json()
    operation = document["paths"]["/admin/nap"]["post"]
    assert operation["summary"] == "Let a node rest." and operation["tags"] == ["admin"]
    assert document["components"]["schemas"]["Nap"] == {
        "type": "object",
        "required": ["node"],
        "properties": {
            "node": {"type": "string"},
            "seconds": {"type": "number", "minimum": 0, "maximum": 60.0},
        },
    }


def test_a_change_is_told_as_json(guarded, admin, tmp_path):
    key = tmp_path / "key"
    key.write_text("root")
    flags = ["--url", guarded.url, "--admin-key-file", str(key), "--no-wait", "--json"]
    done = CliRunner().invoke(scale, ["--attention", "+1", *flags], catch_exceptions=False)
    said = json.loads(done.output)
    assert (
        done.exit_code == 0
        and said["done"] is False
        and {"counts", "coming", "going", "notes"} <= said.keys()
    )


def test_a_body_that_is_too_long_for_a_change_is_refused_before_it_is_read(admin):
    body = b'{"node": "' + b"x" * (1 << 16) + b'"}'
    answer = admin.post("/admin/drain", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "takes at most 65536" in answer.json()["error"]["message"]
