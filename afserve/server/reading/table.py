"""Which form a model's own template shows for calls and reasoning, and the reader of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from afserve.server.reading.call_object import ArgumentsWriter
from afserve.server.reading.calls import CallReader
from afserve.server.reading.channels import CHANNEL, ChannelReader
from afserve.server.reading.json_calls import (
    COHERE,
    DEEPSEEK,
    GEMMA,
    GRANITE,
    HERMES,
    HUNYUAN,
    KIMI,
    LIST,
    MISTRAL,
    JsonForm,
)
from afserve.server.reading.parts import Argued, Called, Part, Reader, say
from afserve.server.reading.python_calls import LFM2, PythonForm
from afserve.server.reading.reasoning import ANSWERS, THINK, THOUGHTS, AnswerReader, ReasoningReader, Tags
from afserve.server.reading.xml_calls import GLM, HY3, MINIMAX, QWEN, Dialect

CHANNELS = "channels"
FORMS: Mapping[str, JsonForm | PythonForm] = {
    "deepseek": DEEPSEEK,
    "kimi": KIMI,
    "mistral": MISTRAL,
    "granite": GRANITE,
    "cohere": COHERE,
    "gemma": GEMMA,
    "lfm2": LFM2,
    "hunyuan": HUNYUAN,
    "hermes": HERMES,
    "list": LIST,
}
DIALECTS: Mapping[str, Dialect] = {"qwen-xml": QWEN, "minimax": MINIMAX, "glm": GLM, "hy3": HY3}


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers of one request are read. `calls` "" finds none; `thinks` "" finds no reasoning, "inside" begins
    in it, "tags" looks for its tag first, "channels" has a channel for it. `name`: the one function that is called,
    whose arguments are the answer. `types` has the functions that are offered. `ids`: the shape of calls' ids."""

    calls: str = ""
    thinks: str = ""
    name: str = ""
    most_calls: int = 0  # 0: any number
    tell_reasoning: bool = True
    types: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    tags: Tags = THINK  # around reasoning
    wrapped: Tags | None = None  # around the answer
    ids: str = ""
    earlier_calls: int = 0  # of the conversation

    def reader(self) -> Reader:
        reader = AnswerReader(self._calls(), self.wrapped) if self.wrapped else self._calls()
        if self.thinks == CHANNELS:
            return ChannelReader(reader, calls=self.calls == CHANNELS)
        if not self.thinks:
            return reader
        ending = self._calls() if self._ends_reasoning else None
        return ReasoningReader(reader, self.tags, inside=self.thinks == "inside", calls=ending)

    @property
    def _ends_reasoning(self) -> bool:
        """Whether a call in open reasoning is one: marks of plain text may be thought of, special tokens may not."""
        form = FORMS.get(self.calls)
        return not self.name and form is not None and form.special

    def _calls(self) -> Reader:
        if self.name:
            return NamedReader(self.name)
        form = DIALECTS.get(self.calls) or FORMS.get(self.calls)
        return Reader() if form is None else CallReader(form, self.types)


class NamedReader(Reader):
    """All text is the arguments of one call."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._begun = False
        self._arguments = ArgumentsWriter()

    def _advance(self, parts: list[Part], *, final: bool) -> bool:
        if not (text := self._rest()):
            return False
        if not self._begun:
            parts.append(Called(0, self._name))
        self._begun = True
        said, rest = ("", text) if self._arguments.done else self._arguments.write_text(text)
        if said:
            parts.append(Argued(0, said))
        say(parts, rest if rest.strip() else "")
        return False

    def _end(self, cut: bool) -> list[Part]:
        if not self._begun or self._arguments.done or cut:
            return []
        return [Argued(0, self._arguments.close_text())]


def calls_of(template: str, is_token: Callable[[str], bool] = lambda mark: False) -> str:
    """The form that this template renders calls in. Where it shows none: the form whose mark is one of the model's
    tokens, or Hermes'."""
    if CHANNEL in template:
        return CHANNELS
    for name, dialect in DIALECTS.items():
        if dialect.key in template:
            return name
    for name, form in FORMS.items():
        if name != "list" and any(marker in template for marker in form.opens):
            return name
    special = (name for name, form in FORMS.items() if form.special and any(map(is_token, form.opens)))
    return next(special, "hermes")


def marked(calls: str) -> bool:
    """Whether special tokens may be what marks calls of this form."""
    return calls not in ("", "list")


def thinks(template: str) -> bool:
    return thought_tags(template) is not None or CHANNEL in template


def thought_tags(template: str) -> Tags | None:
    return next((tags for tags in THOUGHTS if tags.closes in template), None)


def answer_tags(template: str) -> Tags | None:
    """What answers stand in behind the reasoning."""
    return next((tags for tags in ANSWERS if tags.opens in template and thinks(template)), None)
