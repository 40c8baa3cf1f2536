"""Messages to prompt text with a checkpoint's own Jinja template, in a sandbox.

Gives templates the globals Hugging Face's `apply_chat_template` gives them. Knows no HTTP and no tokens.
"""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from afserve.errors import CheckpointError, RequestError, shown
from afserve.json_file import read_text
from afserve.tokens.tokenizer import read_json, special_tokens

Message = Mapping[str, object]
MOST_WORDS = 500  # of a template's own refusal


class ChatTemplate:
    """A compiled template and the special tokens it may name. `tool_source` is used when tools are given; `source` is
    all of it. `words` are its string constants, `roles` those of them that it compares with a message's role."""

    def __init__(self, source: str, special: Mapping[str, str], tool_source: str | None = None) -> None:
        self.source = source if tool_source is None else source + tool_source
        self._environment = _environment()
        self._special = dict(special)
        self._plain = self._compile(source)
        self._with_tools = self._plain if tool_source is None else self._compile(tool_source)
        trees = [self._environment.parse(each) for each in (source, tool_source or "")]
        self.words = frozenset(word for tree in trees for word in _words(tree))
        self.roles = frozenset(word for tree in trees for word in _compared_with_role(tree))

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ChatTemplate | None":
        """chat_template.jinja, else the chat_template field of tokenizer_config.json, else None."""
        file = Path(folder) / "chat_template.jinja"
        if file.is_file():
            return cls(read_text(file), special_tokens(folder))
        field = read_json(folder, "tokenizer_config.json").get("chat_template")
        where = f"{folder}/tokenizer_config.json: chat_template"
        named = _named(field, where) if isinstance(field, list) else {"default": _text(field, where)}
        plain = named.get("default")
        return None if plain is None else cls(plain, special_tokens(folder), named.get("tool_use"))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text. A template that refuses the messages is a RequestError with its own words.

        With `continue_final_message` it ends behind the words of the last message, as in transformers: a mark is put
        there, and the text is cut at it.
        """
        template = self._with_tools if tools else self._plain
        mark = f"CONTINUED_{secrets.token_hex(16).upper()} "
        if continue_final_message:
            messages = [*messages[:-1], _marked(messages[-1], mark, len(messages) - 1)]
        values = {
            **self._special,
            **(extra or {}),
            "messages": list(messages),
            "tools": tools,
            "documents": None,
        }
        values["add_generation_prompt"] = add_generation_prompt
        try:
            text = template.render(values)
        except RecursionError as error:
            raise RequestError.about(
                "messages", "the model's chat template goes too deep with them"
            ) from error
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            said = str(error)[:MOST_WORDS]
            raise RequestError.about(
                "messages", f"the model's chat template does not accept them: {said}"
            ) from error
        return _cut(text, mark, str(messages[-1]["content"])) if continue_final_message else text

    def _compile(self, source: str) -> Template:
        try:
            return self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise CheckpointError(f"chat template, line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise CheckpointError("chat template: it is nested too deeply") from error


def _named(entries: list[object], where: str) -> dict[str, str | None]:
    """Name to template; the form of models that have several."""
    named: dict[str, str | None] = {}
    for number, entry in enumerate(entries):
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or not isinstance(name, str) or "template" not in entry:
            raise CheckpointError(
                f"{where}[{number}]: {shown(entry)} is not an object with a name and a template"
            )
        named[name] = _text(entry["template"], f"{where}[{number}]: template")
    return named


def _text(value: object, where: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{where}: {shown(value)} is not the text of a template")
    return value


def _marked(message: Message, mark: str, index: int) -> Message:
    """Raises RequestError where there are no words to go on with."""
    content = message.get("content")
    if not isinstance(content, str):
        name = f"messages[{index}].content"
        raise RequestError.about(
            name,
            "continue_final_message goes on with the last message's text, and it has none; give it one, which may "
            "be empty",
        )
    return {**message, "content": content + mark}


def _cut(text: str, mark: str, marked: str) -> str:
    """Up to the mark. Where the template took the white space behind it, it takes what stands in front of it too."""
    solid, words = mark.rstrip(), marked.removesuffix(mark)
    at = text.find(solid)
    cut = text[:at] if text.startswith(mark, at) else text[:at].rstrip()
    if at < 0 or solid in text[at + 1 :] or not cut.rstrip().endswith(words.strip()):
        raise RequestError(
            "continue_final_message: the model's chat template leaves the last message out, changes it or repeats it, "
            "so there is no place where it could go on; ask without it",
            param="messages",
        )
    return cut


def _words(tree: nodes.Node) -> Iterator[str]:
    return (each.value for each in tree.find_all(nodes.Const) if isinstance(each.value, str))


def _compared_with_role(tree: nodes.Node) -> Iterator[str]:
    """Of `message.role == "x"`, `message["role"] in ["x", "y"]`, and of a variable that is called after it."""
    for compared in tree.find_all(nodes.Compare):
        names = [each.name for each in compared.find_all(nodes.Name)]
        attributes = [each.attr for each in compared.find_all(nodes.Getattr)]
        words = set(_words(compared))
        if "role" in words or "role" in attributes or any("role" in name for name in names):
            yield from words - {"role"}


def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model wrote; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads a plain class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes < > & for HTML, which is wrong in a prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
