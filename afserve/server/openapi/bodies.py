"""The bodies of requests and answers as JSON schemas, with the limits that the server checks. Values only.

A request's schema names what is looked at; other fields are ignored, as long as they would not change the answer.
"""

from collections.abc import Mapping

from afserve.engine.scheduling.request import MAX_BIASES, MAX_LOGPROBS, MAX_PRIORITY, MAX_SALT
from afserve.server.bodies.embedding_request import FORMATS
from afserve.server.bodies.messages import MAX_MESSAGES
from afserve.server.bodies.openai import EFFORTS
from afserve.server.bodies.sampling import MAX_STOP_CHARACTERS, MAX_STOPS, MAX_TOKENS
from afserve.server.bodies.scheduling import LONGEST_SECONDS, TIERS
from afserve.server.bodies.tools import MAX_TOOLS

Schema = Mapping[str, object]


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


def _array(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def _whole(low: int, high: int) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def _number(low: float, high: float) -> Schema:
    return {"type": ["number", "null"], "minimum": low, "maximum": high}


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


_TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer", "minimum": 0}
_FLAG: Schema = {"type": ["boolean", "null"]}
_IDS = _array(_WHOLE, minItems=1)
_PROMPT: Schema = {"oneOf": [_TEXT, _array(_TEXT, minItems=1), _IDS, _array(_IDS, minItems=1)]}
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_SCHEDULING: dict[str, Schema] = {
    "model": {"type": ["string", "null"]},
    "priority": _whole(-MAX_PRIORITY, MAX_PRIORITY),
    "service_tier": _one_of(*TIERS),
    "cache_salt": {"type": "string", "maxLength": MAX_SALT},
    "deadline": _number(0.001, LONGEST_SECONDS),
    "ttft": _number(0.001, LONGEST_SECONDS),
    "tpot": _number(0.0001, LONGEST_SECONDS),
}
_SAMPLING: dict[str, Schema] = {
    **_SCHEDULING,
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "top_k": _whole(-1, 1 << 24),
    "min_p": _number(0, 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0, 100),
    "seed": _whole(-(1 << 63), (1 << 63) - 1),
    "n": _whole(1, 128),
    "stop": {"oneOf": [_STOP, _array(_STOP, maxItems=MAX_STOPS)]},
    "min_tokens": _whole(0, MAX_TOKENS),
    "ignore_eos": _FLAG,
    "logit_bias": {"type": "object", "maxProperties": MAX_BIASES, "additionalProperties": {"type": "number"}},
    "stream": _FLAG,
    "response_format": {"type": "object"},
    "structured_outputs": {"type": "object"},
}
_MESSAGE = _object(("role",), role=_TEXT, content={"type": ["string", "array", "null"]})
_TOOLS = _array({"type": "object"}, maxItems=MAX_TOOLS)
_COUNT = _whole(1, MAX_TOKENS)
_USAGE = _object(
    ("prompt_tokens", "total_tokens"), prompt_tokens=_WHOLE, completion_tokens=_WHOLE, total_tokens=_WHOLE
)


def _kept(kind: str, **more: Schema) -> Schema:
    """What has an id and a kind."""
    return _object(("id", "object", *more), id=_TEXT, object={"const": kind}, **more)


def _list(name: str) -> Schema:
    return _object(("object", "data"), object={"const": "list"}, data=_array(ref(name)))


SCHEMAS: Mapping[str, Schema] = {
    "CompletionRequest": _object(
        ("prompt",),
        **_SAMPLING,
        prompt=_PROMPT,
        max_tokens=_whole(0, MAX_TOKENS),
        logprobs=_whole(0, MAX_LOGPROBS),
        echo=_FLAG,
    ),
    "ChatRequest": _object(
        ("messages",),
        **_SAMPLING,
        messages=_array(_MESSAGE, minItems=1, maxItems=MAX_MESSAGES),
        max_tokens=_COUNT,
        max_completion_tokens=_COUNT,
        logprobs=_FLAG,
        top_logprobs=_whole(0, MAX_LOGPROBS),
        tools=_TOOLS,
        reasoning_effort=_one_of(*EFFORTS),
        thinking_token_budget=_whole(0, MAX_TOKENS),
    ),
    "EmbeddingRequest": _object(("input",), **_SCHEDULING, input=_PROMPT, encoding_format=_one_of(*FORMATS)),
    "ResponseRequest": _object(
        ("input",), input={"oneOf": [_TEXT, _array({"type": "object"})]}, store=_FLAG, tools=_TOOLS
    ),
    "MessageRequest": _object(
        ("messages", "max_tokens"), messages=_array(_MESSAGE, minItems=1), max_tokens=_COUNT, tools=_TOOLS
    ),
    "OllamaChatRequest": _object(
        ("messages",), messages=_array(_MESSAGE), stream=_FLAG, options={"type": "object"}
    ),
    "OllamaRequest": _object(("prompt",), prompt=_TEXT, stream=_FLAG, options={"type": "object"}),
    "OllamaModel": _object(("model",), model=_TEXT),
    "OllamaEmbedRequest": _object(("input",), input=_TEXT, options={"type": "object"}),
    "TokenizeRequest": _object(prompt=_TEXT, messages=_array(_MESSAGE), return_token_strs=_FLAG),
    "DetokenizeRequest": _object(("tokens",), tokens=_array(_WHOLE)),
    "BatchRequest": _object(
        ("endpoint", "input_file_id"), endpoint=_TEXT, input_file_id=_TEXT, completion_window=_one_of("24h")
    ),
    "FileForm": _object(("file", "purpose"), file={"type": "string", "format": "binary"}, purpose=_TEXT),
    "Any": {"type": "object"},
    "Text": {"type": "string"},
    "Stream": {"description": "Events, or lines of JSON, until the last says so."},
    "Completion": _kept(
        "text_completion",
        created=_WHOLE,
        model=_TEXT,
        choices=_array(_object(("index", "text", "finish_reason"))),
        usage=_USAGE,
    ),
    "Chat": _kept(
        "chat.completion",
        created=_WHOLE,
        model=_TEXT,
        choices=_array(_object(("index", "message", "finish_reason"))),
        usage=_USAGE,
    ),
    "Embeddings": _object(
        ("object", "data", "model", "usage"),
        object={"const": "list"},
        data=_array(_object(("object", "index", "embedding"), embedding={"type": ["array", "string"]})),
        model=_TEXT,
        usage=_USAGE,
    ),
    "Response": _kept("response", status=_TEXT, output=_array({"type": "object"})),
    "Model": _kept("model", created=_WHOLE, owned_by=_TEXT, max_model_len=_WHOLE),
    "Models": _list("Model"),
    "File": _kept("file", bytes=_WHOLE, created_at=_WHOLE, filename=_TEXT, purpose=_TEXT),
    "Files": _list("File"),
    "Batch": _kept(
        "batch", endpoint=_TEXT, status=_TEXT, request_counts={"type": "object"}, created_at=_WHOLE
    ),
    "Batches": _list("Batch"),
    "Deleted": _object(("id", "deleted"), id=_TEXT, deleted={"const": True}),
    "Tokens": _object(
        ("count", "max_model_len", "tokens"), count=_WHOLE, max_model_len=_WHOLE, tokens=_array(_WHOLE)
    ),
    "Prompt": _object(("prompt",), prompt=_TEXT),
    "Error": _object(("error",), error={"type": ["object", "string"]}),
}
