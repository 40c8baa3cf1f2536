"""The reasoning in front of an answer, told from the answer by its tags."""

from afserve.server.reading.parts import Part, Reader, Thought, held

OPEN, CLOSE = "<think>", "</think>"


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
