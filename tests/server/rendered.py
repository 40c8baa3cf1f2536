"""Calls as the chat templates of the families write them, and what a reader makes of text in pieces."""

import json
from collections.abc import Mapping, Sequence

from afserve.server.reading.parts import Argued, Called, Content, Thought
from afserve.server.reading.table import Reading

Call = tuple[str, Mapping[str, object]]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: object) -> str:
    """An argument between tags: words as they are, all else as JSON."""
    return value if isinstance(value, str) else _json(value)


def _list(calls: Sequence[Call], arguments: str = "arguments") -> str:
    return "[" + ", ".join(_json({"name": name, arguments: given}) for name, given in calls) + "]"


def _tagged(call: str, key: str, value: str, close: str, calls: Sequence[Call]) -> str:
    """Each of the patterns has one place for a name, and one for text."""
    return "\n".join(
        call.format(name) + "".join(key.format(k) + value.format(_text(v)) for k, v in given.items()) + close
        for name, given in calls
    )


def _gemma(value: object) -> str:
    """Texts in marks, names without."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_gemma(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    return str(value).lower() if isinstance(value, bool) else str(value)


def _python(calls: Sequence[Call]) -> str:
    made = (f"{name}({', '.join(f'{k}={v!r}' for k, v in given.items())})" for name, given in calls)
    return f"[{', '.join(made)}]"


def rendered(form: str, calls: Sequence[Call]) -> str:
    """Raises KeyError for a form that is not known here."""
    return {
        "hermes": lambda: "\n".join(
            f"<tool_call>\n{_json({'name': name, 'arguments': given})}\n</tool_call>" for name, given in calls
        ),
        "mistral": lambda: "[TOOL_CALLS]" + _list(calls),
        "granite": lambda: "<|tool_call|>" + _list(calls),
        "gemma": lambda: "".join(
            f"<|tool_call>call:{name}{_gemma(given)}<tool_call|>" for name, given in calls
        ),
        "lfm2": lambda: f"<|tool_call_start|>{_python(calls)}<|tool_call_end|>",
        "cohere": lambda: (
            "<|START_ACTION|>[\n"
            + ",\n".join(
                f"    {_json({'tool_call_id': str(at), 'tool_name': name, 'parameters': given})}"
                for at, (name, given) in enumerate(calls)
            )
            + "\n]<|END_ACTION|>"
        ),
        "hunyuan": lambda: f"<tool_calls>{_list(calls)}</tool_calls>",
        "list": lambda: _list(calls, "parameters"),
        "deepseek": lambda: (
            "<｜tool▁calls▁begin｜>"
            + "\n".join(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(given)}\n```<｜tool▁call▁end｜>"
                for name, given in calls
            )
            + "<｜tool▁calls▁end｜>"
        ),
        "kimi": lambda: (
            "<|tool_calls_section_begin|>"
            + "".join(
                f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{_json(given)}<|tool_call_end|>"
                for i, (name, given) in enumerate(calls)
            )
            + "<|tool_calls_section_end|>"
        ),
        "qwen-xml": lambda: _tagged(
            "<tool_call>\n<function={}>\n",
            "<parameter={}>\n",
            "{}\n</parameter>\n",
            "</function>\n</tool_call>",
            calls,
        ),
        "minimax": lambda: (
            "<minimax:tool_call>\n"
            + _tagged('<invoke name="{}">\n', '<parameter name="{}">', "{}</parameter>\n", "</invoke>", calls)
            + "\n</minimax:tool_call>"
        ),
        "glm": lambda: _tagged(
            "<tool_call>{}\n",
            "<arg_key>{}</arg_key>\n",
            "<arg_value>{}</arg_value>\n",
            "</tool_call>",
            calls,
        ),
        "hy3": lambda: (
            "<tool_calls:opensource>\n"
            + _tagged(
                "<tool_call:opensource>{}<tool_sep:opensource>\n",
                "<arg_key:opensource>{}</arg_key:opensource>\n",
                "<arg_value:opensource>{}</arg_value:opensource>\n",
                "</tool_call:opensource>",
                calls,
            )
            + "\n</tool_calls:opensource>"
        ),
        "channels": lambda: "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(given)}<|call|>"
            for name, given in calls
        ),
    }[form]()


def types_of(calls: Sequence[Call]) -> dict[str, dict[str, str]]:
    """Which arguments the tools' schemas call strings."""
    found: dict[str, dict[str, str]] = {}
    for name, given in calls:
        kinds = {key: "string" if isinstance(value, str) else "any" for key, value in given.items()}
        found.setdefault(name, {}).update(kinds)
    return found


def read(reading: Reading, pieces: Sequence[str]) -> tuple[str, str, list[str], list[str]]:
    """Words, reasoning, names and arguments of an answer that comes in `pieces`."""
    reader = reading.reader()
    parts = [part for piece in pieces for part in reader.read_text(piece)] + reader.end_text()
    said = "".join(p.text for p in parts if isinstance(p, Content))
    thought = "".join(p.text for p in parts if isinstance(p, Thought))
    names = [p.name for p in parts if isinstance(p, Called)]
    arguments = [
        "".join(p.text for p in parts if isinstance(p, Argued) and p.index == i) for i in range(len(names))
    ]
    return said, thought, names, arguments


def strict_json(text: str) -> object:
    """As RFC 8259 has it: without NaN and Infinity."""

    def refuse(word: str) -> object:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)
