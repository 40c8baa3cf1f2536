"""Whatever a client sends, it is answered or refused in words: never a 500, never silence."""

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.sampled_from([1 << 40, -(1 << 70), 1e308, -0.0, 0.5])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["text", "user", "assistant", "auto", "tiny", "json_object"])
)
KEYS = st.sampled_from(
    ["role", "content", "type", "text", "include_usage", "7", "function", "arguments", "name", "tool_calls"]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k",
    "min_p", "n", "seed", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "echo",
    "suffix", "best_of", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "ignore_eos", "stop_token_ids", "response_format", "tools", "tool_choice",
    "chat_template_kwargs", "user", "tokens", "add_generation_prompt", "continue_final_message",
    "add_special_tokens", "skip_special_tokens", "return_token_strs", "include_stop_str_in_output",
]  # fmt: skip
GOOD = st.sampled_from(
    [
        {"prompt": "x"},
        {"prompt": ["a", "b"], "n": 2},
        {"prompt": [5, 6], "echo": True, "logprobs": 2},
        {"messages": [{"role": "user", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "logprobs": True},
        {"tokens": [5, 6]},
    ]
)
BODIES = st.builds(
    lambda good, odd: {**good, **odd}, GOOD, st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3)
)
PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=PATHS, body=BODIES)
def test_any_body(http, path, body):
    reply = http.post(path, json=body)
    check(reply)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=PATHS, body=st.binary(max_size=40))
def test_any_bytes(http, path, body):
    assert check(http.post(path, content=body, headers={"content-type": "application/json"})) == 400


def check(reply: httpx.Response) -> int:
    assert reply.status_code in (200, 400, 404), reply.text
    if reply.status_code != 200:
        error = reply.json()["error"]
        assert error["message"] and set(error) == {"message", "type", "param", "code"}
    elif reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.text.endswith("data: [DONE]\n\n") and '"error"' not in reply.text
    return reply.status_code
