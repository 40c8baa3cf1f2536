"""A limit on reasoning, and switching it off: the bundled model with tokens that mark reasoning, through the APIs."""

import json
import shutil

import httpx
import openai
import pytest

from afserve.grammars.grammar import Compiler, of_thought
from afserve.server.bodies.fields import Fields
from afserve.server.http.settings import ServerSettings
from afserve.server.surfaces import anthropic, ollama, responses
from afserve.tokens.tokenizer import Tokenizer
from tests.server.conftest import Server
from tests.server.nano import FOLDER, VOCABULARY, NanoBackend

USER = [{"role": "user", "content": "What is the capital of France?"}]
MARKS = ("<think>", "</think>")
END = 2
NO_END = {str(END): -100}  # whatever is drawn, an answer is as long as it may be
TEMPLATE = (FOLDER / "chat_template.jinja").read_text() + (
    "{%- if add_generation_prompt and enable_thinking is not false %}{{- '<think>\\n' }}"
    "{%- elif add_generation_prompt %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The bundled checkpoint, its last two tokens being marks of reasoning."""
    folder = tmp_path_factory.mktemp("thinking")
    for name in ("config.json", "model.safetensors", "generation_config.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, folder)
    tokenizer = json.loads((FOLDER / "tokenizer.json").read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    for id, mark in zip((VOCABULARY - 2, VOCABULARY - 1), MARKS, strict=True):
        del vocabulary[next(token for token, own in vocabulary.items() if own == id)], merges[-1]
        vocabulary[mark] = id
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": id, "content": mark, **plain})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def thinking(folder):
    server = Server(NanoBackend(folder=folder), Tokenizer.from_folder(folder), ServerSettings())
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def client(thinking):
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def http(thinking):
    with httpx.Client(base_url=thinking.url, timeout=60) as client:
        yield client


def ask(client, **extra):
    return client.chat.completions.create(
        model="nano", messages=USER, max_tokens=24, seed=1, temperature=1, logit_bias=NO_END, extra_body=extra
    )


@pytest.mark.slow
@pytest.mark.parametrize("most", [0, 1, 7])
def test_reasoning_ends_after_its_budget(client, thinking, most):
    said = ask(client, thinking_token_budget=most).choices[0]
    thought = getattr(said.message, "reasoning", None) or ""
    ids = Tokenizer.from_folder(thinking.backend.model.path).encode(thought, add_special_tokens=False)
    assert len(ids) <= most and (ids or not most)
    assert said.message.content and said.finish_reason == "length"


def test_without_a_budget_the_same_model_goes_on_thinking(client):
    assert ask(client).choices[0].message.content == ""


@pytest.mark.slow
def test_a_budget_of_messages(http):
    asked = {"model": "nano", "messages": USER, "max_tokens": 24, "seed": 1}
    enabled = {"type": "enabled", "budget_tokens": 5}
    said = http.post("/v1/messages", json={**asked, "thinking": enabled}).json()
    assert [block["type"] for block in said["content"]] == ["thinking", "text"], said
    hidden = http.post("/v1/messages", json={**asked, "thinking": {**enabled, "display": "omitted"}}).json()
    assert hidden["content"] == said["content"][1:]


@pytest.mark.parametrize(
    ("path", "off"),
    [("/v1/messages", {"thinking": {"type": "disabled"}}), ("/api/chat", {"think": False, "stream": False})],
)
def test_thinking_is_switched_off(http, path, off):
    """Said to be off, it is not merely hidden."""
    asked = {"model": "nano", "messages": USER, "max_tokens": 4, "options": {"num_predict": 4}}
    said = http.post(path, json={**asked, **off})
    assert said.status_code == 200
    told = said.json().get("content") or said.json()["message"]["content"]
    assert told and "thinking" not in said.text


def test_an_effort_of_messages(http):
    asked = {"model": "nano", "messages": USER, "max_tokens": 4}
    assert http.post("/v1/messages", json={**asked, "output_config": {"effort": "max"}}).status_code == 200
    refused = http.post("/v1/messages", json={**asked, "output_config": {"effort": "most"}})
    assert refused.status_code == 400 and "output_config.effort: 'most'" in refused.json()["error"]["message"]


def test_a_format_of_messages(http):
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    asked = {"model": "nano", "messages": USER, "max_tokens": 64, "thinking": {"type": "disabled"}}
    config = {"format": {"type": "json_schema", "schema": schema}}
    said = http.post("/v1/messages", json={**asked, "output_config": config}).json()
    assert json.loads(said["content"][0]["text"])["n"] in (1, 2)
    odd = {"format": {"type": "json_schema", "schema": 3}}
    refused = http.post("/v1/messages", json={**asked, "output_config": odd}).json()
    assert refused["error"]["message"].startswith("output_config.format.schema")


def test_a_budget_beside_strict_tools_is_passed_over(http):
    """The tools' form is a promise, the budget a wish."""
    function = {"name": "f", "strict": True, "parameters": {"type": "object"}}
    asked = {
        "model": "nano",
        "messages": USER,
        "max_tokens": 4,
        "tools": [{"type": "function", "function": function}],
        "thinking_token_budget": 3,
        "reasoning_effort": "none",
    }
    said = http.post("/v1/chat/completions", json=asked)
    assert said.status_code == 200 and said.headers["x-afserve-ignored"] == "thinking_token_budget"


def test_earlier_reasoning_goes_to_the_template():
    """Of Anthropic's blocks, Ollama's messages and items of responses, as OpenAI's field that templates read."""
    block = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "yes"}]
    asked = [*USER, {"role": "assistant", "content": block}]
    found = anthropic.translate(Fields({"max_tokens": 1, "messages": asked})).body["messages"]
    assert found[-1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    message = {"role": "assistant", "content": "yes", "thinking": "hm"}
    found = ollama.translate_chat(Fields({"messages": [*USER, message]})).body["messages"]
    assert found[-1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    items = [
        *USER,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
    ]
    found = responses.translate(Fields({"input": items}), []).body["messages"]
    assert [message.get("reasoning_content") for message in found] == [None, "hm", None]


@pytest.mark.parametrize("opens", [(100,), (100, 101, 102)])
def test_what_a_budget_lets_pass(opens):
    """A mark of one token, and one of three as gpt-oss has it."""
    compiler, close = Compiler(FOLDER, VOCABULARY, (END,)), 200

    def passes(tokens, most=3, inside=False):
        matcher = compiler.compile(of_thought(most, opens, close, inside=inside))
        return all(matcher.allows(token) and matcher.consume([token]) is None for token in tokens)

    words = [50, 51, 52]
    assert passes([*words, *words]) and passes([*opens, *words, close, *words, *words, END])
    assert passes([*words, close], inside=True) and passes([close, *words], inside=True)
    assert not passes([*opens, *words, 53]) and not passes([*words, 53], inside=True)
    assert not passes([*opens, *words, close, *opens]) and not passes([*words, *opens])
    assert passes([*opens, close, *words], most=0) and not passes([*opens, 50], most=0)
    assert passes([*words, *opens[:-1], 60])


@pytest.mark.slow
def test_a_large_budget_costs_no_more_to_follow():
    compiler = Compiler(FOLDER, VOCABULARY, (END,))
    matcher = compiler.compile(of_thought(1 << 24, (100,), 200, inside=True))
    for token in range(300, 400):
        assert matcher.allows(token)
        matcher.consume([token])
