"""/v1/requests/{id} of requests without `resume`: while they run they are known and can be ended, afterwards not."""

import asyncio
import json

import httpx
import pytest

from afserve.errors import NotFoundError
from afserve.server.answers.answering import Watched, within

MESSAGES = [{"role": "user", "content": "x"}]
STREAMS = (
    ("/v1/completions", {"prompt": "x", "max_tokens": 8, "n": 2}, lambda event: event["id"]),
    ("/v1/chat/completions", {"messages": MESSAGES}, lambda event: event["id"]),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 8}, lambda event: event["message"]["id"]),
    ("/v1/responses", {"input": "x"}, lambda event: event["response"]["id"]),
)


@pytest.fixture(scope="module")
def keyed(make_backend, run_server):
    with run_server(make_backend(), api_keys=("mine", "yours")) as server:
        yield server


@pytest.fixture
def held(keyed):
    """The scripted engine stops after two tokens."""
    keyed.backend.hold_at = 2
    keyed.backend.release.clear()
    keyed.backend.requests.clear()
    keyed.backend.closed.clear()
    yield keyed.backend
    keyed.backend.hold_at = None
    keyed.backend.release.set()


@pytest.fixture
def clients(keyed):
    """Of the one who asks, and of another."""
    with (
        httpx.Client(base_url=keyed.url, headers={"authorization": "Bearer mine"}, timeout=20) as mine,
        httpx.Client(base_url=keyed.url, headers={"authorization": "Bearer yours"}, timeout=20) as yours,
    ):
        yield mine, yours


def until_held(http, id, choices):
    """Its status once as many tokens of each choice are on their way as the engine has given."""
    while True:
        status = http.get(f"/v1/requests/{id}").json()
        if [choice["tokens"] for choice in status["choices"]] == [2] * choices:
            return status


@pytest.mark.parametrize(("path", "body", "id_of"), STREAMS)
def test_a_stream_is_known_while_it_runs_and_ends_when_its_owner_says_so(clients, held, path, body, id_of):
    mine, yours = clients
    with mine.stream("POST", path, json={**body, "stream": True}) as reply:
        lines = reply.iter_lines()
        id = id_of(json.loads(next(line for line in lines if line.startswith("data: "))[6:]))
        status = until_held(mine, id, body.get("n", 1))
        assert status["status"] == "running" and status["stream"] and status["resume"] == 0
        assert status["id"] == id and status["model"] == "tiny"
        assert mine.get("/load").json() == {"server_load": 1, "models": {"tiny": 1}}
        for method in ("GET", "DELETE"):
            assert yours.request(method, f"/v1/requests/{id}").status_code == 404
        assert mine.delete(f"/v1/requests/{id}").json() == {"id": id, "object": "request", "deleted": True}
        rest = "\n".join(lines)
    assert "this request was ended by its client" in rest
    assert mine.get(f"/v1/requests/{id}").status_code == 404
    assert len(held.closed) == len(held.requests) == body.get("n", 1)


def test_one_that_has_ended_is_not_known(clients):
    mine, _ = clients
    answer = mine.post("/v1/completions", json={"prompt": "x", "max_tokens": 4}).json()
    for method in ("GET", "DELETE"):
        refused = mine.request(method, f"/v1/requests/{answer['id']}")
        assert refused.status_code == 404 and "neither running nor kept" in refused.text


def test_an_end_that_comes_when_all_is_computed_is_no_fault():
    """A long answer is still being written then, and is written to its end."""

    async def scene():
        one = Watched("x", "", 0, "tiny", 1, stream=False)
        async with within(None, watched=one):
            one.saw(0, 1, "stop")
        one.cancel_request()
        return one.cancelled

    assert asyncio.run(scene())


def test_an_end_that_comes_before_anything_is_computed_is_told():
    async def scene():
        one = Watched("x", "", 0, "tiny", 1, stream=False)
        one.cancel_request()
        async with within(None, watched=one):
            await asyncio.sleep(60)

    with pytest.raises(NotFoundError, match="ended by its client"):
        asyncio.run(scene())
