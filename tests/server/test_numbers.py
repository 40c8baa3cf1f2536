"""Every number field of every route, at the ends of what numbers can be: served, or a 400 that names the field."""

import json
import math
import re

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afserve.engine.scheduling.request import TokenEvent, TokenLogprob

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# As JSON text: Python's own numbers cannot say most of these.
TEXTS = [
    "0", "-0", "-0.0", "0.0", "1", "-1", "2", "1.0", "1.5", "1e-400", "-1e-400", "5e-324", "1e-45", "1e-40", "1e-38",
    "1.1754943508222875e-38", "2.2250738585072014e-308", "1e-5", "9.999e-6", "0.01", "0.1", "1e38",
    "3.4028235677973366e38",
    "1e39", "1.7976931348623157e308", "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "2147483647", "2147483648",
    "4294967295", "4294967296", "9007199254740993", "9223372036854775807", "9223372036854775808",
    "-9223372036854775808", "-9223372036854775809", "18446744073709551616", "9" * 309, "-" + "9" * 400, "9" * 4300,
    "9" * 4301, "-" + "9" * 5000, "1" + "0" * 5000 + "e-5000", "0." + "0" * 5000 + "1",
]  # fmt: skip
NUMBERS = st.sampled_from(TEXTS) | st.floats().map(json.dumps) | st.integers().map(str)
SHARED = [
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "min_tokens", "n", "max_tokens",
]  # fmt: skip
PLACES = [
    *((COMPLETIONS, name, '{"prompt":"x","' + name + '":{}}') for name in (*SHARED, "logprobs", "best_of")),
    *((COMPLETIONS, name, '{"prompt":"x","stream":true,"' + name + '":{}}') for name in SHARED),
    (COMPLETIONS, "logit_bias", '{"prompt":"x","logit_bias":{"7":{}}}'),
    (COMPLETIONS, "logit_bias", '{"prompt":"x","logit_bias":{"{}":1}}'),
    (COMPLETIONS, "stop_token_ids", '{"prompt":"x","stop_token_ids":[{}]}'),
    (COMPLETIONS, "prompt", '{"prompt":[5,{}]}'),
    (COMPLETIONS, "prompt", '{"prompt":[[5],[{}]]}'),
    *(
        (CHAT, name, '{"messages":[{"role":"user","content":"x"}],"' + name + '":{}}')
        for name in (*SHARED, "max_completion_tokens")
    ),
    (CHAT, "top_logprobs", '{"messages":[{"role":"user","content":"x"}],"logprobs":true,"top_logprobs":{}}'),
    ("/detokenize", "tokens", '{"tokens":[5,{}]}'),
]
JSON = {"content-type": "application/json"}
FIXTURE = [HealthCheck.function_scoped_fixture]


def refuse_constant(name):
    raise AssertionError(f"{name} in an answer")


def bodies(reply):
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return [reply.text]
    return [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]


def tried(http, place, number):
    path, name, form = place
    reply = http.post(path, content=form.replace("{}", number), headers=JSON)
    for body in bodies(reply):
        json.loads(body, parse_constant=refuse_constant)
    assert reply.status_code in (200, 400), reply.text
    if reply.status_code == 400:
        error = reply.json()["error"]
        assert re.split(r"[.\[]", str(error["param"]))[0] == name, (error, number[:50])
        assert len(error["message"]) < 300
    return reply


def check(http, server, place, number):
    before = len(server.backend.requests)
    reply = tried(http, place, number)
    for request in server.backend.requests[before:]:
        p = request.params
        for value in (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty):
            assert math.isfinite(value)
        assert 0 <= p.temperature <= 2 and 0 < p.top_p <= 1 and 0.01 <= p.repetition_penalty <= 100
        assert all(0 <= token_id < 400 for token_id in request.prompt_ids)
    if reply.status_code == 400:
        assert len(server.backend.requests) == before
    del server.backend.requests[:], server.backend.closed[:]


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0]}:{place[1]}")
def test_the_ends_of_every_field(http, server, place):
    for number in TEXTS:
        check(http, server, place, number)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=FIXTURE)
@given(place=st.sampled_from(PLACES), number=NUMBERS)
def test_any_number(http, server, place, number):
    check(http, server, place, number)


@pytest.mark.long
@settings(max_examples=20_000, deadline=None, suppress_health_check=FIXTURE)
@given(place=st.sampled_from(PLACES), number=NUMBERS)
def test_any_number_at_length(http, server, place, number):
    check(http, server, place, number)


def test_numbers_of_a_large_body(http, server):
    """Those are read by another process, with the same words."""
    for number in ("NaN", "1e400", "9" * 5000, "1e-400"):
        small = http.post(COMPLETIONS, content=f'{{"prompt":"x","top_p":{number}}}', headers=JSON)
        large = http.post(
            COMPLETIONS, content=f'{{"prompt":"x","top_p":{number}}}' + " " * 20_000, headers=JSON
        )
        assert small.status_code == large.status_code == 400 and small.json() == large.json()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
def test_scores_that_are_no_numbers_are_drawn_as_numbers(make_backend, run_server, path, stream):
    class Odd(type(make_backend())):
        def _event(self, request, new, **ends):
            event = super()._event(request, new, **ends)
            scores = tuple(
                TokenLogprob(t, score, 1, ((t, score), (7, -math.inf), (8, math.inf)))
                for t, score in zip(new, [math.nan, -math.inf] * len(new))
            )
            return TokenEvent(event.handle, new, event.finish_reason, event.stop_token_id, scores)

    plain = make_backend()
    with run_server(Odd(plain.model, plain.tokenizer)) as server:
        ask = {"stream": stream, "logprobs": True if path == CHAT else 2}
        ask |= {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
        reply = httpx.post(server.url + path, json=ask)
    assert reply.status_code == 200
    for body in bodies(reply):
        json.loads(body, parse_constant=refuse_constant)
    assert "-9999.0" in reply.text
