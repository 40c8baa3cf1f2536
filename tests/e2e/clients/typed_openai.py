"""OpenAI's SDK for Python by its types (mypy --strict): what is ours is sent, answers are validated strictly."""

import sys
from collections.abc import Mapping

from openai import OpenAI
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionFunctionToolParam, ChatCompletionMessageParam
from openai.types.responses import Response

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=60)
said: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is in the first drawer?"}]
schema: dict[str, object] = {"type": "object", "properties": {"drawer": {"type": "integer"}}}
tools: list[ChatCompletionFunctionToolParam] = [
    {"type": "function", "function": {"name": "look", "parameters": schema}}
]
hints: Mapping[str, object] = {
    "cache_control": {"type": "ephemeral", "ttl": "5m"},
    "agent_hints": {"priority": 1},
}
ours: Mapping[str, object] = {
    "retain": 900, "priority": 1, "cache_salt": "s", "deadline": 60.0, "ttft": 60.0, "tpot": 60.0, "nvext": hints,
    "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [7], "min_tokens": 1, "draft": "off",
}  # fmt: skip
more = {**ours, "chat_template_kwargs": {"x": 1}, "include_reasoning": True, "thinking_token_budget": 5}

chat = client.chat.completions.with_raw_response.create(
    model="nano", messages=said, tools=tools, parallel_tool_calls=False, prompt_cache_key="k", seed=1,
    prompt_cache_retention="24h", service_tier="flex", extra_body=more,
)  # fmt: skip
chatted = ChatCompletion.model_validate_json(chat.text, strict=True)
calls = chatted.choices[0].message.tool_calls or []
assert [call.function.name for call in calls if call.type == "function"] == ["look"]
assert chatted.usage is not None and chatted.usage.prompt_tokens_details is not None
assert chatted.usage.prompt_tokens_details.cached_tokens is not None
pieces = list(
    client.chat.completions.create(
        model="nano",
        messages=said,
        tools=tools,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=more,
    )
)
for piece in pieces:
    type(piece).model_validate(piece.to_dict(), strict=True)
usage = pieces[-1].usage
assert usage is not None and usage.prompt_tokens_details is not None

done = client.completions.with_raw_response.create(
    model="nano", prompt="one two", max_tokens=4, extra_body=dict(ours)
)
assert Completion.model_validate_json(done.text, strict=True).usage is not None
answer = client.responses.with_raw_response.create(
    model="nano",
    input="What is in it?",
    prompt_cache_key="k",
    prompt_cache_retention="24h",
    extra_body=dict(ours),
)
answered = Response.model_validate_json(answer.text, strict=True)
assert answered.usage is not None and answered.usage.input_tokens_details.cached_tokens >= 0
kinds = [event.type for event in client.responses.create(model="nano", input="And now?", stream=True)]
assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
models = client.models.list()
for model in models:
    Model.model_validate(model.to_dict(), strict=True)
