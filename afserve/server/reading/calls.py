"""Words and tool calls told from each other, whatever form a model family writes its calls in.

What begins like a call and is none stays text, to the last character. White space alone in front of, between and behind
calls is dropped; so are a form's own marks, between the calls they belong to and nowhere else.
"""

from afserve.server.reading.json_calls import JsonCall, JsonForm
from afserve.server.reading.parts import MOST_HEADER, Argued, Called, Part, Reader, Types, held, say
from afserve.server.reading.python_calls import PythonCall, PythonForm
from afserve.server.reading.xml_calls import Dialect, TagCall

# A call begins with one of `opens`; `section` may stand before it, `ends` in order behind it.
Form = JsonForm | Dialect | PythonForm
Call = JsonCall | TagCall | PythonCall  # behind the mark that opens it


class CallReader(Reader):
    """`types` has the functions that are offered; empty: any name may be one."""

    def __init__(self, form: Form, types: Types) -> None:
        super().__init__()
        self._form = form
        self._types = types
        self._starts = tuple(filter(None, (*form.opens, form.section)))
        self._raw = ""  # of what may become a call, from its mark on
        self._lead = ""  # white space in front of it
        self._in_section = False  # its mark was read, that of a call is not
        self._call: Call | None = None
        self._calls = 0
        self._argued = False  # the open call has told something of its arguments
        self._quiet = True  # no words yet, or none since the last call
        self._ends: tuple[str, ...] = ()  # what may still stand behind the last call
        self._listed = False
        self._spoilt = False  # the last call was broken: what follows it up to its end is dropped

    def _end(self, cut: bool) -> list[Part]:
        parts: list[Part] = []
        while self._text or self._call is not None or self._in_section:
            if not self._advance(parts, final=True):
                self._end_call(parts, cut)
        return parts

    def _advance(self, parts: list[Part], *, final: bool) -> bool:
        if self._call is not None:
            return bool(self._text) and self._in_call(self._call, parts)
        if self._in_section:
            return self._behind_section(parts, final=final)
        if self._spoilt:
            return self._behind_broken(final=final)
        if self._behind_call():
            return True
        return (final or not self._waits()) and self._in_words(parts, final=final)

    # ---- words

    def _in_words(self, parts: list[Part], *, final: bool) -> bool:
        text = self._text
        found = [(at, -len(mark), mark) for mark in self._starts if (at := text.find(mark)) >= 0]
        keep = 0 if final else held(text, self._starts)
        at, _, mark = min(found) if found else (len(text) - keep, 0, "")
        if self._quiet and not text[:at].strip():
            if not mark and not final:
                return False
            self._lead = text[:at]
        else:
            self._say(parts, text[:at])
        self._text = text[at + len(mark) :]
        if not mark:
            return self._end_words(parts) if final else False
        self._begin(mark)
        return True

    def _end_words(self, parts: list[Part]) -> bool:
        """White space behind a call is none of the words."""
        say(parts, "" if self._calls else self._lead)
        self._lead = ""
        return True

    def _say(self, parts: list[Part], text: str) -> None:
        if text:
            self._quiet, self._ends, self._listed = False, (), False
            say(parts, text)

    # ---- from a mark to a call

    def _begin(self, mark: str) -> None:
        self._raw = mark
        self._in_section = mark == self._form.section
        if not self._in_section:
            self._call = self._form.open_call(self._types)

    def _behind_section(self, parts: list[Part], *, final: bool) -> bool:
        text = self._text.lstrip()
        mark = next((mark for mark in self._form.opens if text.startswith(mark)), None)
        space = self._text[: len(self._text) - len(text)]
        if mark is not None and len(space) <= MOST_HEADER:
            self._text = text[len(mark) :]
            raw = self._raw + space + mark
            self._begin(mark)
            self._raw = raw
            return True
        if (
            not final
            and len(space) <= MOST_HEADER
            and any(mark.startswith(text) for mark in self._form.opens)
        ):
            return False
        self._fail(parts, "")
        return True

    def _fail(self, parts: list[Part], rest: str) -> None:
        """What looked like a call is text; one may still begin behind its first character."""
        raw, self._raw = self._raw, ""
        self._call, self._in_section = None, False
        self._text = raw[1:] + rest + self._text
        lead, self._lead = self._lead, ""
        self._say(parts, lead + raw[:1])

    # ---- calls

    def _in_call(self, call: Call, parts: list[Part]) -> bool:
        text, self._text = self._text, ""
        known = call.name is not None
        if not known:
            self._raw += text
        arguments, rest = call.feed_call(text)
        if call.failed:
            self._fail(parts, "")
            return True
        self._tell(call, known, arguments, parts)
        if call.done:
            self._close(call, rest)
        return call.done

    def _end_call(self, parts: list[Part], cut: bool) -> None:
        """Of the text, in the middle of a call."""
        call = self._call
        assert call is not None, "words, marks and white space end by themselves"
        known = call.name is not None
        arguments, rest = call.finish_call(cut=cut)
        if call.failed:
            self._fail(parts, "")
            return
        self._tell(call, known, arguments or "{" * (cut and not self._argued), parts)
        self._close(call, rest)

    def _tell(self, call: Call, known: bool, arguments: str, parts: list[Part]) -> None:
        if call.name is not None and not known:
            self._lead = self._raw = ""
            self._argued = False
            parts.append(Called(self._calls, call.name))
        if arguments and call.name is not None:
            self._argued = True
            parts.append(Argued(self._calls, arguments))

    def _close(self, call: Call, rest: str) -> None:
        self._calls += 1
        self._call, self._text, self._quiet = None, rest, True
        self._listed, self._spoilt = call.listed, call.broken
        self._ends = ("]",) * call.listed + self._form.ends

    def _behind_call(self) -> bool:
        """A mark that ends the call or its section, or the next call of a list."""
        text = self._text.lstrip()
        for number, mark in enumerate(self._ends):
            if text.startswith(mark) or (len(mark) > 1 and _behind_brackets(text).startswith(mark)):
                text = text if text.startswith(mark) else _behind_brackets(text)
                self._text, self._ends = text[len(mark) :], self._ends[number + 1 :]
                self._listed &= mark != "]"
                return True
        more = text[1:].lstrip()
        if self._listed and text.startswith(",") and self._form.begins_item(more):
            self._raw, self._lead = self._text[: len(self._text) - len(more)], ""
            self._text, self._call = more, self._form.item(self._types)
            return True
        return False

    def _waits(self) -> bool:
        """Whether more text may make a mark of what follows the call."""
        text = self._text.lstrip()
        ends = tuple(mark for mark in self._ends if mark.startswith(text))
        long = tuple(mark for mark in self._ends if len(mark) > 1 and mark.startswith(_behind_brackets(text)))
        return bool(ends or long) or (self._listed and text.startswith(",") and not text[1:].strip())

    def _behind_broken(self, *, final: bool) -> bool:
        """What is left of a call that broke is dropped up to its end, or to the next one; without either it is text."""
        marks = (*(mark for mark in self._ends if mark != "]"), *self._starts)
        found = [at for mark in marks if (at := self._text.find(mark)) >= 0]
        if not found and not final:
            return False
        self._spoilt = False
        self._text = self._text[min(found, default=0) :]
        return True


def _behind_brackets(text: str) -> str:
    """Some models close a call with a bracket too many."""
    return text.lstrip("}] \t\r\n")
