"""The fields of request bodies, each declared once: how it is read and checked, and its JSON schema.

A body is a class whose attributes are its fields; each is read of the JSON when it is asked for, so that the first
fault in the order of the reader is the one that is told. `openapi/document.py` makes the document of the same classes.

msgspec 0.22 was tried in its place. It reads these fields in 0.4 us, these readers in 10 us of a request that takes
milliseconds. Its refusals know neither the value nor both ends of a range ("Expected `float` <= 2.0 - at
`$.temperature`"), so that ours would come from a second reader of the same fields; it would delete no line of `fields`,
which messages, tools and the other APIs need, and it weighs 0.7 MB.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

from afserve.engine.scheduling.request import (
    MAX_BIASES,
    MAX_DRAFT,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_RETAIN,
    MAX_SALT,
)
from afserve.errors import RequestError, shown
from afserve.server.bodies.fields import Fields, or_else
from afserve.server.bodies.nvext import hints_of

T = TypeVar("T")
Schema = Mapping[str, object]

MAX_TOKENS = 1 << 24
MAX_MESSAGES = 8192
MAX_TOOLS = 1024
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_LISTED_IDS = 1024
MAX_ID_DIGITS = 20
LONGEST_SECONDS = 86_400.0
OFF, PREDICTION = "off", "prediction"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# OpenAI's tiers; the lowest number runs first.
TIERS = {"auto": 0, "default": 0, "priority": -100, "flex": 100, "scale": 0}
# OpenAI's words, in seconds of `retain`.
RETENTIONS = {"in_memory": 0.0, "in-memory": 0.0, "24h": MAX_RETAIN}


class Declared(Generic[T]):
    """One field of a `Body`. `needed`: a request without it is refused."""

    def __init__(self, schema: Schema, read: Callable[[Fields, str], T], *, needed: bool = False) -> None:
        self.schema, self.needed = schema, needed
        self._read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, body: None, owner: type) -> Self: ...
    @overload
    def __get__(self, body: "Body", owner: type) -> T: ...
    def __get__(self, body: "Body | None", owner: type) -> "Self | T":
        return self if body is None else self._read(body.fields, self.name)


class Body:
    """A JSON object whose fields are declared. An attribute raises RequestError that names its field."""

    declared: ClassVar[Mapping[str, Declared[Any]]] = {}

    def __init__(self, fields: Fields) -> None:
        self.fields = fields

    def __init_subclass__(cls) -> None:
        found = {n: v for base in reversed(cls.__mro__) for n, v in vars(base).items()}
        cls.declared = {name: value for name, value in found.items() if isinstance(value, Declared)}

    @classmethod
    def given(cls, fields: Fields) -> dict[str, Any]:
        """Those that are there, by name."""
        body = cls(fields)
        return {name: getattr(body, name) for name in cls.declared if fields.get(name) is not None}

    @classmethod
    def schema(cls) -> Schema:
        needed = [name for name, field in cls.declared.items() if field.needed]
        return objects(tuple(needed), **{name: field.schema for name, field in cls.declared.items()})


# ---- schemas


def objects(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


def arrays(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


TEXT: Schema = {"type": "string"}
NATURAL: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": ["boolean", "null"]}
OBJECT: Schema = {"type": "object"}
IDS = arrays(NATURAL, minItems=1)
PROMPT: Schema = {"oneOf": [TEXT, arrays(TEXT, minItems=1), IDS, arrays(IDS, minItems=1)]}
MESSAGE = objects(("role",), role=TEXT, content={"type": ["string", "array", "null"]})
_STOP: Schema = {**TEXT, "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}

# ---- kinds of fields; without a value they are None, or their default


def whole(low: int, high: int) -> Declared[int | None]:
    schema: Schema = {"type": ["integer", "null"], "minimum": low, "maximum": high}
    return Declared(schema, lambda fields, name: fields.integer(name, low, high))


def number(low: float, high: float) -> Declared[float | None]:
    schema: Schema = {"type": ["number", "null"], "minimum": low, "maximum": high}
    return Declared(schema, lambda fields, name: fields.real(name, low, high))


def flag(default: bool = False) -> Declared[bool]:
    return Declared(FLAG, lambda fields, name: fields.flag(name, default))


def text(longest: int | None = None) -> Declared[str | None]:
    schema: Schema = TEXT if longest is None else {**TEXT, "maxLength": longest}

    def read(fields: Fields, name: str) -> str | None:
        found = fields.text(name)
        if found is not None and longest is not None:
            check_length(name, found, longest)
        return found

    return Declared(schema, read)


def one_of(*values: str) -> Declared[str | None]:
    def read(fields: Fields, name: str) -> str | None:
        found = fields.text(name)
        if found is not None and found not in values:
            raise RequestError.about(name, f"{shown(found)} is none of {', '.join(values)}")
        return found

    return Declared({**TEXT, "enum": list(values)}, read)


def section(schema: Schema = OBJECT) -> Declared[Fields | None]:
    return Declared(schema, Fields.section)


def raw(schema: Schema, *, needed: bool = False) -> Declared[object]:
    """What has a reader of its own that looks into it."""
    return Declared(schema, Fields.get, needed=needed)


def check_length(name: str, value: str, longest: int) -> None:
    if len(value) > longest:
        raise RequestError.about(name, f"has {len(value)} characters, at most {longest} are allowed")


def _stops(fields: Fields, name: str) -> tuple[str, ...]:
    stops = fields.texts(name, MAX_STOPS)
    check_length(name, max(stops, key=len, default=""), MAX_STOP_CHARACTERS)
    return stops


def _token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    fields.entries(name, MAX_LISTED_IDS)
    return fields.integers(name)


def _biases(fields: Fields, name: str) -> tuple[tuple[int, float], ...]:
    """(token id, what is added to its logit) of an object."""
    biases = fields.section(name)
    if biases is None:
        return ()
    fields.entries(name, MAX_BIASES)
    pairs = []
    for key in biases.raw():
        if not key.isascii() or not key.isdigit() or len(key) > MAX_ID_DIGITS:
            raise RequestError.about(name, f"{shown(key)} is not a token id")
        pairs.append((int(key), or_else(biases.real(key, -100, 100), 0.0)))
    return tuple(pairs)


def _draft(fields: Fields, name: str) -> int | None:
    """The most tokens that are guessed for a step; 0 for "off"."""
    return 0 if fields.get(name) == OFF else fields.integer(name, 0, MAX_DRAFT)


# ---- the bodies


class SamplingFields(Body):
    """How tokens are drawn and what is told of them, by the names of `SamplingParams`."""

    temperature = number(0, 2)
    top_p = number(0, 1)
    top_k = whole(-1, 1 << 24)
    min_p = number(0, 1)
    repetition_penalty = number(0, 100)
    presence_penalty = number(-2, 2)
    frequency_penalty = number(-2, 2)
    seed = whole(-(1 << 63), (1 << 63) - 1)
    stop = Declared({"oneOf": [_STOP, arrays(_STOP, maxItems=MAX_STOPS)]}, _stops)
    stop_token_ids = Declared(arrays(NATURAL, maxItems=MAX_LISTED_IDS), _token_ids)
    include_stop_str_in_output = flag()
    min_tokens = whole(0, MAX_TOKENS)
    ignore_eos = flag()
    n = whole(1, 128)
    logit_bias = Declared(
        {**OBJECT, "maxProperties": MAX_BIASES, "additionalProperties": {"type": "number"}}, _biases
    )
    draft = Declared(
        {"oneOf": [{"enum": [OFF]}, {**NATURAL, "maximum": MAX_DRAFT}, {"type": "null"}]}, _draft
    )
    return_routed_experts = flag()


class SchedulingFields(Body):
    """When a request has its turn, by the names of `Scheduling`."""

    service_tier = one_of(*TIERS)
    priority = whole(-MAX_PRIORITY, MAX_PRIORITY)
    cache_salt = text(MAX_SALT)
    retain = number(0.0, MAX_RETAIN)
    prompt_cache_retention = one_of(*RETENTIONS)
    deadline = number(0.001, LONGEST_SECONDS)
    ttft = number(0.001, LONGEST_SECONDS)
    tpot = number(0.0001, LONGEST_SECONDS)
    service_class = text(64)
    nvext = section()


class StreamFields(Body):
    include_usage = flag()
    continuous_usage_stats = flag()


class GenerationBody(SchedulingFields, SamplingFields):
    """What completions and chats share."""

    model = raw({"type": ["string", "null"]})
    stream = flag()
    stream_options = section(StreamFields.schema())
    best_of = whole(1, 128)
    skip_special_tokens = flag(True)
    response_format = raw(OBJECT)
    structured_outputs = raw(OBJECT)
    prediction = section(
        objects(("type", "content"), type={"enum": ["content"]}, content={"type": ["string", "array"]})
    )
    resume = number(0.001, LONGEST_SECONDS)
    request_id = text()


def _completion_tokens(fields: Fields, name: str) -> int | None:
    """None at all of them is for a prompt that is repeated."""
    return fields.integer(name, 0 if fields.flag("echo") else 1, MAX_TOKENS)


class CompletionBody(GenerationBody):
    prompt = raw(PROMPT, needed=True)
    max_tokens = Declared(whole(0, MAX_TOKENS).schema, _completion_tokens)
    logprobs = whole(0, MAX_LOGPROBS)
    echo = flag()
    suffix = text()
    add_special_tokens = flag(True)


class ChatBody(GenerationBody):
    messages = raw(arrays(MESSAGE, minItems=1, maxItems=MAX_MESSAGES), needed=True)
    max_tokens = whole(1, MAX_TOKENS)
    max_completion_tokens = whole(1, MAX_TOKENS)
    logprobs = flag()
    top_logprobs = whole(0, MAX_LOGPROBS)
    tools = raw(arrays(OBJECT, maxItems=MAX_TOOLS))
    tool_choice = raw({"type": ["string", "object", "null"]})
    parallel_tool_calls = raw(FLAG)
    reasoning_effort = one_of(*EFFORTS)
    thinking_token_budget = whole(0, MAX_TOKENS)
    include_reasoning = flag(True)
    chat_template_kwargs = section()
    continue_final_message = flag()
    add_generation_prompt = flag(True)


class WarmBody(SchedulingFields):
    """Of a prompt, or of messages: what may stand before the answer."""

    model = raw({"type": ["string", "null"]})
    prompt = raw(PROMPT)
    messages = raw(arrays(MESSAGE, minItems=1, maxItems=MAX_MESSAGES))
    tools = raw(arrays(OBJECT, maxItems=MAX_TOOLS))
    chat_template_kwargs = section()
    add_special_tokens = flag(True)


class EmbeddingBody(SchedulingFields):
    model = raw({"type": ["string", "null"]})
    input = raw(PROMPT, needed=True)
    encoding_format = one_of("float", "base64")
    add_special_tokens = flag(True)


class TokenizeBody(Body):
    """Of a prompt, or of messages."""

    prompt = text()
    messages = raw(arrays(MESSAGE))
    add_special_tokens = flag(True)
    return_token_strs = flag()


BATCH_PRIORITY = 1000  # after everything else


@dataclass(frozen=True, slots=True)
class Scheduling:
    """`deadline` in seconds from the request's arrival; None for no end. A request whose first token is predicted to
    take longer than `ttft` seconds, or its further ones `tpot` each, is refused at once; None asks for nothing. The
    `tenant` and its `share` are the key's, never what a client writes. What it leaves in a cache is evicted after all
    else for `retain` seconds. `tier` is what an answer calls it. `service_class` is the operator's; without
    `refuses_late` its times are only what answers are judged by. Without `ahead` nothing is computed for a turn to
    come."""

    priority: int = 0
    cache_salt: str = ""
    deadline: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    retain: float = 0.0
    tenant: str = ""
    share: int = 1
    tier: str = "default"
    service_class: str = ""
    refuses_late: bool = True
    ahead: bool = True


def scheduling_of(fields: Fields) -> Scheduling:
    given = SchedulingFields.given(fields)
    tier = given.pop("service_tier", "auto")
    kept = RETENTIONS[given.pop("prompt_cache_retention", "in_memory")]
    given.pop("nvext", None)
    own = {"priority": TIERS[tier], "retain": kept, **hints_of(fields), **given}
    return Scheduling(**own, tier="default" if tier == "auto" else tier)
