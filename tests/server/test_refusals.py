"""Every bad request is answered with the right status, in OpenAI's error shape, naming the field."""

import json
import select
import socket
from contextlib import ExitStack

import pytest

from afserve.errors import ConfigError, OverloadedError
from afserve.server.http.settings import ServerSettings, read_keys

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]


def error_of(reply) -> dict:
    body = reply.json()
    assert list(body) == ["error"] and list(body["error"]) == ["message", "type", "param", "code"]
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("prompt", {"prompt": None}),
        ("prompt", {"prompt": 5}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": [[]]}),
        ("prompt", {"prompt": [400]}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": [1 << 80]}),
        ("prompt[1]", {"prompt": [3, True]}),
        ("prompt[0][1]", {"prompt": [[3, "a"]]}),
        ("prompt[1]", {"prompt": ["a", 3]}),
        ("prompt[1]", {"prompt": [3, "a"]}),
        ("max_tokens", {"max_tokens": "many"}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 1.5}),
        ("max_tokens", {"max_tokens": 5000}),
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": "hot"}),
        ("temperature", {"temperature": True}),
        ("top_p", {"top_p": 0}),
        ("top_p", {"top_p": 1.1}),
        ("top_k", {"top_k": -2}),
        ("min_p", {"min_p": 2}),
        ("n", {"n": 0}),
        ("n", {"n": 129}),
        ("presence_penalty", {"presence_penalty": 3}),
        ("repetition_penalty", {"repetition_penalty": 0}),
        ("logprobs", {"logprobs": 21}),
        ("logprobs", {"logprobs": True}),
        ("seed", {"seed": 1 << 64}),
        ("stop", {"stop": ""}),
        ("stop", {"stop": ["a"] * 17}),
        ("stop", {"stop": 5}),
        ("stop[0]", {"stop": [5]}),
        ("stop", {"stop": "a" * 1025}),
        ("stop_token_ids", {"stop_token_ids": [5] * 1025}),
        ("logit_bias", {"logit_bias": {str(i): 0 for i in range(1025)}}),
        ("stream", {"stream": "yes"}),
        ("stream_options", {"stream_options": [1]}),
        ("min_tokens", {"min_tokens": 17}),
        ("stop_token_ids", {"stop_token_ids": [4000]}),
        ("logit_bias", {"logit_bias": {"x": 1}}),
        ("logit_bias.7", {"logit_bias": {"7": 101}}),
        ("logit_bias", {"logit_bias": {"4000": 1}}),
        ("suffix", {"suffix": "end"}),
        ("best_of", {"best_of": 3}),
        ("response_format", {"response_format": {"type": "xml"}}),
        ("echo", {"echo": 1}),
        ("skip_special_tokens", {"skip_special_tokens": "x"}),
        ("model", {"model": 5}),
    ],
)
def test_completion_fields(http, server, param, fields):
    reply = http.post("/v1/completions", json={"model": "tiny", "prompt": "x", **fields})
    assert reply.status_code == 400, reply.text
    assert error_of(reply)["param"] == param
    assert error_of(reply)["type"] == "invalid_request_error"
    assert server.backend.requests == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("messages", {"messages": None}),
        ("messages", {"messages": []}),
        ("messages", {"messages": "hi"}),
        ("messages", {"messages": USER * 8193}),
        ("messages[0]", {"messages": ["hi"]}),
        ("messages[0].role", {"messages": [{"content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        ("messages", {"messages": [{"role": "alien", "content": "x"}]}),
        ("max_completion_tokens", {"max_completion_tokens": 0}),
        ("max_completion_tokens", {"max_completion_tokens": 5000}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("logprobs", {"logprobs": 3}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tools[0]", {"tools": [5]}),
        ("chat_template", {"chat_template": "{{ 1 }}"}),
        ("messages[0].tool_calls[0].function", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}),
    ],
)
def test_chat_fields(http, server, param, fields):
    reply = http.post(CHAT, json={"model": "tiny", "messages": USER, **fields})
    assert reply.status_code == 400, reply.text
    assert error_of(reply)["param"] == param
    assert server.backend.requests == []


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"null", b'{"prompt": NaN}', b"\xff\xfe\x00", b'{"prompt":"a"}x', b"[" * 100_000,
     b'{"prompt": "\\ud800"}', b'{"seed":' + b"9" * 5000 + b', "prompt": "x"}'],
)  # fmt: skip
def test_bodies_that_are_not_a_request(http, body):
    reply = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    error_of(reply)


def test_surrogates_in_the_model_name(http):
    reply = http.post(
        "/v1/completions",
        content=b'{"model": "\\ud800", "prompt": "x"}',
        headers={"content-type": "application/json"},
    )
    assert reply.status_code == 404 and error_of(reply)["code"] == "model_not_found"


def test_unknown_paths_methods_and_models(http):
    for method, path, status in [
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
    ]:
        reply = http.request(method, path)
        assert reply.status_code == status, (method, path)
        error_of(reply)
    reply = http.post(CHAT, json={"model": "other", "messages": USER})
    assert reply.status_code == 404 and error_of(reply)["code"] == "model_not_found"


def test_too_long_names_the_numbers(http):
    reply = http.post("/v1/completions", json={"prompt": [5] * 256})
    error = error_of(reply)
    assert reply.status_code == 400 and error["code"] == "context_length_exceeded"
    assert "256 tokens" in error["message"] and "context of 256" in error["message"]
    reply = http.post("/v1/completions", json={"prompt": [5] * 250, "max_tokens": 7})
    assert "7 after a prompt of 250 tokens" in error_of(reply)["message"]
    assert http.post("/v1/completions", json={"prompt": [5] * 250, "max_tokens": 6}).status_code == 200
    assert http.post("/v1/completions", json={"prompt": [5] * 255}).status_code == 200


def test_sequences_per_request_are_limited(http):
    reply = http.post("/v1/completions", json={"prompt": ["a", "b", "c"], "n": 100})
    assert reply.status_code == 400 and "300 sequences" in error_of(reply)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_overload_says_when_to_come_back(http, server, stream):
    server.backend.error = OverloadedError("the queue is full", retry_after=2.5)
    reply = http.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert reply.status_code == 429 and reply.headers["retry-after"] == "3"
    assert error_of(reply)["code"] == "rate_limit_exceeded"


def test_not_ready(http, server):
    server.backend.is_ready = False
    for reply in (http.get("/ready"), http.post("/v1/completions", json={"prompt": "x"})):
        assert reply.status_code == 503 and reply.headers["retry-after"]
        error_of(reply)
    assert http.get("/health").status_code == 200


def test_a_bug_tells_the_client_nothing(http, server, caplog):
    server.backend.error = ValueError("/secret/path")
    for stream in (False, True):
        reply = http.post("/v1/completions", json={"prompt": "x", "stream": stream})
        assert reply.status_code == 500
        assert "secret" not in reply.text
        assert error_of(reply)["type"] == "internal_error"
    assert "/secret/path" in caplog.text


@pytest.mark.parametrize("announced", [True, False])
def test_body_limit(make_backend, run_server, announced):
    import httpx

    body = json.dumps({"prompt": "x" * 500_000}).encode()
    pieces = [body[i : i + 65536] for i in range(0, len(body), 65536)]
    with (
        run_server(make_backend(), max_body_bytes=100_000) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        reply = http.post(
            "/v1/completions",
            content=body if announced else iter(pieces),
            headers={"content-type": "application/json"},
        )
        assert reply.status_code == 413
        assert "100000" in error_of(reply)["message"]
        assert http.get("/health").status_code == 200


def test_bodies_together_are_limited(make_backend, run_server):
    """Five clients each leave a body of almost the limit unfinished: the last is told to come back."""
    size = 64 << 10
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % size
    )
    with run_server(make_backend(), max_body_bytes=size) as server, ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20)) for _ in range(5)
        ]
        for client in clients:
            client.sendall(head + b" " * (size - 1))
        refused, _, _ = select.select(clients, [], [], 20)
        assert [client.recv(65536)[:12] for client in refused] == [b"HTTP/1.1 429"]


