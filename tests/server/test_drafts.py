"""`draft` and OpenAI's `prediction` in requests: what reaches the engine, what is passed over, what usage says."""

import json
from dataclasses import replace

import openai
import pytest

from afserve.engine.scheduling.found_below import NONE_BELOW, FoundBelow
from afserve.engine.scheduling.request import MAX_DRAFT, Predicted, SamplingParams, TokenEvent
from afserve.server.bodies.fields import Fields
from afserve.server.bodies.prepared import from_bytes, to_bytes
from afserve.server.replies.choice import TextPiece
from afserve.server.replies.record import RecordedChoice, split
from afserve.server.text.kinds import BodyKind
from afserve.server.text.prepare import Preparer
from afserve.tokens.chat_template import ChatTemplate
from tests.server.conftest import ScriptedBackend
from tests.server.test_text_pool import model_of

HEADER = "x-afserve-ignored"
USER = [{"role": "user", "content": "hello"}]
BODIES = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 8},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 8},
    "/v1/responses": {"input": "hello", "max_output_tokens": 8},
    "/v1/messages": {"messages": USER, "max_tokens": 8},
}
WORDS = "def add(x, y):\n    return x + y\n"
EXPECTED = {"type": "content", "content": WORDS}


class DraftingBackend(ScriptedBackend):
    """Each of its events verified three tokens of what was expected; two were right."""

    async def event_at(self, request, start, ids):
        event = await super().event_at(request, start, ids)
        return replace(event, predicted=Predicted(2, 1)) if request.prediction else event


@pytest.fixture(scope="module")
def drafting(make_backend, run_server):
    plain = make_backend()
    backend = DraftingBackend(replace(plain.model, drafts=True), plain.tokenizer, per_event=3)
    with run_server(backend) as running:
        yield running


@pytest.fixture
def client(drafting):
    drafting.backend.requests.clear()
    with openai.OpenAI(base_url=f"{drafting.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("asked", "found"), [("off", 0), (0, 0), (MAX_DRAFT, MAX_DRAFT), (None, None)])
def test_a_request_says_how_much_is_drafted(path, asked, found, http, server):
    assert http.post(path, json={**BODIES[path], "draft": asked}).status_code == 200
    assert server.backend.requests[-1].params.draft == found


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "asked", ["on", "OFF", "", "4", -1, MAX_DRAFT + 1, 1.0, True, False, [], {}, 1 << 70]
)
def test_other_drafts_are_refused_by_name(path, asked, http):
    refused = http.post(path, json={**BODIES[path], "draft": asked})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["message"].startswith("draft: ")


