"""Tool calls whose arguments are the text of tags, as Qwen3-Coder, MiniMax-M2, GLM-4.5 and Hy3 write them.

The text of an argument becomes JSON by its types in the tool's schema (`kinds`). Closing tags may be missing: an
argument then ends where the next one, the call's end or the next call stands as these families write them.
"""

import json
import re
from dataclasses import dataclass
from functools import cached_property

from afserve.server.reading.call_object import NAME, is_name
from afserve.server.reading.kinds import OTHERS, typed
from afserve.server.reading.parts import MOST_HEADER, Types

_KEY = r"[^<>\n]{1,256}"
_SPACE = r"\s{0,64}"
_FAR = 2 * MOST_HEADER  # characters that decide whether an argument ends


@dataclass(frozen=True)
class Dialect:
    """A call is `opens`, its name, `named`, its arguments, `closes`; an argument is `key`, its name, `keyed`, white
    space and `value` where that is not "", its text, `valued`. Where `named` is "" a name ends with white space or with
    the next tag. `section` and `ends` may stand around calls. `lined`: arguments stand on lines of their own."""

    opens_with: str
    named: str
    closes: str
    key: str
    keyed: str
    value: str
    valued: str
    section: str = ""
    ends: tuple[str, ...] = ()
    lined: bool = False

    @property
    def opens(self) -> tuple[str, ...]:
        return (self.opens_with,)

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opens_with, *filter(None, (self.section,)), *self.ends)

    @property
    def behind(self) -> tuple[str, ...]:
        """What ends a call without its own closing tag."""
        return (*self.ends, *filter(None, (self.section,)), self.opens_with)

    def open_call(self, types: Types) -> "TagCall":
        return TagCall(self, types)

    item = open_call  # no dialect has lists

    def begins_item(self, text: str) -> bool:
        return False

    @cached_property
    def ended(self) -> re.Pattern[str]:
        """An argument's end: its closing tag, or what stands behind one that is missing."""
        return self._ended(r"(?!)")

    @cached_property
    def ended_at_last(self) -> re.Pattern[str]:
        return self._ended(r"\Z")

    def _ended(self, last: str) -> re.Pattern[str]:
        closer = "|".join(map(re.escape, (self.closes, *self.ends)))
        follows = "|".join(map(re.escape, (self.closes, *self.behind)))
        section = rf"(?:{re.escape(self.section)}{_SPACE})?" if self.section else ""
        first = rf"{re.escape(self.named)}" if self.named else rf"{_SPACE}{re.escape(self.key)}"
        return re.compile(
            rf"(?P<valued>{re.escape(self.valued)})|(?:{closer})(?={_SPACE}(?:{follows}|{last}))"
            rf"|(?<=\n){section}{re.escape(self.opens_with)}(?P<name>{NAME}){first}"
            rf"|(?P<line>(?<=\n))?{re.escape(self.key)}(?P<key>{_KEY}){re.escape(self.keyed)}"
        )


