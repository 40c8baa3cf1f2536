"""`python -m bench.schemas`: does what a model of random weights answers follow the JSON schema that was asked for?

Schemas are made by hypothesis from the keywords of JSON-Schema-Test-Suite, a part of them with `$ref`, `anyOf`,
`pattern`, bounds and a depth of three at once. One colocated node of the bundled model's shape and tokenizer, its
weights random, answers each once at temperature 1; jsonschema-rs (`pip install jsonschema-rs`) says what is valid.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from afserve.config import EngineConfig, ModelSource
from afserve.engine.build import colocated
from afserve.engine.scheduling.request import GenerationRequest, SamplingParams
from afserve.errors import ConfigError, RequestError
from afserve.grammars.grammar import Compiler, of_schema
from afserve.tokens.tokenizer import Tokenizer, eos_ids
from bench.origin import ROOT, origin

Schema = dict[str, Any]
Valid = Callable[[Schema, object], bool]
Asked = TypeVar("Asked")

OUT = ROOT / "bench" / "results" / "schemas.jsonl"
NANO = ROOT / "configs" / "nano"
TOKENS = 1024
VOCABULARY = 2048
FLOAT = sys.float_info.max
STREAMS = 64
PROMPT = "Answer in JSON:"
PATTERNS = ("^[a-z]{1,8}$", "^[0-9]{3}-[0-9]{4}$", "^(a|b)+c?$", "^x[^y]{0,5}y$", "^\\d{4}-\\d{2}$")
NAMES = ("a", "id", "size", "name", "kind", "größe", "x y")


def _range(low: str, high: str, most: int) -> st.SearchStrategy[Schema]:
    pair = st.tuples(st.integers(0, most), st.integers(0, most)).map(sorted)
    return pair.map(lambda ends: {low: ends[0], high: ends[1]})


def _bounded() -> st.SearchStrategy[Schema]:
    ends = st.tuples(st.integers(-1000, 1000), st.integers(2, 500))
    return ends.map(lambda at: {"type": "integer", "minimum": at[0], "exclusiveMaximum": at[0] + at[1]})


def _leaf() -> st.SearchStrategy[Schema]:
    words = st.one_of(
        st.just({"type": "string"}),
        _range("minLength", "maxLength", 20).map(lambda ends: {"type": "string", **ends}),
        st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
        st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "email"]).map(
            lambda form: {"type": "string", "format": form}
        ),
    )
    numbers = st.one_of(
        st.sampled_from([{"type": "integer"}, {"type": "number"}]),
        _bounded(),
        st.integers(1, 9).map(lambda most: {"type": "number", "minimum": -0.5, "maximum": most}),
        st.sampled_from([2, 5, 10]).map(lambda of: {"type": "integer", "multipleOf": of}),
    )
    value = st.one_of(st.integers(-9, 9), st.booleans(), st.none(), st.sampled_from(NAMES))
    fixed = st.one_of(
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}]),
        st.lists(value, min_size=1, max_size=4).map(lambda of: {"enum": of}),
        value.map(lambda of: {"const": of}),
    )
    return st.one_of(words, numbers, fixed)


def _object(inner: st.SearchStrategy[Schema], least: int = 0) -> st.SearchStrategy[Schema]:
    @st.composite
    def made(draw: st.DrawFn) -> Schema:
        names = draw(st.lists(st.sampled_from(NAMES), min_size=least, max_size=4, unique=True))
        required = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
        found: Schema = {
            "type": "object",
            "properties": {name: draw(inner) for name in names},
            "required": required,
        }
        if draw(st.booleans()):
            found["additionalProperties"] = False
        return found

    return made()


def _array(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    items = st.tuples(inner, _range("minItems", "maxItems", 4))
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        items.map(lambda of: {"type": "array", "items": of[0], **of[1]}),
        several.map(
            lambda of: {"type": "array", "prefixItems": of, "items": False, "minItems": len(of)},
        ),
    )


def _nested(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    either = st.lists(inner, min_size=2, max_size=3).map(lambda of: {"anyOf": of})
    return st.one_of(_object(inner), _array(inner), either)


def plain() -> st.SearchStrategy[Schema]:
    """One keyword's schema, or some inside each other."""
    return st.recursive(_leaf(), _nested, max_leaves=6)


@st.composite
def rich(draw: st.DrawFn) -> Schema:
    """`$ref`, `anyOf`, `pattern`, bounds and a depth of three in one."""
    leaf = _leaf()
    part = draw(_object(leaf, 1))
    pattern = {"type": "string", "pattern": draw(st.sampled_from(PATTERNS))}
    deep = {
        "type": "object",
        "properties": {"part": {"$ref": "#/$defs/part"}, "code": pattern, "n": draw(_bounded())},
        "required": ["code", "n"],
        "additionalProperties": False,
    }
    either = {"anyOf": [deep, draw(leaf), {"$ref": "#/$defs/part"}]}
    return {
        "$defs": {"part": part},
        "type": "object",
        "properties": {
            "list": {"type": "array", "items": either, "minItems": 1, "maxItems": 3},
            "deep": deep,
        },
        "required": ["list", *draw(st.sampled_from([[], ["deep"]]))],
        "additionalProperties": False,
    }