@pytest.mark.slow
def test_sdks_expect_an_answer(client, drafting):
    """OpenAI's own client; the tokens are those of the words, and usage says what became of them."""
    done = client.chat.completions.create(model="tiny", messages=USER, prediction=EXPECTED)
    (request,) = drafting.backend.requests
    assert list(request.prediction) == drafting.backend.tokenizer.encode(WORDS, add_special_tokens=False)
    events = -(-done.usage.completion_tokens // 3)
    details = done.usage.completion_tokens_details
    assert events > 1
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (2 * events, events)
    parts = [{"type": "text", "text": WORDS[:9]}, {"type": "text", "text": WORDS[9:]}]
    options = {"include_usage": True}
    *_, last = client.chat.completions.create(
        model="tiny", messages=USER, prediction={"type": "content", "content": parts}, stream=True,
        stream_options=options, n=2,
    )  # fmt: skip
    assert [other.prediction for other in drafting.backend.requests[1:]] == [request.prediction] * 2
    assert last.usage.completion_tokens_details.accepted_prediction_tokens == 4 * events
    plain = client.completions.create(model="tiny", prompt="x", extra_body={"prediction": EXPECTED})
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens > 0
    assert client.completions.create(model="tiny", prompt="x").usage.completion_tokens_details is None


@pytest.mark.slow
def test_who_does_not_draft_passes_it_over(http, server, client, make_backend, run_server):
    asked = {**BODIES["/v1/chat/completions"], "prediction": EXPECTED}
    answered = http.post("/v1/chat/completions", json=asked)
    assert answered.status_code == 200 and answered.headers[HEADER] == "prediction"
    assert server.backend.requests[-1].prediction == ()
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=USER, prediction=EXPECTED, extra_body={"draft": "off"}
    )
    assert raw.headers[HEADER] == "prediction"
    for empty in (None, {"type": "content", "content": ""}, {"type": "content", "content": []}):
        assert HEADER not in http.post("/v1/chat/completions", json={**asked, "prediction": empty}).headers
    with (
        run_server(make_backend(), strict=True) as strict,
        openai.OpenAI(base_url=f"{strict.url}/v1", api_key="none", max_retries=0) as strict_client,
        pytest.raises(openai.BadRequestError, match="prediction: is not supported; start the server"),
    ):
        strict_client.chat.completions.create(model="tiny", messages=USER, prediction=EXPECTED)


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("words", "prediction"), (["words"], "prediction"), ({}, "prediction.type"),
        ({"type": 3, "content": "x"}, "prediction.type"), ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"), ({"type": "content", "content": 3}, "prediction.content"),
        ({"type": "content", "content": {"a": 1}}, "prediction.content"),
        ({"type": "content", "content": ["x"]}, "prediction.content[0]"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": [{"type": "text", "text": 3}]}, "prediction.content[0].text"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_no_prediction_is_refused_by_name(path, prediction, param, http):
    refused = http.post(path, json={**BODIES[path], "prediction": prediction})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param


HALF = b'{"%s, "max_tokens": 1, "prediction": {"type": "content", "content": %s}}'


@pytest.mark.parametrize("content", [b'"a \\ud800 b"', b'[{"type": "text", "text": "\\udfff"}]'])
@pytest.mark.parametrize(
    "path, asked",
    [
        ("/v1/completions", b'prompt": "x"'),
        ("/v1/chat/completions", b'messages": [{"role": "user", "content": "x"}]'),
    ],
)
def test_half_a_character_is_refused_where_it_stands(path, asked, content, http, drafting):
    """Whether the server drafts or not."""
    for url in (path, f"{drafting.url}{path}"):
        headers = {"content-type": "application/json"}
        said = http.post(url, content=HALF % (asked, content), headers=headers)
        error = said.json()["error"]
        assert said.status_code == 400 and error["param"].startswith("prediction.content")
        assert "lone surrogate" in error["message"] and "\n" not in error["message"]


def prepared(checkpoint, tokenizer, body):
    model = replace(model_of(checkpoint), drafts=True)
    preparer = Preparer(model, tokenizer, SamplingParams(), ChatTemplate.from_folder(checkpoint))
    return preparer.prepare(BodyKind.CHAT, Fields(body))


def test_a_long_one_is_cut_to_what_the_context_has(checkpoint, tokenizer):
    body = {"messages": USER, "prediction": {"type": "content", "content": WORDS * 9999}}
    found = prepared(checkpoint, tokenizer, body)
    assert len(found.expected) == 256
    assert list(found.expected) == tokenizer.encode(WORDS * 99, add_special_tokens=False)[:256]


def test_it_travels_from_a_text_process(checkpoint, tokenizer):
    body = {"messages": USER, "prediction": EXPECTED, "draft": 3}
    found = prepared(checkpoint, tokenizer, body)
    assert from_bytes(to_bytes(found)) == found and len(found.expected) > 3 and found.params.draft == 3
    without = prepared(checkpoint, tokenizer, {"messages": USER})
    assert from_bytes(to_bytes(without)) == without and len(without.expected) == 0


def test_what_is_told_again_counts_once():
    choice = RecordedChoice()
    found = {"cached_tokens": 48, "found_below": FoundBelow(host=32)}
    for tokens, predicted in (((1,), Predicted(0, 2)), ((2, 3, 4), Predicted(2, 1)), ((5,), Predicted(0, 4))):
        choice.add_event(TokenEvent(7, tokens, predicted=predicted, **found), TextPiece("x", len(tokens)))
        found = {}
    end = TokenEvent(7, (6, 7), "stop", predicted=Predicted(1, 0))
    choice.add_event(end, TextPiece("x", 2, finish_reason="stop"))
    for border in range(8):
        told = list(choice.again(border))
        assert [token for event in told for token in event.token_ids] == [1, 2, 3, 4, 5, 6, 7]
        assert [event.predicted for event in told if any(event.predicted)] == [Predicted(3, 7)]
        assert [event.cached_tokens for event in told] == [48] + [0] * (len(told) - 1)
        assert [event.found_below for event in told] == [FoundBelow(host=32)] + [NONE_BELOW] * (len(told) - 1)
    assert [event.predicted for event in split(end)] == [Predicted(1, 0), Predicted()]
    first = TokenEvent(7, (1, 2), found_below=FoundBelow(disk=16))
    assert [event.found_below for event in split(first)] == [FoundBelow(disk=16), NONE_BELOW]


def test_the_document_has_both(http):
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest"):
        fields = schemas[name]["properties"]
        assert fields["prediction"]["required"] == ["type", "content"] and "off" in json.dumps(
            fields["draft"]
        )
