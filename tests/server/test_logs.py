"""Log lines: JSON with the request's id, a line per request, and no prompt in any of them unless asked for."""

import json
import logging
import re

import httpx
import pytest

from afserve.errors import ConfigError
from afserve.launch.processes.http import settings_for
from afserve.logs import ACCESS, JsonLines, TextLines, configure, open_access_log
from afserve.server.access.key_file import KeyLimits, KeyRole, add_key
from afserve.server.http.settings import Listening, ServerSettings

SECRET = "xyzzy-a-prompt"
CHAT = {"messages": [{"role": "user", "content": SECRET}]}


@pytest.fixture(autouse=True)
def closed():
    yield
    log = logging.getLogger(ACCESS)
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_line_per_request(make_backend, run_server, tmp_path):
    file, keys = tmp_path / "access.log", tmp_path / "keys"
    secret = add_key(keys, "alice", KeyRole.USER, KeyLimits())
    with run_server(make_backend(), access_log=str(file), log_format="json", keys_file=str(keys)) as server:
        bearer = {"authorization": f"Bearer {secret}"}
        with httpx.Client(base_url=server.url, headers=bearer, timeout=60) as http:
            mine = http.post("/v1/completions", json={"prompt": SECRET}, headers={"x-request-id": "my-id.1"})
            assert mine.headers["x-request-id"] == "my-id.1"
            odd = http.get("/v1/models", headers={"x-request-id": "two words"}).headers["x-request-id"]
            http.get(f"/v1/files/{SECRET}?a={SECRET}")
            http.post("/v1/chat/completions", json={**CHAT, "n": 0})
            http.get("/none", headers={"authorization": "Bearer no"})
    found = lines(file)
    assert [(one["route"], one["status"], one["key"]) for one in found] == [
        ("/v1/completions", 200, "alice"),
        ("/v1/models", 200, "alice"),
        ("/v1/files/{file_id}", 404, "alice"),
        ("/v1/chat/completions", 400, "alice"),
        ("none", 401, ""),
    ]
    first = found[0]
    assert first["request_id"] == "my-id.1" and first["bytes"] == len(mine.content)
    assert first["seconds"] > 0 and first["client"] == "127.0.0.1" and first["time"].endswith("Z")
    assert found[1]["request_id"] == odd != "two words"
    assert SECRET not in file.read_text() and secret not in file.read_text()


def test_prompts_where_they_are_asked_for(make_backend, run_server, tmp_path):
    file = tmp_path / "access.log"
    with run_server(make_backend(), access_log=str(file), log_prompts=True) as server:
        httpx.post(f"{server.url}/v1/completions", json={"prompt": SECRET}, timeout=60)
    assert SECRET in file.read_text()


def test_a_bug_is_a_line_a_count_and_a_failed_span(make_backend, run_server, tmp_path, monkeypatch):
    file, backend = tmp_path / "access.log", make_backend()

    async def broken():
        raise RuntimeError("a bug")

    with run_server(
        backend, access_log=str(file), log_format="json", otlp_endpoint="http://127.0.0.1:9"
    ) as server:
        whole = backend.view
        monkeypatch.setattr(backend, "view", broken)
        put = []
        monkeypatch.setattr(server.app.state.service.spans, "hold_span", put.append)
        assert httpx.get(f"{server.url}/status", timeout=60).status_code == 500
        monkeypatch.setattr(backend, "view", whole)
        counted = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert lines(file)[0]["route"] == "/status" and lines(file)[0]["status"] == 500
    assert re.search(r'^afserve_http_responses(_total)?\{[^}]*"/status"[^}]*"500"[^}]*\} 1', counted, re.M), (
        counted
    )
    assert put[0]["status"] == {"code": 2}


def test_the_file_of_requests_may_be_moved_away(tmp_path):
    file, moved = tmp_path / "access.log", tmp_path / "access.log.1"
    open_access_log(str(file), "text")
    logging.getLogger(ACCESS).info("one")
    file.rename(moved)
    logging.getLogger(ACCESS).info("two")
    assert "one" in moved.read_text() and "two" in file.read_text() and "two" not in moved.read_text()


def test_no_prompt_in_any_log(make_backend, run_server, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    backend = make_backend()
    with (
        run_server(backend, access_log=str(tmp_path / "access.log")) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        for path, body in (
            ("/v1/completions", {"prompt": SECRET}),
            ("/v1/completions", {"prompt": SECRET, "n": 9999}),
            ("/v1/chat/completions", CHAT),
            ("/v1/chat/completions", {**CHAT, "stream": True}),
            ("/v1/embeddings", {"input": SECRET}),
            ("/v1/responses", {"input": SECRET}),
            ("/v1/messages", {**CHAT, "max_tokens": 5}),
            ("/tokenize", {"prompt": SECRET * 2000}),
        ):
            http.post(path, json=body)
        backend.is_ready = False
        http.post("/v1/completions", json={"prompt": SECRET})
    ours = [record for record in caplog.records if record.name.startswith(("afserve", "uvicorn"))]
    assert ours and not [r for r in ours if SECRET in JsonLines().format(r)]
    refused = next(record for record in ours if "not ready" in record.getMessage())
    assert refused.request_id and "/v1/completions" in refused.getMessage()


def test_formats():
    record = logging.LogRecord("afserve.x", logging.WARNING, "f", 1, "it is %s", ("so",), None)
    record.request_id, record.fields = "r1", {"status": 200}
    assert TextLines().format(record).endswith("WARNING it is so [r1]")
    said = json.loads(JsonLines().format(record))
    assert (said["message"], said["request_id"], said["status"], said["level"]) == (
        "it is so",
        "r1",
        200,
        "warning",
    )


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="access-log"):
        open_access_log(str(tmp_path / "none" / "x"), "text")
    with pytest.raises(ConfigError, match="give a file"):
        settings_for(Listening(), ServerSettings(access_log="-"), elsewhere=True)
    with pytest.raises(ConfigError, match="--log-prompts"):
        settings_for(Listening(), ServerSettings(log_prompts=True))
    with pytest.raises(ConfigError, match="--log-format"):
        ServerSettings(log_format="xml")


def test_configure_is_for_processes_that_have_said_nothing(monkeypatch):
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    configure("info", "json")
    assert root.handlers == before and root.level == logging.INFO
    root.setLevel(level)