QWEN = Dialect(
    *("<function=", ">", "</function>", "<parameter=", ">", "", "</parameter>"),
    section="<tool_call>",
    ends=("</tool_call>",),
    lined=True,
)
MINIMAX = Dialect(
    *('<invoke name="', '">', "</invoke>", '<parameter name="', '">', "", "</parameter>"),
    section="<minimax:tool_call>",
    ends=("</minimax:tool_call>",),
)
GLM = Dialect("<tool_call>", "", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
HY3 = Dialect(
    *("<tool_call:opensource>", "<tool_sep:opensource>", "</tool_call:opensource>"),
    *("<arg_key:opensource>", "</arg_key:opensource>", "<arg_value:opensource>", "</arg_value:opensource>"),
    section="<tool_calls:opensource>",
    ends=("</tool_calls:opensource>",),
)


class TagCall:
    """A call behind its opening tag. An argument goes out when it is whole."""

    listed = False
    broken = False

    def __init__(self, dialect: Dialect, types: Types) -> None:
        self._dialect = dialect
        self._types = types
        self._text = ""
        self._from = 0  # where an argument's end is looked for
        self._key: str | None = None  # of the argument whose text comes
        self._given: list[str] = []
        self._garbage = 0  # characters between arguments that are no tag
        self.name: str | None = None
        self.failed = False
        self.done = False

    def feed_call(self, text: str) -> tuple[str, str]:
        self._text += text
        return self._read(final=False)

    def finish_call(self, *, cut: bool) -> tuple[str, str]:
        said, rest = self._read(final=True, cut=cut)
        if self.failed or self.done:
            return said, rest
        self.done = True
        rest, self._text = ("" if self._is_part(self._text.lstrip()) else self._text), ""
        return said + ("" if cut else "}"), rest

    def _read(self, *, final: bool, cut: bool = False) -> tuple[str, str]:
        said: list[str] = []
        while not (self.failed or self.done):
            if self.name is None:
                went_on = self._in_name(said, final)
            elif self._key is not None:
                went_on = self._in_argument(said, self._key, final, cut)
            else:
                went_on = self._between(said, final)
            if not went_on:
                break
        rest = ""
        if self.done:
            rest, self._text = self._text, ""
        return "".join(said), rest

    # ---- the name

    def _in_name(self, said: list[str], final: bool) -> bool:
        """A name is one when an argument or the call's end follows."""
        to, text = self._dialect, self._text
        end = re.escape(to.named) if to.named else r"(?=[\s<]|\Z)" if final else r"(?=[\s<])"
        found = re.match(rf"\s*({NAME})\s*{end}", text[:MOST_HEADER])
        if found is None:
            parts = "|".join(re.escape(to.named[:size]) for size in range(1, len(to.named)))
            begun = rf"\s*(?:{NAME}\s*(?:{parts})?)?"
            self.failed = final or len(text) > MOST_HEADER or not re.fullmatch(begun, text)
            return False
        name, rest = found[1], text[found.end() :].lstrip()
        follows = (to.key, to.closes, *to.behind)
        if not is_name(name, self._types) or len(text) - len(rest) > MOST_HEADER:
            self.failed = True
        elif rest.startswith(follows) or (final and not rest and (to.named or name in self._types)):
            self.name, self._text = name, rest
            said.append("{")
            return True
        else:
            self.failed = final or not any(mark.startswith(rest) for mark in follows)
        return False

    # ---- between arguments

    def _between(self, said: list[str], final: bool) -> bool:
        to = self._dialect
        text = self._text[self._garbage :].lstrip()
        if text.startswith(to.closes):
            self._text = text[len(to.closes) :]
            return self._end(said)
        if text.startswith(to.behind):
            self._text = text if text.startswith(to.ends) or not self._garbage else self._text
            return self._end(said)
        found = re.match(rf"{re.escape(to.key)}({_KEY}){re.escape(to.keyed)}", text)
        if found is not None:
            begun = self._begun(text[found.end() :], final)
            if begun is None:
                return False
            self._key, self._text, self._from, self._garbage = found[1].strip(), begun, 0, 0
            return True
        return self._in_garbage(text, final)

    def _begun(self, text: str, final: bool) -> str | None:
        """The text of an argument, behind its tag; None where that is not there yet."""
        to, value = self._dialect, text.lstrip()
        if not to.value or value.startswith(to.value):
            return value[len(to.value) :] if to.value else text
        return None if not final and to.value.startswith(value) else text

    def _end(self, said: list[str]) -> bool:
        self.done = True
        said.append("}")
        return True

    def _is_part(self, text: str) -> bool:
        """Whether it may be the beginning of a tag."""
        to = self._dialect
        key = re.fullmatch(rf"{re.escape(to.key)}(?:{_KEY})?(?:{re.escape(to.keyed)[:-1]})?", text)
        return bool(key) or any(mark.startswith(text) for mark in (to.key, to.closes, *to.behind))

    def _in_garbage(self, text: str, final: bool) -> bool:
        """To the next tag of the call, if there is one."""
        to = self._dialect
        if self._is_part(text) and not final:
            return False
        marks = (to.key, to.closes, *to.behind)
        skipped = len(self._text) - len(text)
        found = [at for mark in marks if (at := text.find(mark, 1)) >= 0]
        if found:
            self._garbage = skipped + min(found)
        return bool(found)

    # ---- an argument

    def _in_argument(self, said: list[str], key: str, final: bool, cut: bool) -> bool:
        text = self._text
        found = self._argument_end(final and not cut)
        if found is None and (not final or cut):
            tag = text.find("<", max(self._from, len(text) - _FAR))
            self._from = len(text) if tag < 0 else tag
            if final:
                self._text = ""  # the argument is not whole
            return False
        at = self._last(found)
        if key not in self._given:
            said.append(", " if self._given else "")
            said.append(f"{json.dumps(key)}: {self._json(key, text[:at], bool(found and found['valued']))}")
            self._given.append(key)
        self._key, self._text = None, text[found.end() if found and found["valued"] else at :]
        return True

    def _argument_end(self, final: bool) -> re.Match[str] | None:
        to = self._dialect
        pattern = to.ended_at_last if final else to.ended
        for found in pattern.finditer(self._text, self._from):
            if found["name"] and not is_name(found["name"], self._types):
                continue
            if found["key"] is None or self._is_key(found):
                return found
        return None

    def _is_key(self, found: re.Match[str]) -> bool:
        key, known = found["key"].strip(), self._types.get(self.name or "", {})
        if known and OTHERS not in known:
            return key in known and key not in (*self._given, self._key)
        return found["line"] is not None

    def _last(self, found: re.Match[str] | None) -> int:
        """Where the argument ends: behind one that nothing closes, the call's own end counts however it stands."""
        if found is not None and not found["name"]:
            return found.start()
        to, end = self._dialect, found.start() if found else len(self._text)
        closers = (self._text.find("\n" * to.lined + mark, 0, end) for mark in (to.closes, *to.ends))
        return min((at for at in closers if at >= 0), default=end)

    def _json(self, key: str, text: str, closed: bool) -> str:
        if self._dialect.lined:
            text = text.removeprefix("\n")
        if self._dialect.lined or not closed:
            text = text.removesuffix("\n")
        types = self._types.get(self.name or "", {})
        return typed(text, types.get(key, types.get(OTHERS, "")))