def drawn(strategy: st.SearchStrategy[Schema], count: int, start: int) -> list[Schema]:
    """`count` different schemas, always the same ones for a `start`."""
    found: dict[str, Schema] = {}

    @seed(start)
    @settings(
        max_examples=4 * count,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def take(schema: Schema) -> None:
        found.setdefault(json.dumps(schema), schema)

    take()
    if len(found) < count:
        raise ConfigError(f"schemas: hypothesis made {len(found)} different ones, {count} were asked for")
    return list(found.values())[:count]


def parsed(text: str) -> Any:
    """JSON. A number beyond the range of floats, which JSON allows, becomes the last one in it instead of infinity.
    Raises ValueError."""
    return json.loads(text, parse_float=lambda number: max(-FLOAT, min(FLOAT, float(number))))


@dataclass(frozen=True, slots=True)
class Answer(Generic[Asked]):
    """To what was asked for: seconds to compile its grammar, why the answer ended, its text; `refused` says why there
    is none."""

    asked: Asked
    seconds: float = 0.0
    ended: str = ""
    text: str = ""
    refused: str = ""

    def follows(self: "Answer[Schema]", valid: Valid) -> bool:
        try:
            value = parsed(self.text)
        except ValueError:
            return False
        return valid(self.asked, value)


def answers(
    asked: Sequence[Asked], grammar_of: Callable[[Asked], str], tokens: int = TOKENS, weights: str = "dummy"
) -> list[Answer[Asked]]:
    """What a node of the bundled model's shape says to each, held to its grammar, in their order. Weights `dummy` are
    random."""
    tokenizer = Tokenizer.from_folder(NANO)
    prompt = tuple(tokenizer.encode(PROMPT))
    blocks = STREAMS * -(-(len(prompt) + tokens + 16) // 16)
    config = EngineConfig(
        max_model_len=len(prompt) + tokens + 1, kv_blocks=blocks, block_size=16, max_sequences=STREAMS
    )
    node = colocated(ModelSource(str(NANO), "nano", load_format=weights), config)
    found: dict[int, Answer[Asked]] = {}
    open_answers: dict[int, tuple[Asked, float, list[int]]] = {}
    waiting = list(enumerate(asked))[::-1]
    compiler = Compiler(NANO, VOCABULARY, eos_ids(NANO))
    compiler.compile(of_schema(True))  # reads the tokenizer
    while waiting or open_answers:
        while waiting and len(open_answers) < STREAMS:
            handle, one = waiting.pop()
            began = time.perf_counter()
            try:
                grammar = grammar_of(one)
                compiler.compile(grammar)
            except RequestError as error:
                found[handle] = Answer(one, time.perf_counter() - began, refused=str(error))
                continue
            open_answers[handle] = (one, time.perf_counter() - began, [])
            params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=handle, grammar=grammar)
            node.submit(GenerationRequest(handle=handle, prompt_ids=prompt, params=params))
        for event in node.step():
            one, seconds, ids = open_answers[event.handle]
            ids.extend(event.token_ids)
            if event.finish_reason is not None:
                del open_answers[event.handle]
                text = tokenizer.decode(ids, skip_special_tokens=True)
                found[event.handle] = Answer(one, seconds, event.finish_reason, text)
    return [found[handle] for handle in range(len(asked))]


def _row(found: list[Answer[Schema]], valid: Valid) -> dict[str, object]:
    taken = [answer for answer in found if not answer.refused]
    stopped = [answer for answer in taken if answer.ended == "stop"]
    compiled = sorted(1e3 * answer.seconds for answer in taken)
    return {
        "schemas": len(found),
        "refused": len(found) - len(taken),
        "stopped": len(stopped),
        "valid": sum(answer.follows(valid) for answer in stopped),
        "tokens": TOKENS,
        "compile_p50_ms": round(statistics.median(compiled), 2),
        "compile_p99_ms": round(compiled[int(0.99 * (len(compiled) - 1))], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a model of random weights for JSON of drawn schemas.")
    parser.add_argument("--schemas", type=int, default=500, help="how many (500)")
    parser.add_argument("--rich", type=int, default=200, help="of them with everything at once (200)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true", help=f"keep the rows in {OUT.relative_to(ROOT)}")
    options = parser.parse_args()
    import jsonschema_rs

    rows = []
    for kind, strategy, count in (
        ("plain", plain(), options.schemas - options.rich),
        ("rich", rich(), options.rich),
    ):
        found = answers(drawn(strategy, count, options.seed), of_schema)
        row = {"bench": "schemas", "kind": kind, **_row(found, jsonschema_rs.is_valid), **origin()}
        rows.append(row)
        print(json.dumps(row))
        for answer in found:
            if answer.refused or (answer.ended == "stop" and not answer.follows(jsonschema_rs.is_valid)):
                print(answer.refused or "NOT VALID", json.dumps(answer.asked), answer.text[:300])
    if options.save:
        OUT.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
