"""What a client is told of an error: of what happened inside never a path, a pid or an exception's words."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve import errors
from afserve.errors import (
    AfserveError,
    CheckpointError,
    ConfigError,
    PeerLost,
    RequestError,
    UnavailableError,
)
from afserve.server.replies.refusal import BUG, anthropic_body, error_body, ollama_body

OF_REQUESTS = ("RequestError", "NotFoundError", "TooLargeError", "AuthError", "UserError")
CLASSES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, AfserveError) and kind.__name__ not in OF_REQUESTS
]
NAMES = st.text("abcxyz0189._-", min_size=1, max_size=8)
FOLDERS = st.lists(NAMES, min_size=1, max_size=4)
SECRETS = st.one_of(
    FOLDERS.map(lambda parts: "/" + "/".join([*parts, "secret.json"])),
    FOLDERS.map(lambda parts: "/".join([*parts, "secret.json"])),
    FOLDERS.map(lambda parts: "~/" + "/".join([*parts, "secret"])),
    FOLDERS.map(lambda parts: "../" + "/".join([*parts, "secret"])),
    st.integers(2, 4_000_000).map(lambda pid: f"(pid {pid})"),
    st.integers(2, 4_000_000).map(lambda pid: f"pid {pid}"),
)
AROUND = st.sampled_from(
    ["{}", "({})", "a {}: no such file", "'{}'", "x: {}; y", "silent for 1.1 s {}", "cannot open {},"]
)


def made(kind: type[AfserveError], message: str) -> AfserveError:
    return PeerLost("attention-0", message) if kind is PeerLost else kind(message)


@settings(max_examples=400, deadline=None)
@given(
    kind=st.sampled_from(CLASSES),
    secret=SECRETS,
    around=AROUND,
    before=st.sampled_from(["", "no node serves: "]),
)
def test_neither_paths_nor_pids(kind, secret, around, before):
    error = made(kind, before + around.format(secret))
    for body in (error_body(error), anthropic_body(error), ollama_body(error)):
        said = json.dumps(body)
        assert "secret" not in said and secret not in said and "pid" not in said


@pytest.mark.parametrize(
    "message",
    [
        "GET /ready answers 200",
        "delete some with DELETE /v1/files/ID",
        "at most 8 requests (4 of them) at 3 tokens a second",
    ],
)
def test_what_is_no_secret_stays(message):
    assert error_body(UnavailableError(message))["error"]["message"] == message


def test_what_is_said_of_a_request_stays():
    message = "model: '/data/models/x' is not served; see pid 5"
    assert error_body(RequestError(message))["error"]["message"] == message


def test_an_exception_of_the_inside_is_a_bug():
    error = AfserveError("controller: ValueError: operands could not be broadcast together")
    assert error_body(error)["error"]["message"] == BUG


INSIDE = [
    AfserveError("controller: ValueError: operands could not be broadcast (secret)"),
    CheckpointError("/srv/secret/config.json: no such file"),
    ConfigError("secret/config.json: hidden_size: is missing"),
    PeerLost("attention-0", "silent for 1.1 s (pid 21706) /secret"),
    UnavailableError(
        "no attention node serves (attention-0: silent for 1.1 s (pid 21706); /x/secret/config.json: gone)"
    ),
]
ASKED = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    "/api/chat": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/embeddings": {"input": "x"},
}


@pytest.mark.parametrize("error", INSIDE, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("path", ASKED)
def test_on_every_surface_and_in_the_log(http, server, caplog, path, error):
    for stream, at in ((False, 0), (True, 0), (True, 1)):
        server.backend.error, server.backend.fail_at = error, at
        reply = http.post(path, json={"model": "tiny", "stream": stream, **ASKED[path]})
        assert "secret" not in reply.text and "21706" not in reply.text and "operands" not in reply.text
        assert "error" in reply.text
    assert error.message in caplog.text or error.message.partition(": ")[2] in caplog.text
