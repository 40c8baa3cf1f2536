"""Requests with `resume`: a stream that goes on behind any event, at any server that reaches the attention nodes."""

import json
import random
import socket
import time

import httpx
import pytest

from afserve.server.http.settings import ServerSettings
from afserve.server.replies.record import Position, stamped

LONG = " the quick brown fox jumps over the lazy dog" * 4
ID = "0123456789abcdef" * 2


def asked(**fields):
    body = {"prompt": "the quick", "max_tokens": 60, "temperature": 0, "stream": True, "resume": 30}
    return body | fields


def events(text):
    """(id, data) of each event; every event must have both."""
    found = []
    for part in text.split("\n\n")[:-1]:
        lines = [line for line in part.split("\n") if not line.startswith(":")]
        if lines:
            assert [line.partition(":")[0] for line in lines] == ["id", "data"], part
            found.append((lines[0][4:], lines[1][6:]))
    return found


def texts(found):
    """Text by choice, and how often each ended."""
    text, ends = {}, {}
    for _, data in found:
        if data == "[DONE]":
            continue
        for choice in json.loads(data)["choices"]:
            i = choice["index"]
            new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            text[i] = text.get(i, "") + new
            ends[i] = ends.get(i, 0) + (choice["finish_reason"] is not None)
    return text, ends


def scores(found):
    """Everything about log-probabilities, whatever pieces it came in."""
    lists = {}
    for _, data in found:
        choices = [] if data == "[DONE]" else json.loads(data)["choices"]
        for choice in choices:
            for name, values in (choice["logprobs"] or {}).items():
                lists.setdefault((choice["index"], name), []).extend(values or [])
    return lists


def again(http, id, last="", status=200, path="events"):
    answer = http.get(f"/v1/requests/{id}/{path}", headers={"last-event-id": last} if last else {})
    assert answer.status_code == status, answer.text
    return answer


BODIES = {
    "plain": ("/v1/completions", {}),
    "several": ("/v1/completions", {"n": 3, "prompt": ["the quick", "brown"], "seed": 1}),
    "usage": ("/v1/completions", {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    "logprobs": ("/v1/completions", {"logprobs": 2}),
    "echo": ("/v1/completions", {"echo": True, "logprobs": 1}),
    "stop": ("/v1/completions", {"stop": ["lazy", "never"]}),
    "min tokens": ("/v1/completions", {"stop": ["quick"], "min_tokens": 7}),
    "chat": ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 1}),
}


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("per_event", [1, 3])
def test_a_stream_goes_on_behind_any_of_its_events(server, http, name, per_event):
    server.backend.reply, server.backend.per_event = LONG + " 日本語 😀 naïve", per_event
    path, more = BODIES[name]
    body = asked(**more)
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    whole = events(http.post(path, json=body).text)
    assert whole[-1] == ("done", "[DONE]")
    id = json.loads(whole[0][1])["id"]
    expected = texts(whole)
    assert set(expected[1].values()) == {1}
    for at in range(len(whole)):
        rest = events(again(http, id, whole[at][0]).text)
        if whole[at][0] == "done":
            assert rest == [("done", "[DONE]")]
            continue
        before = whole[: at + 1]
        if any(one[0] == whole[at][0] for one in whole[at + 1 :]):
            continue  # the role of a chat, which is said again
        assert texts(before + rest) == expected
        assert rest[-1] == whole[-1]
        assert scores(before + rest) == scores(whole)
    assert texts(events(again(http, id).text)) == expected


