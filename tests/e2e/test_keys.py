"""Keys and a state directory with real processes: two gateways share them, a restart keeps them, and nothing listens
where it was not asked to."""

import io
import json
import time

import httpx
import openai
import psutil
import pytest

from afserve.server.access.key_file import KeyLimits, KeyRole, add_key

pytestmark = pytest.mark.process


def test_gateways_share_keys_and_state_over_lives(up, tmp_path):
    keys, state = tmp_path / "keys", tmp_path / "state"
    secret = add_key(keys, "alice", KeyRole.USER, KeyLimits(requests_per_minute=30))
    flags = ("--experts", "1", "--api-keys", str(keys), "--state-dir", str(state))
    server = up(*flags, "--gateways", "2")
    listening = {
        one.laddr.ip.removeprefix("::ffff:")
        for process in server.family()
        for one in process.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
    since = time.monotonic()
    ask = {"prompt": "def", "max_tokens": 1}
    bearer = {"authorization": f"Bearer {secret}"}
    assert httpx.post(f"{server.url}/v1/completions", json=ask).status_code == 401
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=secret, max_retries=0) as api:
        line = {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/completions",
            "body": {**ask, "max_tokens": 4},
        }
        lines = "\n".join(json.dumps({**line, "custom_id": f"r{i}"}) for i in range(6))
        file = api.files.create(file=("asked.jsonl", io.BytesIO(lines.encode())), purpose="batch").id
        batch = api.batches.create(input_file_id=file, endpoint="/v1/completions", completion_window="24h").id
    # a connection of its own each: the kernel spreads them over both gateways
    answered = 0
    while (reply := httpx.post(f"{server.url}/v1/completions", json=ask, headers=bearer)).status_code == 200:
        answered += 1
        assert answered <= 29 + (time.monotonic() - since) * 30 / 60, "each gateway counts by itself"
    assert reply.status_code == 429 and reply.headers["retry-after"]
    assert server.stop()[0] == 0
    server = up(*flags)
    printed = "".join(server.printed().replace("│", "").split())  # a long path is folded
    assert str(state) in printed
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=secret, max_retries=0) as api:
        until = time.monotonic() + 60
        while api.batches.retrieve(batch).status != "completed":
            assert time.monotonic() < until, api.batches.retrieve(batch)
            time.sleep(0.1)
        assert api.batches.retrieve(batch).request_counts.completed == 6
    assert server.stop()[0] == 0


def test_no_key_is_told_what_another_has_sent(up, tmp_path):
    keys = tmp_path / "keys"
    secrets = {name: add_key(keys, name, KeyRole.USER, KeyLimits()) for name in ("alice", "bob")}
    server = up("--experts", "1", "--api-keys", str(keys))

    def cached(name, **fields):
        reply = httpx.post(
            f"{server.url}/v1/completions",
            json={"prompt": "the password is " + "swordfish " * 40, "max_tokens": 1, **fields},
            headers={"authorization": f"Bearer {secrets[name]}"},
        )
        return reply.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("alice") == 0 and cached("alice") > 0
    assert cached("bob") == 0 == cached("alice", cache_salt="another")
    assert cached("bob") > 0
