"""Lines of `afserve status`: whole in a pipe, between words on a terminal."""

import io
import re

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from afserve.cli.status import placement_lines, say


def printed(line, width, *, terminal):
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    say(console, line, "dim")
    return out.getvalue()


BALANCE = {"balance": [1.0, 1.004, 1.2], "decisions": []}


@given(st.lists(st.floats(1, 9), min_size=1, max_size=100), st.integers(40, 200))
def test_a_line_is_broken_between_words_on_a_terminal_and_nowhere_in_a_pipe(balance, width):
    (line,) = placement_lines(BALANCE | {"balance": balance})
    assert printed(line, width, terminal=False) == line + "\n"
    shown = printed(line, width, terminal=True).splitlines()
    assert max(map(len, shown)) <= width and all(part.startswith("  ") for part in shown[1:])
    assert re.sub(r"\n +", " ", "\n".join(shown)) == line


def test_a_line_that_is_set_in_stays_so():
    assert (
        printed("  12:00:00 " + "word " * 12 + "end", 40, terminal=True)
        .splitlines()[1]
        .startswith("    word")
    )