@pytest.mark.slow
def test_another_server_goes_on_where_the_first_was_lost(make_backend, run_server):
    first = make_backend(reply=LONG, per_event=3, hold_at=9)
    with run_server(first) as one:
        whole = make_backend(reply=LONG)
        second = make_backend(reply=LONG, per_event=5, nodes_kept=first.nodes_kept)
        with run_server(second) as two, run_server(whole) as calm:
            expected = texts(events(httpx.post(f"{calm.url}/v1/completions", json=asked(n=2)).text))
            body = asked(n=2, request_id=ID, stream_options={"include_usage": True})
            with (
                httpx.Client(base_url=two.url) as other,
                httpx.stream("POST", f"{one.url}/v1/completions", json=body) as stream,
            ):
                read, parts = "", stream.iter_text()
                for part in parts:
                    read += part
                    if read.count("id: ") >= 4 and first.holding.is_set():
                        break
                before = events(read[: read.rindex("\n\n") + 2])
                rest = events(again(other, f"cmpl-{ID}", before[-1][0]).text)
                assert texts(before + rest) == expected
                usage = json.loads(rest[-2][1])["usage"]
                assert usage["completion_tokens"] == sum(
                    len(e.token_ids) for a in answers(first) for e in a.events
                )
                with pytest.raises(httpx.RemoteProtocolError):  # it went on elsewhere: closed, not ended
                    list(parts)
                assert other.get(f"/v1/requests/cmpl-{ID}").json()["status"] == "finished"
                state = httpx.get(f"{one.url}/v1/requests/cmpl-{ID}").json()
                assert (state["status"], len(state["choices"])) == ("finished", 2)


def is_kept(backend, id):
    return (id, 0) in backend.nodes_kept.answers


def wait(condition):
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def answers(backend):
    return list(backend.nodes_kept.answers.values())


@pytest.mark.slow
def test_a_whole_answer_can_be_fetched_until_it_expires(server, http):
    server.backend.reply = LONG
    body = asked(stream=False, resume=0.3)
    whole = http.post("/v1/completions", json=body).json()
    answer = again(http, whole["id"], path="answer")
    assert answer.json() == whole
    state = http.get(f"/v1/requests/{whole['id']}").json()
    assert state["status"] == "finished" and not state["stream"]
    assert state["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    wait(lambda: not is_kept(server.backend, whole["id"]))  # its attention node may forget it
    again(http, whole["id"], path="answer", status=404)


def test_without_resume_a_closed_connection_cancels_and_with_it_not(server, http):
    backend = server.backend
    backend.reply, backend.hold_at = LONG, 5
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked(resume=None)) as stream:
        next(stream.iter_text())
    assert backend.ended.wait(10)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked(request_id=ID)) as stream:
        next(stream.iter_text())
    assert is_kept(backend, f"cmpl-{ID}")
    assert http.get(f"/v1/requests/cmpl-{ID}").json()["status"] == "running"
    assert http.delete(f"/v1/requests/cmpl-{ID}").json()["deleted"]
    assert not is_kept(backend, f"cmpl-{ID}")
    again(http, f"cmpl-{ID}", status=404)


def test_a_request_expires_when_nobody_reads_it(server, http):
    backend = server.backend
    backend.reply, backend.hold_at = LONG, 5
    body = asked(resume=0.1, request_id=ID)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as stream:
        next(stream.iter_text())
    wait(lambda: not is_kept(backend, f"cmpl-{ID}"))


def test_only_the_same_key_finds_it(make_backend, run_server):
    backend = make_backend(reply=LONG)
    with run_server(backend, api_keys=("one", "two")) as server, httpx.Client(base_url=server.url) as http:
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        id = http.post("/v1/completions", json=asked(stream=False), headers=mine).json()["id"]
        assert len(id) == len("cmpl-") + 32
        for path in ("", "/events", "/answer"):
            assert http.get(f"/v1/requests/{id}{path}", headers=mine).status_code == 200
            refused = http.get(f"/v1/requests/{id}{path}", headers=other)
            unknown = http.get(f"/v1/requests/{id[:-1]}x{path}", headers=mine)
            assert (refused.status_code, unknown.status_code) == (404, 404)
            assert refused.text == unknown.text.replace(f"{id[:-1]}x", id)
            assert http.get(f"/v1/requests/{id}{path}").status_code == 401
        assert http.delete(f"/v1/requests/{id}", headers=other).status_code == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"resume": 301}, "resume"),
        ({"resume": 0}, "resume"),
        ({"resume": "10"}, "resume"),
        ({"resume": 10, "request_id": "mine"}, "request_id"),
        ({"resume": None, "request_id": "a" * 32}, "request_id"),
        ({"resume": None, "request_id": 7}, "request_id"),
        ({"resume": 10, "n": 33}, "resume"),
    ],
)
def test_what_cannot_be_kept_is_refused(server, http, fields, param):
    answer = http.post("/v1/completions", json=asked(**fields))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


