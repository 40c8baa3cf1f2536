"""JSON bodies of every surface and what may be done to them: numbers at their extremes, surrogates, depth, length.

Values that `json` does not write, such as 10^400 or a key that is there twice, stand as `Raw` text.
"""

import json
import random
from collections.abc import Mapping

USER = {"role": "user", "content": "x"}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}, "required": ["a"]}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1'}}
CHAT = {"model": "nano", "messages": [USER], "max_tokens": 3}
MARK = {"type": "ephemeral", "ttl": "1h"}
HINTS = {
    "agent_hints": {"priority": 1, "speculative_prefill": True, "osl": 3},
    "cache_control": {"type": "ephemeral", "ttl": 300},
}
BODIES: tuple[tuple[str, Mapping[str, object]], ...] = (
    ("/v1/completions", {"model": "nano", "prompt": "x", "max_tokens": 3, "stream": True}),
    ("/v1/completions", {"prompt": [5, 6], "max_tokens": 3, "echo": True, "logprobs": 2, "n": 2, "seed": -1}),
    (
        "/v1/completions",
        {"prompt": ["a", "b"], "max_tokens": 2, "temperature": 0.5, "top_p": 0.5, "stop": ["a"]},
    ),
    ("/v1/completions", {"prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": "[a-c]{1,3}"}}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2, "resume": 1, "logit_bias": {"5": 1.0}}),
    ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    (
        "/v1/chat/completions",
        {**CHAT, "tools": [TOOL], "tool_choice": "auto", "logprobs": True, "top_logprobs": 2},
    ),
    ("/v1/chat/completions", {**CHAT, "messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, USER]}),
    (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "messages": [USER, {"role": "assistant", "content": "The"}], "continue_final_message": True},
    ),
    (
        "/v1/responses",
        {"model": "nano", "input": [{"type": "message", **USER}], "max_output_tokens": 3, "store": False},
    ),
    (
        "/v1/messages",
        {**CHAT, "system": [{"type": "text", "text": "x"}], "stop_sequences": ["a"], "stream": True},
    ),
    (
        "/v1/messages/count_tokens",
        {
            "model": "nano",
            "messages": [
                USER,
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [{"type": "tool_reference", "tool_name": "g"}],
                        }
                    ],
                },
            ],
            "tools": [
                {"name": "f", "input_schema": SCHEMA},
                {"name": "g", "input_schema": SCHEMA, "defer_loading": True},
            ],
        },
    ),
    ("/v1/chat/completions", {**CHAT, "nvext": HINTS, "prompt_cache_key": "x", "service_class": "x"}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2, "nvext": HINTS, "retain": 5.0, "cache_salt": "x"}),
    (
        "/v1/messages",
        {
            **CHAT,
            "system": [{"type": "text", "text": "x", "cache_control": MARK}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": MARK}]}],
            "tools": [{"name": "f", "input_schema": SCHEMA, "cache_control": MARK}],
            "cache_control": MARK,
        },
    ),
    (
        "/v1/responses",
        {"model": "nano", "input": "x", "max_output_tokens": 2, "prompt_cache_retention": "24h"},
    ),
    ("/v1/cache/warm", {"model": "nano", "messages": [USER], "tools": [TOOL], "retain": 9.0}),
    ("/v1/cache/warm", {"prompt": [5, 6, 7], "prompt_cache_retention": "24h", "cache_salt": "x"}),
    ("/v1/cache/unpin", {"model": "nano", "messages": [USER], "tools": [TOOL]}),
    ("/v1/cache/unpin", {"prompt": "x", "cache_salt": "x"}),
    ("/api/chat", {"model": "nano", "messages": [USER], "options": {"num_predict": 3, "temperature": 0}}),
    ("/api/generate", {"model": "nano", "prompt": "x", "options": {"num_predict": 3}, "format": SCHEMA}),
    ("/v1/embeddings", {"model": "nano", "input": ["x", "y"], "encoding_format": "base64"}),
    ("/tokenize", {"prompt": "x", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "developer", "content": [{"type": "text", "text": "x"}]}, USER]}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/v1/files", {}),
    ("/v1/batches", {"input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "24h"}),
    ("/admin/placement", {"nodes": 1, "layers": []}),
    ("/admin/scale", {"attention": 1}),
    ("/admin/fault", {"node": "attention-0", "kind": "kill"}),
)


MOST_BYTES = (
    12 << 20
)  # of a list as JSON: more than the server reads of a body, and lists in lists stay small


class Raw(str):
    """JSON text, or what is none."""


NUMBERS = (
    *(
        0,
        -1,
        1,
        2,
        (1 << 31) - 1,
        1 << 31,
        (1 << 53) + 1,
        (1 << 63) - 1,
        1 << 63,
        -(1 << 63),
        -(1 << 63) - 1,
        1 << 64,
    ),
    *(5e-324, 1e-320, 2.2e-308, 1e-45, 1.8e308 / 2, -1e308, -0.0, 0.1, 1e-9, 1.0000001, 2.0, 1e15),
    *(
        Raw("1" + "0" * 400),
        Raw("1e400"),
        Raw("-1e400"),
        Raw("1e-400"),
        Raw("NaN"),
        Raw("-Infinity"),
        Raw("9" * 4301),
    ),
    *(Raw("01"), Raw("1."), Raw("0x10"), Raw("1E5"), Raw("-0"), Raw("1" + "0" * 300 + ".0")),
)
TEXTS = (
    *(
        "",
        " ",
        "\0",
        "\x7f",
        "\ud800",
        "\udfff\ud800",
        "\u202e",
        "\ufffd",
        "é" * 40,
        "😀" * 9,
        "<|im_end|>",
        "</s>",
        "{{ 7*7 }}",
    ),
    *(
        "../../etc/passwd",
        "/etc/passwd",
        "nano:latest",
        "x" * 9000,
        "a" * 60_000,
        "'; --",
        "%00",
        "user",
        "developer",
        "wizard",
    ),
    *(
        "(a+)+$",
        ".*" * 200,
        "[" * 400,
        "json_object",
        "required",
        "auto",
        "data: [DONE]\n\n",
        "\r\nX: y",
        "\\ud800",
    ),
)
MISSING = (
    *(
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b"\0" * 40,
        b"{}" * 2,
        b'{"prompt":"x"}x',
    ),
    *(
        b'{"a":' * 20_000,
        b"[" * 20_000,
        b'{"prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"\\ud800":1}',
    ),
    *(
        b'{"prompt":"x","prompt":"y","max_tokens":1,"max_tokens":2}',
        b'{"prompt":"\xc3\x28"}',
        b"--x\r\n\r\n--x--",
    ),
)


def value_of(dice: random.Random) -> object:
    match dice.randrange(9):
        case 0 | 1 | 2:
            return dice.choice(NUMBERS)
        case 3 | 4:
            return dice.choice(TEXTS)
        case 5:
            return dice.choice((None, True, False))
        case 6:
            return Raw("[" * (deep := dice.choice((1, 3, 200, 5000))) + "]" * deep)
        case 7:
            item, times = value_of(dice), dice.choice((0, 1, 2, 40, 60_000 if dice.random() < 0.1 else 3))
            return [item] * min(times, max(1, MOST_BYTES // len(written(random.Random(0), item))))
        case _:
            return {
                dice.choice(("a", "type", "role", "content", "", "$ref", "x" * 300)): value_of(dice)
                for _ in range(3)
            }


def changed(dice: random.Random, value: object) -> object:
    """With one place of it replaced, added, taken out or told twice."""
    if isinstance(value, Mapping) and value and dice.random() < 0.9:
        made = dict(value)
        key = dice.choice(list(made))
        match dice.randrange(6):
            case 0:
                del made[key]
            case 1:
                made[dice.choice((*FIELDS, key + "x"))] = value_of(dice)
            case 2 | 3 if isinstance(made[key], Mapping | list):
                made[key] = changed(dice, made[key])
            case _:
                made[key] = value_of(dice)
        return made
    if isinstance(value, list) and value and dice.random() < 0.9:
        at = dice.randrange(len(value))
        return [*value[:at], changed(dice, value[at]), *value[at + dice.randrange(2) :]]
    return value_of(dice)


FIELDS = (
    *(
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "n",
    ),
    *(
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "ignore_eos",
        "stop",
        "stop_token_ids",
        "logprobs",
        "top_logprobs",
    ),
    *(
        "stream",
        "stream_options",
        "echo",
        "suffix",
        "best_of",
        "logit_bias",
        "user",
        "priority",
        "cache_salt",
        "deadline",
    ),
    *(
        "ttft",
        "tpot",
        "resume",
        "request_id",
        "reasoning_effort",
        "thinking_token_budget",
        "chat_template_kwargs",
        "tools",
    ),
    *(
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
    ),
    *(
        "continue_final_message",
        "add_generation_prompt",
        "skip_special_tokens",
        "previous_response_id",
        "instructions",
        "text",
    ),
    *(
        "system",
        "thinking",
        "metadata",
        "options",
        "format",
        "raw",
        "keep_alive",
        "images",
        "truncation",
        "store",
        "include",
    ),
    *(
        "nvext",
        "agent_hints",
        "cache_control",
        "ttl",
        "retain",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_class",
        "service_tier",
    ),
)


def written(dice: random.Random, value: object) -> str:
    """As JSON; `Raw` as it is, a key now and then twice."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Mapping):
        pairs = [f"{json.dumps(key)}:{written(dice, item)}" for key, item in value.items()]
        return "{" + ",".join(pairs + (pairs[:1] if dice.random() < 0.02 else [])) + "}"
    if isinstance(value, list):
        return "[" + ",".join(written(dice, item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=dice.random() < 0.7)
