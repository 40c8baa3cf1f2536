"""The reasoning in front of an answer, told from the answer by its tags."""

from afserve.server.reading.parts import Part, Reader, Thought, held

OPEN, CLOSE = "<think>", "</think>"
ANSWER, ANSWERED = "<answer>", "</answer>"


class ReasoningReader:
    """`inside`: the prompt has opened the tag already. What follows the reasoning goes to `after`."""

    def __init__(self, after: Reader, *, inside: bool) -> None:
        self._after = after
        self._text = ""
        self._before = not inside
        self.thinking = inside
        self._answered = not inside
        self._thought = False

    def feed(self, text: str) -> list[Part]:
        if self._before:
            self._text += text
            return self._begin()
        return self._inside(text) if self.thinking else self._answer(text)

    def finish(self) -> list[Part]:
        rest, self._text = self._text, ""
        if self.thinking:
            return [Thought(rest)] if rest else []
        parts = self._after.feed(rest) if rest else []
        return parts + self._after.finish()

    def _begin(self) -> list[Part]:
        text = self._text.lstrip()
        if not text or (OPEN.startswith(text) and text != OPEN):
            return []
        self._before = False
        whole, self._text = self._text, ""
        if not text.startswith(OPEN):
            return self._after.feed(whole)
        self.thinking, self._answered = True, False
        return self._inside(text[len(OPEN) :])

    def _inside(self, text: str) -> list[Part]:
        text = self._text + text
        if not self._thought:
            text = text.lstrip("\n")
            self._thought = bool(text)
        thought, found, answer = text.partition(CLOSE)
        if found:
            self._text, self.thinking = "", False
            return [*([Thought(thought)] if thought else []), *self._answer(answer)]
        keep = held(text, (CLOSE,))
        self._text = text[len(text) - keep :]
        thought = text[: len(text) - keep]
        return [Thought(thought)] if thought else []

    def _answer(self, text: str) -> list[Part]:
        """Without the empty lines in front of it."""
        if not self._answered:
            text = text.lstrip("\n")
            self._answered = bool(text)
        return self._after.feed(text) if text else []


class AnswerReader:
    """An answer in `<answer>` tags, as Hunyuan-A13B writes it after its reasoning, goes to `after` without them."""

    def __init__(self, after: Reader) -> None:
        self._after = after
        self._text = ""
        self._begun = False

    def feed(self, text: str) -> list[Part]:
        self._text += text
        if not self._begun and not self._begin():
            return []
        at = self._end()
        text, self._text = self._text[:at], self._text[at:]
        return self._after.feed(text) if text else []

    def finish(self) -> list[Part]:
        rest, self._text = self._text, ""
        if rest.strip() == ANSWERED or (not self._begun and rest.strip() == ANSWER):
            rest = ""
        return (self._after.feed(rest) if rest else []) + self._after.finish()

    def _begin(self) -> bool:
        """Whether it is clear how the answer begins; its opening tag is dropped, and the ends of lines behind it."""
        found = self._text.lstrip()
        if len(found) < len(ANSWER) and ANSWER.startswith(found):
            return False
        if found.startswith(ANSWER):
            words = found[len(ANSWER) :].lstrip("\n")
            if not words:
                return False
            self._text = words
        self._begun = True
        return True

    def _end(self) -> int:
        """Where the closing tag may begin, with the line's end before it."""
        at = self._text.rfind("<")
        tag = self._text[at:] if at >= 0 else ""
        if at < 0 or not (ANSWERED.startswith(tag) or tag.rstrip() == ANSWERED):
            at = len(self._text)
        return len(self._text[:at].rstrip("\n"))
