"""What a state directory keeps: over lives of a gateway, and between gateways of a host."""

import asyncio
import io
import json
import sqlite3
import time

import httpx
import openai
import pytest

from afserve.errors import ConfigError
from afserve.server.access.key_file import KeyLimits, KeyRole, add_key, revoke_key
from afserve.server.batches import work
from afserve.server.state.database import FILE, prepare_folder

BODY = {"model": "tiny", "prompt": "x", "max_tokens": 2}


def client(server, key="none"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def lines(count):
    asked = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": BODY} for i in range(count)
    ]
    return io.BytesIO("\n".join(map(json.dumps, asked)).encode())


def start(api, count):
    file_id = api.files.create(file=("asked.jsonl", lines(count)), purpose="batch").id
    return api.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h")


def until(said, wanted, seconds=60):
    end = time.monotonic() + seconds
    while (found := said()) != wanted:
        assert time.monotonic() < end, found
        time.sleep(0.05)


@pytest.mark.slow
def test_a_batch_goes_on_in_the_next_life(make_backend, run_server, tmp_path, monkeypatch):
    state, first = str(tmp_path), make_backend(hold_at=1)
    with run_server(first, state_dir=state, drain_seconds=0.1) as server, client(server) as api:
        batch = start(api, 40)
        assert first.holding.wait(60)
        first.hold_at = None  # 16 wait at their second token, so some of the rest are answered
        first.release.set()
        until(lambda: api.batches.retrieve(batch.id).request_counts.completed > 0, True)
    second = make_backend()
    with run_server(second, state_dir=state) as server, client(server) as api:
        until(lambda: api.batches.retrieve(batch.id).status, "completed")
        done = api.batches.retrieve(batch.id)
        assert (done.request_counts.completed, done.request_counts.failed) == (40, 0)
        said = [json.loads(line) for line in api.files.content(done.output_file_id).text.splitlines()]
        assert [each["custom_id"] for each in said] == [f"r{i}" for i in range(40)]
    assert len(second.requests) < 40, "what was answered is not asked again"


@pytest.mark.slow
def test_gateways_share_what_they_keep(make_backend, run_server, tmp_path, monkeypatch):
    monkeypatch.setattr(work, "LOOK_SECONDS", 0.1)
    state = str(tmp_path)
    with (
        run_server(make_backend(), state_dir=state) as one,
        run_server(make_backend(hold_at=1), state_dir=state) as two,
        client(one) as here,
        client(two) as there,
    ):
        kept = here.responses.create(model="tiny", input="hello")
        follows = there.responses.retrieve(kept.id)
        assert follows.output_text == kept.output_text
        assert here.files.list().data == []
        batch = start(there, 4)
        assert here.batches.retrieve(batch.id).status == "in_progress"
        assert two.backend.holding.wait(60)
        here.batches.cancel(batch.id)  # it is the other gateway's, which ends it
        until(lambda: here.batches.retrieve(batch.id).status, "cancelled")
        here.responses.delete(kept.id)
        with pytest.raises(openai.NotFoundError):
            there.responses.retrieve(kept.id)


@pytest.mark.slow
def test_what_a_key_owns_is_nobody_elses(make_backend, run_server, tmp_path):
    keys = tmp_path / "keys"
    mine, yours = (add_key(keys, name, KeyRole.USER, KeyLimits()) for name in ("me", "you"))
    with (
        run_server(make_backend(), keys_file=str(keys)) as server,
        client(server, mine) as me,
        client(server, yours) as you,
    ):
        kept = me.responses.create(model="tiny", input="hello")
        batch = start(me, 2)
        until(lambda: me.batches.retrieve(batch.id).status, "completed")
        for asked in (
            lambda: you.responses.retrieve(kept.id),
            lambda: you.responses.create(model="tiny", input="x", previous_response_id=kept.id),
            lambda: you.batches.retrieve(batch.id),
            lambda: you.batches.cancel(batch.id),
            lambda: you.files.content(batch.input_file_id),
            lambda: you.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                asked()
        assert not you.files.list().data and not you.batches.list().data
        assert len(me.files.list().data) == 2


@pytest.mark.slow
def test_a_busy_line_is_asked_again(make_backend, run_server, monkeypatch):
    monkeypatch.setattr("afserve.server.batches.batch.FIRST_PAUSE", 0.05)
    backend = make_backend(is_ready=False)
    with run_server(backend) as server, client(server) as api:
        batch = start(api, 3)
        time.sleep(0.3)
        assert api.batches.retrieve(batch.id).request_counts.failed == 0
        backend.is_ready = True
        until(lambda: api.batches.retrieve(batch.id).status, "completed")
        assert api.batches.retrieve(batch.id).request_counts.completed == 3


@pytest.mark.slow
def test_lines_keep_to_the_limits_of_their_key(make_backend, run_server, tmp_path, monkeypatch):
    monkeypatch.setattr(work, "LONGEST_PAUSE", 0.1)
    keys, backend = tmp_path / "keys", make_backend()
    secret = add_key(keys, "me", KeyRole.USER, KeyLimits(requests_per_minute=3))
    with run_server(backend, keys_file=str(keys)) as server, client(server, secret) as me:
        batch = start(me, 40)  # the file and the batch are requests too
        assert backend.ended.wait(60)
        time.sleep(0.3)
        assert len(backend.requests) < 20, "the others wait for their minute"
        revoke_key(keys, "me")
        until(lambda: state_of(server.app.state.service, batch.id), "cancelled")


def state_of(service, batch_id):
    async def ask():
        return await service.database.transact(
            lambda db: db.execute("SELECT status FROM batches WHERE id=?", (batch_id,)).fetchone()[0]
        )

    return asyncio.run(ask())


def test_a_folder_that_cannot_be_used(tmp_path):
    fresh = tmp_path / "a" / "state"
    assert prepare_folder(fresh) == str(fresh)
    assert fresh.stat().st_mode & 0o777 == 0o700 and (fresh / FILE).stat().st_mode & 0o777 == 0o600
    fresh.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        prepare_folder(fresh)
    fresh.chmod(0o700)
    with sqlite3.connect(fresh / FILE) as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(ConfigError, match="has format 99"):
        prepare_folder(fresh)
    (fresh / FILE).write_bytes(b"no database at all" * 100)
    with pytest.raises(ConfigError, match="remove it"):
        prepare_folder(fresh)


def test_a_disk_that_is_full_is_said(make_backend, run_server, tmp_path):
    with run_server(make_backend(), state_dir=str(tmp_path)) as server:
        send = {"file": ("a", b"x" * 5000), "purpose": (None, "batch")}
        assert httpx.post(f"{server.url}/v1/files", files=send, timeout=60).status_code == 200
        database = server.app.state.service.database
        database._thread.submit(lambda: database._connection.execute("PRAGMA max_page_count=1")).result()
        refused = httpx.post(
            f"{server.url}/v1/files", files={**send, "file": ("a", b"x" * 500_000)}, timeout=60
        )
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert str(tmp_path) not in refused.text and "full" in refused.text
