"""What an answer must look like, in OpenAI's words and vLLM's, as a grammar."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from afserve.errors import RequestError, shown
from afserve.grammars.grammar import MAX_CHOICES, Compiler, of_choice, of_lark, of_object, of_regex, of_schema
from afserve.server.bodies.fields import Fields

MAX_BLAMED = 64  # parts of a grammar that are compiled to find which one is at fault
KEPT = 256  # grammars that are known to be good


@dataclass(frozen=True, slots=True)
class WantedGrammar:
    """A grammar, and the field that asked for it. `parts`: those that it was made of, to tell which one is at fault."""

    param: str
    grammar: str
    parts: "tuple[WantedGrammar, ...]" = ()


def asks_format(fields: Fields) -> bool:
    """Whether a body may ask for one, without reading it."""
    kinds = (f"guided_{kind}" for kind in _KINDS)
    return any(fields.get(key) is not None for key in ("response_format", "structured_outputs", *kinds))


class Formats:
    """Which grammars can be followed: each is compiled once before a request with it is sent on."""

    def __init__(self, compiler: Compiler | None) -> None:
        self._compiler = compiler
        self._known: dict[str, None] = {}  # the oldest first

    def checked(self, wanted: WantedGrammar | None) -> str:
        """Its grammar, "" for none. Raises RequestError that names the field."""
        if wanted is None:
            return ""
        assert self._compiler is not None, "a grammar is checked where one can be compiled"
        if wanted.grammar not in self._known:
            self._check(self._compiler, wanted)
            self._known[wanted.grammar] = None
        while len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        return wanted.grammar

    @staticmethod
    def _check(compiler: Compiler, wanted: WantedGrammar) -> None:
        try:
            compiler.check(wanted.grammar, wanted.param)
        except RequestError:
            for part in wanted.parts[:MAX_BLAMED]:
                compiler.check(part.grammar, part.param)
            raise


def wanted_format(fields: Fields) -> WantedGrammar | None:
    """Raises RequestError where there are two, or one that is none."""
    found = [wanted for read in (_response_format, _guided, _structured) for wanted in read(fields)]
    if len(found) > 1:
        raise RequestError.about(
            found[1].param,
            f"an answer follows one format, {found[0].param} is another; leave one of both out",
        )
    return found[0] if found else None


def _response_format(fields: Fields) -> list[WantedGrammar]:
    form = fields.section("response_format")
    kind = None if form is None else form.text("type")
    if form is None or kind in (None, "text"):
        return []
    if kind == "json_object":
        return [WantedGrammar("response_format", of_object())]
    if kind != "json_schema":
        raise RequestError.about(
            "response_format", f"{shown(kind)} is none of text, json_object, json_schema"
        )
    named = form.section("json_schema")
    if named is None:
        form.refuse_field("json_schema", "an object with a name and a schema")
    return [schema_in(named, "schema")]


def schema_in(fields: Fields, key: str) -> WantedGrammar:
    """The JSON schema under `key`, which may be its text."""
    name, value = fields.path_of(key), fields.get(key)
    if isinstance(value, str):
        value = Fields.parsed(value, name)
    if not isinstance(value, dict | bool):
        fields.refuse_field(key, "a JSON schema, an object")
    return WantedGrammar(name, of_schema(value, name))


def _choice(fields: Fields, key: str) -> WantedGrammar:
    choices = fields.texts(key, MAX_CHOICES)
    if not choices or not isinstance(fields.get(key), list):
        fields.refuse_field(key, "an array of at least one string")
    return WantedGrammar(fields.path_of(key), of_choice(choices, fields.path_of(key)))


def _written(grammar_of: Callable[[str, str], str]) -> Callable[[Fields, str], WantedGrammar]:
    def read(fields: Fields, key: str) -> WantedGrammar:
        name = fields.path_of(key)
        return WantedGrammar(name, grammar_of(fields.text(key) or "", name))

    return read


_KINDS: Mapping[str, Callable[[Fields, str], WantedGrammar]] = {
    "json": schema_in,
    "regex": _written(of_regex),
    "choice": _choice,
    "grammar": _written(of_lark),
}


def _guided(fields: Fields) -> list[WantedGrammar]:
    named = [(f"guided_{kind}", read) for kind, read in _KINDS.items()]
    return [read(fields, name) for name, read in named if fields.get(name) is not None]


def _structured(fields: Fields) -> list[WantedGrammar]:
    section = fields.section("structured_outputs")
    if section is None:
        return []
    found = [read(section, kind) for kind, read in _KINDS.items() if section.get(kind) is not None]
    if section.flag("json_object"):
        found.append(WantedGrammar(section.path_of("json_object"), of_object()))
    odd = [
        key for key in section.raw() if key not in (*_KINDS, "json_object") and section.get(key) is not None
    ]
    if odd:
        raise section.refusal(odd[0], "is not supported; json, json_object, regex, choice and grammar are")
    return found
