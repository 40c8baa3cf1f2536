"""The reasoning in front of an answer, told from the answer by its tags."""

from dataclasses import dataclass

from afserve.server.reading.parts import Called, Content, Part, Reader, Thought, held


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands in front of words, and behind them."""

    opens: str
    closes: str


THINK = Tags("<think>", "</think>")
THOUGHTS = (
    THINK,
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    Tags("<|channel>thought", "<channel|>"),
    Tags("<think:opensource>", "</think:opensource>"),
)
"""Around reasoning: of most models, of Cohere's, of Gemma 4, of Hy3."""
ANSWERS = (Tags("<answer>", "</answer>"), Tags("<|START_TEXT|>", "<|END_TEXT|>"))
"""Around the answer behind it: of Hunyuan-A13B, of Cohere's."""


class ReasoningReader(Reader):
    """`inside`: the prompt has opened the tag already. What follows the reasoning goes to `after`.

    `calls` reads the reasoning where a call ends it: from its first call on it is what goes on reading.
    """

    def __init__(self, after: Reader, tags: Tags, *, inside: bool, calls: Reader | None = None) -> None:
        super().__init__()
        self._after = after
        self._tags = tags
        self._calls = calls
        self._before = not inside
        self.thinking = inside
        self._answered = not inside
        self._thought = False

    def _read(self) -> list[Part]:
        if self._before:
            return self._begin()
        return self._inside() if self.thinking else self._answer(self._rest())

    def _end(self, cut: bool) -> list[Part]:
        rest = self._rest()
        if not self.thinking:
            return (self._after.read_text(rest) if rest else []) + self._after.end_text(cut=cut)
        parts = self._think(rest if self._thought else self._without_tag(rest))
        if not self.thinking:
            return parts + self._after.end_text(cut=cut)
        return parts + self._end_thought(cut=cut)

    def _begin(self) -> list[Part]:
        text = self._text.lstrip()
        if not text or (self._tags.opens.startswith(text) and text != self._tags.opens):
            return []
        self._before = False
        if not text.startswith(self._tags.opens):
            return self._after.read_text(self._rest())
        self.thinking, self._answered, self._text = True, False, text[len(self._tags.opens) :]
        return self._inside()

    def _inside(self) -> list[Part]:
        if not self._thought and not self._begin_thought():
            return []
        thought, found, answer = self._text.partition(self._tags.closes)
        keep = 0 if found else held(thought, (self._tags.closes,))
        self._text = thought[len(thought) - keep :]
        parts = self._think(thought[: len(thought) - keep])
        if not self.thinking:
            return parts + self._after.read_text(self._rest() + found + answer)
        if found:
            self._text = ""
            parts += self._end_thought(cut=False)
            self.thinking = False
            parts += self._answer(answer)
        return parts

    def _begin_thought(self) -> bool:
        """Without the tag that some models repeat, and the empty lines behind it."""
        text = self._text.lstrip()
        begun = self._without_tag(self._text)
        if not begun or (self._tags.opens.startswith(text) and text != self._tags.opens):
            return False
        self._text, self._thought = begun, True
        return True

    def _think(self, text: str) -> list[Part]:
        if not text or self._calls is None:
            return [Thought(text)] if text else []
        return self._thoughts(self._calls.read_text(text))

    def _end_thought(self, *, cut: bool) -> list[Part]:
        return self._thoughts(self._calls.end_text(cut=cut)) if self._calls is not None else []

    def _thoughts(self, parts: list[Part]) -> list[Part]:
        """Up to the first call; it ends the reasoning."""
        told: list[Part] = []
        for part in parts:
            if self._calls is not None and isinstance(part, Called):
                self._after, self._calls, self.thinking, self._answered = self._calls, None, False, True
            told.append(Thought(part.text) if self.thinking and isinstance(part, Content) else part)
        return told

    def _answer(self, text: str) -> list[Part]:
        """Without the empty lines in front of it."""
        if not self._answered:
            text = text.lstrip("\n")
            self._answered = bool(text)
        return self._after.read_text(text) if text else []

    def _without_tag(self, thought: str) -> str:
        text = thought.lstrip()
        begun = text.removeprefix(self._tags.opens) if text.startswith(self._tags.opens) else thought
        return begun.lstrip("\n")


class AnswerReader(Reader):
    """An answer in `tags`, as some models write it after their reasoning, goes to `after` without them."""

    def __init__(self, after: Reader, tags: Tags) -> None:
        super().__init__()
        self._after = after
        self._tags = tags
        self._begun = False
        self._tagged = False

    def _read(self) -> list[Part]:
        if not self._begun and not self._begin():
            return []
        at = self._tag() if self._tagged else len(self._text)
        text, self._text = self._text[:at], self._text[at:]
        return self._after.read_text(text) if text else []

    def _end(self, cut: bool) -> list[Part]:
        rest = self._rest()
        if (self._tagged and rest.strip() == self._tags.closes) or (
            not self._begun and rest.strip() == self._tags.opens
        ):
            rest = ""
        return (self._after.read_text(rest) if rest else []) + self._after.end_text(cut=cut)

    def _begin(self) -> bool:
        """Whether it is clear how the answer begins; its opening tag is dropped, and the ends of lines behind it."""
        found = self._text.lstrip()
        if len(found) < len(self._tags.opens) and self._tags.opens.startswith(found):
            return False
        if found.startswith(self._tags.opens):
            words = found[len(self._tags.opens) :].lstrip("\n")
            if not words:
                return False
            self._text, self._tagged = words, True
        self._begun = True
        return True

    def _tag(self) -> int:
        """Where the closing tag may begin, with the line's end before it."""
        at = self._text.rfind("<")
        tag = self._text[at:] if at >= 0 else ""
        if at < 0 or not (self._tags.closes.startswith(tag) or tag.rstrip() == self._tags.closes):
            at = len(self._text)
        return len(self._text[:at].rstrip("\n"))
