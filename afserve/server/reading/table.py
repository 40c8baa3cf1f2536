"""Which form a model's own template shows for calls and reasoning, and the reader of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from afserve.server.reading.calls import DEEPSEEK, HERMES, KIMI, LIST, MISTRAL, CallReader, Form
from afserve.server.reading.parts import Argued, Called, Part, Reader, Said
from afserve.server.reading.reasoning import CLOSE, ReasoningReader
from afserve.server.reading.xml_calls import XmlCallReader

XML = "xml"
FORMS: Mapping[str, Form] = {
    "deepseek": DEEPSEEK,
    "kimi": KIMI,
    "mistral": MISTRAL,
    "hermes": HERMES,
    "list": LIST,
}


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers of one request are read. `calls` "" finds none; `thinks` "" finds no reasoning, "inside" begins
    in it, "tags" looks for its tag first. `name`: the one function that is called, whose arguments are the answer."""

    calls: str = ""
    thinks: str = ""
    name: str = ""
    most_calls: int = 0  # 0: any number
    tell_reasoning: bool = True
    types: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def reader(self) -> Reader:
        reader = self._calls()
        return ReasoningReader(reader, inside=self.thinks == "inside") if self.thinks else reader

    def _calls(self) -> Reader:
        if self.name:
            return NamedReader(self.name)
        if self.calls == XML:
            return XmlCallReader(self.types)
        return CallReader(FORMS[self.calls]) if self.calls else WordReader()


class WordReader:
    def feed(self, text: str) -> list[Part]:
        return [Said(text)] if text else []

    def finish(self) -> list[Part]:
        return []


class NamedReader:
    """All text is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def feed(self, text: str) -> list[Part]:
        if not text:
            return []
        begin: list[Part] = [] if self._begun else [Called(0, self._name)]
        self._begun = True
        return [*begin, Argued(0, text)]

    def finish(self) -> list[Part]:
        return []


def calls_of(template: str) -> str:
    """The form that this template renders calls in; Hermes' where it shows none."""
    if "<function=" in template:
        return XML
    for name, form in FORMS.items():
        if name != "list" and any(marker in template for marker in form.opens):
            return name
    return "hermes"


def thinks(template: str) -> bool:
    return CLOSE in template