def test_body_that_never_ends(make_backend, run_server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    with (
        run_server(make_backend(), read_deadline=0.05) as server,
        socket.create_connection(("127.0.0.1", server.port), 20) as sock,
    ):
        sock.sendall(head)
        assert sock.recv(65536).startswith(b"HTTP/1.1 408")


def test_not_http(server):
    with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
        sock.sendall(b"nonsense\r\n\r\n")
        answer = b""
        while part := sock.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["type"] == "invalid_request_error"


def test_endless_headers_are_cut_off(server):
    with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nX: ")
        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
            while True:
                sock.sendall(b"a" * 65_536)


def test_headers_over_the_limit(http):
    reply = http.get("/health", headers={"x": "a" * 66_000})
    assert reply.status_code == 431
    error_of(reply)


def test_keys(make_backend, run_server):
    import httpx

    with (
        run_server(make_backend(), api_keys=("one", "two"), admin_keys=("root",)) as server,
        httpx.Client(base_url=server.url) as http,
    ):

        def status(path: str, key: str | None) -> int:
            return http.get(path, headers={"authorization": f"Bearer {key}"} if key else {}).status_code

        assert [status("/v1/models", key) for key in (None, "three", "one", "two", "root")] == [
            401,
            401,
            200,
            200,
            200,
        ]
        assert [status("/status", key) for key in (None, "one", "root")] == [401, 403, 200]
        assert [status(path, None) for path in ("/health", "/ready", "/")] == [200] * 3
        assert [status(path, None) for path in ("/version", "/metrics")] == [401, 401]
        assert [status(path, "one") for path in ("/version", "/metrics")] == [200, 200]
        refused = http.get("/v1/models")
        assert (
            error_of(refused)["code"] == "invalid_api_key" and refused.headers["www-authenticate"] == "Bearer"
        )
        assert http.get("/v1/models", headers={"authorization": b"Bearer \xe9"}).status_code == 401


def test_key_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# team\n\nabc\n def \n")
    with pytest.raises(ConfigError, match=f"can be read by others .mode 644.; type: chmod 600 {file}"):
        read_keys(file)
    file.chmod(0o600)
    assert read_keys(file) == ("abc", "def")
    file.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_keys(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(tmp_path / "absent")
    with pytest.raises(ConfigError, match="--max-body-bytes"):
        ServerSettings(max_body_bytes=1)


@pytest.mark.parametrize(
    ("name", "asked", "nothing"),
    [
        ("n_predict", 5, -1),
        ("return_hidden_states", True, False),
        ("moderation", {"model": "m"}, None),
        ("regex", "a+", ""),
        ("ebnf", 'root ::= "a"', None),
        ("grammar", 'root ::= "a"', ""),
        ("json_schema", {"type": "object"}, {}),
        ("lora_path", "mine", None),
        ("prompt_logprobs", 0, None),
    ],
)
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "messages"])
def test_what_other_servers_take_and_this_one_does_not_is_refused_in_every_api(
    http, path, name, asked, nothing
):
    """A zero asks for something, too."""
    words = {"completions": {"prompt": "x"}, "responses": {"input": "x"}}
    body = words.get(path, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4})
    refused = http.post(f"/v1/{path}", json={**body, name: asked})
    assert refused.status_code == 400 and f"{name}: is not supported" in refused.text
    assert http.post(f"/v1/{path}", json={**body, name: nothing}).status_code == 200


def test_bodies_are_sent_as_they_are(http):
    body = {"prompt": "x", "max_tokens": 1}
    packed = http.post("/v1/completions", json=body, headers={"content-encoding": "gzip"})
    assert packed.status_code == 415 and "Content-Encoding" in error_of(packed)["message"]
    plain = http.post("/v1/completions", json=body, headers={"content-encoding": "identity"})
    assert plain.status_code == 200


@pytest.mark.parametrize("empty, kind", [("", "string"), ([], "array")])
def test_what_is_empty_is_called_so(http, empty, kind):
    said = http.post("/v1/chat/completions", json={"messages": [{"role": empty, "content": "x"}]})
    assert f"messages[0].role: is an empty {kind}" in error_of(said)["message"]


def test_half_a_character_is_refused_where_it_stands(http):
    body = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    said = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert error_of(said)["param"] == "messages" and "lone surrogate" in error_of(said)["message"]
