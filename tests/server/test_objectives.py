"""`ttft`, `tpot` and `deadline`: what a request or a server asks for reaches whoever predicts, and refuses with 429."""

import httpx
import pytest

from afserve.control.admission import Objectives
from afserve.errors import OverloadedError


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_what_would_be_too_late_is_refused_at_once(http, server, path, body):
    server.backend.too_late = OverloadedError("ttft: the first token would come after 3 s", retry_after=2.2)
    reply = http.post(path, json={**body, "ttft": 0.5, "tpot": 0.05, "deadline": 9})
    assert reply.status_code == 429 and reply.headers["retry-after"] == "3"
    assert "first token" in reply.text and not server.backend.requests
    ((prompts, wanted),) = server.backend.admitted
    assert len(prompts) == 1 and len(prompts[0]) > 0 and wanted == Objectives(0.5, 0.05, 9.0)


def test_a_server_asks_for_what_a_request_does_not(make_backend, run_server):
    backend = make_backend()
    with run_server(backend, ttft=2.0) as server, httpx.Client(base_url=server.url) as http:
        for asked in ({}, {"ttft": 0.5}, {"tpot": 0.1}):
            assert http.post("/v1/completions", json={"prompt": "x", **asked}).status_code == 200
    assert [wanted for _, wanted in backend.admitted] == [
        Objectives(ttft=2.0),
        Objectives(ttft=0.5),
        Objectives(ttft=2.0, tpot=0.1),
    ]


@pytest.mark.parametrize("value", [0, -1, "soon", 1e9, True])
def test_an_objective_is_a_number_of_seconds(http, value):
    reply = http.post("/v1/completions", json={"prompt": "x", "ttft": value})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "ttft"
