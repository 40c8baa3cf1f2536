"""`python -m bench.tool_calls`: are calls that a model has to make (`tool_choice` required) ones that can be read?

The functions are those of the Berkeley leaderboard's AST categories (`pip install --no-deps bfcl-eval`). A model of
random weights answers each case once at temperature 1, held to the grammar of `tool_choice=required`; then the reader
of such answers must find calls, each with a name of the case and arguments that its schema allows.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afserve.server.bodies.fields import Fields
from afserve.server.bodies.tools import Tools, tools_of
from afserve.server.reading.parts import Argued, Called
from afserve.server.reading.table import Reading
from bench.origin import ROOT, origin
from bench.schemas import TOKENS, Answer, Schema, answers, parsed

OUT = ROOT / "bench" / "results" / "tool_calls.jsonl"
CATEGORIES = (
    "simple_python",
    "simple_java",
    "simple_javascript",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
)
# The leaderboard's names of types, as JSON schema has them; it takes what may be anything for text.
TYPES = {
    "dict": "object",
    "HashMap": "object",
    "float": "number",
    "double": "number",
    "long": "integer",
    "tuple": "array",
    "Array": "array",
    "ArrayList": "array",
    "Boolean": "boolean",
    "String": "string",
    "char": "string",
    "any": "string",
    "": "string",
}
Call = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """`parameters` by the name of the function, which OpenAI's rules allow."""

    name: str
    tools: Tools
    parameters: Mapping[str, Schema]


@dataclass(frozen=True, slots=True)
class Made:
    """The calls of an answer; None where some text is no call."""

    case: Case
    ended: str
    refused: str
    calls: tuple[Call, ...] | None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _schema(value: Any) -> Any:
    """A JSON schema of the leaderboard's own kind."""
    if isinstance(value, list):
        return [_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {k: v for k, v in value.items() if k in ("enum", "required", "minimum", "maximum", "description")}
    if isinstance(kind := value.get("type"), str):
        kept["type"] = TYPES.get(kind, kind)
    if isinstance(items := value.get("items"), dict):
        kept["items"] = _schema(items)
    if isinstance(properties := value.get("properties"), dict):
        kept["properties"] = {name: _schema(item) for name, item in properties.items()}
    return kept


def cases(folder: Path) -> list[Case]:
    """Of all AST categories, in the leaderboard's order."""
    found = []
    for category in CATEGORIES:
        for line in _lines(folder / f"BFCL_v4_{category}.json"):
            functions = {f["name"]: {**f, "parameters": _schema(f["parameters"])} for f in line["function"]}
            tools = [{"type": "function", "function": function} for function in functions.values()]
            parameters = {name: function["parameters"] for name, function in functions.items()}
            fields = Fields({"tools": tools, "tool_choice": "required"})
            found.append(Case(line["id"], tools_of(fields), parameters))
    return found


def possible_calls(folder: Path) -> list[list[Call]]:
    """The first possible answer of each case, without arguments that may be left out."""
    found: list[list[Call]] = []
    for category in CATEGORIES:
        for line in _lines(folder / "possible_answer" / f"BFCL_v4_{category}.json"):
            found.append(
                [
                    (name, {key: values[0] for key, values in given.items() if values and values[0] != ""})
                    for call in line["ground_truth"]
                    for name, given in call.items()
                ]
            )
    return found


def _read(answer: Answer[Case]) -> Made:
    reader = Reading("list").reader()
    parts = reader.read_text(answer.text) + reader.end_text()
    names = [part.name for part in parts if isinstance(part, Called)]
    texts = [
        "".join(p.text for p in parts if isinstance(p, Argued) and p.index == i) for i in range(len(names))
    ]
    calls: tuple[Call, ...] | None = None
    if names and all(isinstance(part, Called | Argued) for part in parts):
        try:
            calls = tuple((name, parsed(text)) for name, text in zip(names, texts, strict=True))
        except ValueError:
            calls = None
    return Made(answer.asked, answer.ended, answer.refused, calls)


def answered(asked: Sequence[Case], tokens: int = TOKENS) -> list[Made]:
    """What random weights call in each case, in their order."""
    return [_read(answer) for answer in answers(asked, _grammar, tokens)]


def _grammar(case: Case) -> str:
    wanted = case.tools.wanted_grammar()
    assert wanted is not None, "calls are required"
    return wanted.grammar


def _follows(made: Made, valid: Callable[[Schema, object], bool]) -> bool:
    return all(
        name in made.case.parameters and valid(made.case.parameters[name], given)
        for name, given in made.calls or ()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, help="of the leaderboard's files (bfcl_eval's own)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each Nth case")
    parser.add_argument("--save", action="store_true", help=f"keep the row in {OUT.relative_to(ROOT)}")
    options = parser.parse_args()
    import jsonschema_rs

    if options.folder is None:
        import bfcl_eval

        options.folder = Path(bfcl_eval.__file__).parent / "data"
    found = answered(cases(options.folder)[:: options.every])
    ended = [made for made in found if made.ended == "stop"]
    row = {
        "bench": "tool_calls",
        "cases": len(found),
        "refused": sum(bool(made.refused) for made in found),
        "ended": len(ended),
        "unread": sum(made.calls is None for made in ended),
        "calls": sum(len(made.calls or ()) for made in ended),
        "invalid": sum(not _follows(made, jsonschema_rs.is_valid) for made in ended),
        "tokens": TOKENS,
        **origin(),
    }
    print(json.dumps(row))
    for made in found:
        if made.refused:
            print(f"{made.case.name}: {made.refused}")
        elif made.ended == "stop" and not _follows(made, jsonschema_rs.is_valid):
            print(f"{made.case.name}: not valid: {made.calls}")
    if options.save:
        OUT.write_text(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