@pytest.mark.slow
def test_an_own_id_without_resume_is_told_so_everywhere(server, http):
    chat = {"messages": [{"role": "user", "content": "the quick"}], "max_tokens": 4}
    for path, body in (
        ("/v1/completions", {"prompt": "the quick", "max_tokens": 4}),
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
        ("/v1/responses", {"input": "the quick", "max_output_tokens": 4}),
    ):
        answer = http.post(path, json=body | {"request_id": ID})
        assert answer.status_code == 400 and "request_id: " in answer.json()["error"]["message"], answer.text
        assert http.post(path, json=body | {"request_id": None}).status_code == 200


def test_what_is_too_large_for_attention_nodes_is_refused(server, http, monkeypatch):
    monkeypatch.setattr("afserve.server.answers.asked.MOST_ABOUT", 500)
    answer = http.post("/v1/completions", json=asked(echo=True, prompt="naïve " * 30))
    assert answer.status_code == 400 and "beside its prompt" in answer.json()["error"]["message"]


def test_an_id_of_another_stream_is_refused(server, http):
    id = http.post("/v1/completions", json=asked(stream=False)).json()["id"]
    for last in ("1.2", "x", "-1", "1" * 50, "e"):
        assert again(http, id, last, 400).json()["error"]["param"] == "Last-Event-ID"


@pytest.mark.slow
def test_what_is_kept_is_bounded_and_the_oldest_answer_makes_room(make_backend, run_server):
    backend = make_backend(reply=LONG)
    with run_server(backend, resume_requests=2) as server, httpx.Client(base_url=server.url) as http:
        ids = [http.post("/v1/completions", json=asked(stream=False)).json()["id"] for _ in range(3)]
        found = [http.get(f"/v1/requests/{id}").status_code for id in ids]
        assert found == [404, 200, 200]
        backend.hold_at = 0
        for number in range(2):
            body = asked(request_id=f"{number}" * 32, stream=True)
            with socket.create_connection(("127.0.0.1", server.port)) as raw:
                raw.sendall(httpx_bytes(body))
                until = time.monotonic() + 10
                while http.get(f"/v1/requests/cmpl-{number}".ljust(18, "x")).status_code != 404:
                    assert time.monotonic() < until
                while http.get(f"/v1/requests/cmpl-{str(number) * 32}").status_code != 200:
                    assert time.monotonic() < until
        refused = http.post("/v1/completions", json=asked())
        assert refused.status_code == 429 and "--resume-requests" in refused.text


def httpx_bytes(body):
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def test_memory_is_bounded_too(make_backend, run_server):
    with run_server(make_backend(reply=LONG), resume_mib=0) as server:
        refused = httpx.post(f"{server.url}/v1/completions", json=asked())
        assert refused.status_code == 429 and "--resume-mib" in refused.text


def test_positions_are_read_as_they_are_written():
    dice = random.Random(1)
    for _ in range(200):
        choices = dice.randint(1, 5)
        made = Position(
            [dice.randint(0, 10**6) for _ in range(choices)], [dice.random() < 0.5 for _ in range(choices)]
        )
        read = Position.parse(made.id, choices)
        assert (read.tokens, read.ended) == (made.tokens, made.ended)
    assert stamped(b"data: 1\n\ndata: 2\n\n", "3", "4") == b"id: 3\ndata: 1\n\nid: 4\ndata: 2\n\n"


def test_limits_have_flags():
    assert ServerSettings().resume_seconds == 300
