"""Frameworks through their OpenAI classes, where they are installed: LangChain, LiteLLM, LlamaIndex."""

import asyncio

import pytest
from pydantic import BaseModel

from tests.server.test_tools import CALLS, TOOLS, roomy, server  # noqa: F401 - fixtures

pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend
USER = [{"role": "user", "content": "hello"}]
CALLED = [("forecast", {"city": "Bern", "days": 2}), ("time", {})]


class Size(BaseModel):
    """How large it is."""

    width: int
    kind: str


@pytest.fixture
def chain(server):  # noqa: F811
    langchain_openai = pytest.importorskip("langchain_openai")
    return langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model="tiny", max_retries=0, stream_usage=True
    )


def test_langchain_answers_and_streams(chain, server):  # noqa: F811
    said = chain.invoke("hello")
    assert said.content == server.backend.reply and said.usage_metadata["output_tokens"] == 8
    parts = list(chain.stream("hello"))
    assert "".join(part.content for part in parts) == server.backend.reply and len(parts) > 4
    assert sum((part.usage_metadata or {}).get("output_tokens", 0) for part in parts) == 8
    both = chain.batch(["hello", "bye"])
    assert [one.content for one in both] == [server.backend.reply] * 2
    assert asyncio.run(chain.ainvoke("hello")).content == server.backend.reply


def test_langchain_calls_tools(chain, server):  # noqa: F811
    server.backend.reply = CALLS
    bound = chain.bind_tools(TOOLS)
    assert [(c["name"], c["args"]) for c in bound.invoke("hello").tool_calls] == CALLED
    whole = None
    for part in bound.stream("hello"):
        whole = part if whole is None else whole + part
    assert [(c["name"], c["args"]) for c in whole.tool_calls] == CALLED


def test_langchain_gets_a_model(chain, server):  # noqa: F811
    server.backend.reply = '{"width": 3, "kind": "wide"}'
    asked = chain.with_structured_output(Size, method="json_schema")
    assert asked.invoke("hello") == Size(width=3, kind="wide")
    assert server.backend.requests[-1].params.grammar


def test_langchain_is_refused_by_name(chain):
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chain.bind(temperature=-1).invoke("hello")


@pytest.fixture
def lite(server, monkeypatch):  # noqa: F811
    monkeypatch.setenv(
        "LITELLM_LOCAL_MODEL_COST_MAP", "True"
    )  # without it prices are asked for over the network
    litellm = pytest.importorskip("litellm")

    def ask(**given):
        return litellm.completion(
            **{
                "model": "openai/tiny",
                "api_base": f"{server.url}/v1",
                "api_key": "none",
                "messages": USER,
                "num_retries": 0,
                **given,
            }
        )

    return ask


def test_litellm(lite, server):  # noqa: F811
    assert lite().choices[0].message.content == server.backend.reply
    parts = [part.choices[0].delta.content or "" for part in lite(stream=True)]
    assert "".join(parts) == server.backend.reply and len(parts) > 4
    server.backend.reply = CALLS
    choice = lite(tools=TOOLS).choices[0]
    assert [c.function.name for c in choice.message.tool_calls] == ["forecast", "time"]
    assert choice.finish_reason == "tool_calls"


def test_litellm_is_refused_by_name(lite):
    litellm = pytest.importorskip("litellm")
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        lite(temperature=-1)
    with pytest.raises(litellm.NotFoundError):
        lite(model="openai/other")


@pytest.fixture
def index(server):  # noqa: F811
    like = pytest.importorskip("llama_index.llms.openai_like")
    return like.OpenAILike(
        model="tiny",
        api_base=f"{server.url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
    )


def test_llama_index(index, server):  # noqa: F811
    llms = pytest.importorskip("llama_index.core.llms")
    asked = [llms.ChatMessage(role="user", content="hello")]
    assert index.chat(asked).message.content == server.backend.reply
    parts = [part.delta or "" for part in index.stream_chat(asked)]
    assert "".join(parts) == server.backend.reply and len(parts) > 4
    assert index.complete("hello").text == server.backend.reply


def test_llama_index_calls_tools(index, server):  # noqa: F811
    tools = pytest.importorskip("llama_index.core.tools")

    def forecast(city: str, days: int) -> str:
        """The weather of some days."""
        return f"{city} {days}"

    def time() -> str:
        """What time it is."""
        return "now"

    server.backend.reply = CALLS
    given = [tools.FunctionTool.from_defaults(fn=fn) for fn in (forecast, time)]
    reply = index.chat_with_tools(given, user_msg="hello", allow_parallel_tool_calls=True)
    calls = index.get_tool_calls_from_response(reply)
    assert [(c.tool_name, c.tool_kwargs) for c in calls] == CALLED
