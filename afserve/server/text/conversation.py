"""A chat request as the prompt of one model, and how its answer is to be read.

What a template can do is seen in its source: whether it names tools, which form of calls it renders, whether it has
reasoning. Of tokens it knows the marks around calls and reasoning.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from afserve.errors import RequestError, shown
from afserve.grammars.grammar import of_thought
from afserve.server.bodies.declared import ChatBody
from afserve.server.bodies.openai import BUDGET, ChatRequest
from afserve.server.bodies.structured import WantedGrammar
from afserve.server.bodies.tools import TOLD_BY_RESULT, told_in_words
from afserve.server.reading.call_ids import as_templates_want, next_number
from afserve.server.reading.channels import THOUGHT_MARKS
from afserve.server.reading.json_calls import HERMES
from afserve.server.reading.reasoning import THINK
from afserve.server.reading.table import (
    CHANNELS,
    Reading,
    answer_tags,
    calls_of,
    marked,
    thinks,
    thought_tags,
)
from afserve.tokens.chat_template import ChatTemplate
from afserve.tokens.tokenizer import Tokenizer

Message = Mapping[str, object]
ROLES = ("system", "developer", "user", "assistant", "tool")
# What templates call the switches that an effort turns.
_SWITCHES = ("enable_thinking", "thinking")


class Conversation:
    """Of one model's chat template."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._source = template.source
        self._calls = calls_of(self._source, lambda mark: tokenizer.token_id(mark) is not None)
        self._thinks = thinks(self._source)
        self._tags = thought_tags(self._source) or THINK
        self._knows_tools = "tools" in self._source
        self._roles = Roles(template)

    def render(self, asked: ChatRequest) -> str:
        shown = asked.tools.shown if asked.tools.are_used else ()
        tools = tuple(tool for tool in shown if not tool.get(TOLD_BY_RESULT))
        messages = as_templates_want(self._calls, self._roles.shown(asked.messages))
        if not self._knows_tools:
            messages, tools = told_in_words(messages, tools), ()
        return self._template.render(
            messages,
            tools=tools or None,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
            extra={**self._effort(asked), **asked.template_values},
        )

    def reading(self, asked: ChatRequest, prompt: str) -> Reading | None:
        """None where the answer is plain text."""
        reading = Reading(tell_reasoning=ChatBody(asked.sampling).include_reasoning)
        if self._thinks:
            tags = "inside" if self._begins_inside(asked, prompt) else "tags"
            how = CHANNELS if self._calls == CHANNELS else tags
            reading = replace(reading, thinks=how, tags=self._tags, wrapped=answer_tags(self._source))
        if asked.tools.named:
            reading = replace(reading, name=asked.tools.named)
        elif asked.tools.are_used:
            calls = "list" if asked.tools.choice == "required" else self._calls
            most = 1 if asked.tools.parallel is False else 0
            reading = replace(reading, calls=calls, most_calls=most, types=asked.tools.types())
        if asked.tools.are_used:
            reading = replace(reading, ids=self._calls, earlier_calls=next_number(asked.messages))
        return reading if reading.thinks or reading.calls or reading.name else None

    def shows_special(self, reading: Reading | None) -> bool:
        """Whether special tokens must stay in the text, because they mark what is read from it."""
        return reading is not None and (bool(reading.thinks) or marked(reading.calls))

    def format(self, asked: ChatRequest, prompt: str) -> WantedGrammar | None:
        """What the answer must follow, from its first token on."""
        found = asked.tools.wanted_grammar() or asked.wanted
        strict = asked.tools.strict if found is None and asked.tools.are_used else ""
        if strict:
            found = self._strict(asked)
        if found is not None and self._begins_inside(asked, prompt):
            raise RequestError.about(
                found.param,
                "this model reasons before it answers, so its words cannot be held to a format; switch that off "
                "with reasoning_effort none or chat_template_kwargs",
            )
        if asked.thoughts is None:
            return found
        if strict:
            asked.sampling.pass_over(BUDGET, "it cannot be held beside strict tools; leave one of both out")
            return found
        marks = self._thought_marks()
        if marks is None:
            asked.sampling.pass_over(BUDGET, "this model has no tokens that mark its reasoning; leave it out")
            return found
        # An answer that follows a format from its first token on has no reasoning.
        return found or WantedGrammar(
            BUDGET, of_thought(asked.thoughts, *marks, inside=self._begins_inside(asked, prompt))
        )

    @property
    def template_source(self) -> str:
        return self._source

    def _thought_marks(self) -> tuple[Sequence[int], int] | None:
        """The tokens in front of reasoning, and the one behind it; None where this model has none."""
        opens, closes = THOUGHT_MARKS if self._calls == CHANNELS else ((self._tags.opens,), self._tags.closes)
        ids = [id for mark in (*opens, closes) if (id := self._tokenizer.token_id(mark)) is not None]
        if not self._thinks or len(ids) <= len(opens):
            return None
        return ids[:-1], ids[-1]

    def _strict(self, asked: ChatRequest) -> WantedGrammar:
        if self._calls != "hermes":
            raise RequestError.about(
                "tools",
                f"{asked.tools.strict!r} is strict, which cannot be held in this model's form of calls; use "
                "tool_choice required, or leave strict out",
            )
        return asked.tools.wanted_tags(special=self._tokenizer.is_special(HERMES.opens[0]))

    def _begins_inside(self, asked: ChatRequest, prompt: str) -> bool:
        """Whether the prompt has opened the reasoning already, or the words that are gone on with are within it."""
        opens, closes = self._tags.opens, self._tags.closes
        if asked.continue_final_message:
            words = str(asked.messages[-1]["content"])
            if opens in words or closes in words:
                return self._thinks and words.rfind(opens) > words.rfind(closes)
        return self._thinks and prompt.rstrip().endswith(opens)

    def _effort(self, asked: ChatRequest) -> Mapping[str, object]:
        """Turning off what the model does not have needs no switch."""
        effort = asked.effort
        if effort is None or (
            effort == "none" and not self._thinks and "reasoning_effort" not in self._source
        ):
            return {}
        values: dict[str, object] = {name: effort != "none" for name in _SWITCHES if name in self._source}
        if "reasoning_effort" in self._source:
            values["reasoning_effort"] = effort
        if not values:
            asked.sampling.pass_over(
                "reasoning_effort", "this model's template has no such switch; leave it out"
            )
        return values


class Roles:
    """Of one template. What it does not know it would leave out, or write as a word that its model never saw."""

    def __init__(self, template: ChatTemplate) -> None:
        self._own = template.roles
        self._knows_developer = "developer" in template.words

    def shown(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """With `developer` as `system` where the template does not name it. Raises RequestError for an unknown role."""
        return tuple(self._shown(message, f"messages[{i}].role") for i, message in enumerate(messages))

    def _shown(self, message: Message, name: str) -> Message:
        role = message["role"]
        if role not in ROLES and role not in self._own:
            raise RequestError.about(name, f"{shown(role)} is none of {', '.join(ROLES)}")
        if role == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return message


def conversation_of(template: ChatTemplate | None, tokenizer: Tokenizer) -> Conversation | None:
    return None if template is None else Conversation(template, tokenizer)
