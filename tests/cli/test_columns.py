"""Tables of `afserve status` and `afserve top` on terminals of any width: every cell can be read."""

import io

import pytest
from rich.console import Console

from afserve.cli.columns import drawn, groups

COLUMNS = ("node", "state", "pid", "MiB", "seen", "running", "waiting", "KV", "tokens", "rows", "busy")
ROWS = [
    ("attention-17", "ready, prefill", "1234567", "12,345", "0.3 s", "12", "1204", "100%", "123456789", "", ""),
    ("expert-113", "ready", "1234568", "99,345", "0.2 s", "", "", "", "", "123,456,789", "12345.3 s"),
    ("gateway-0 [red]", "ready", "1234569", "345", "0.1 s", *("",) * 6),
]  # fmt: skip
NAME = "an-organisation/a-model-whose-name-is-wider-than-the-terminal-on-which-it-is-read-123B-A4B-Instruct"


def printed(width: int) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width)
    console.print(drawn(NAME, COLUMNS, ROWS, width, left=("node", "state")))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [34, 40, 60, 80, 100, 200])
def test_no_cell_is_cut_and_no_line_is_too_long(width):
    lines = printed(width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert all(cell in text for row in ROWS for cell in row) and "…" not in text
    assert NAME in "".join(line.strip() for line in lines)
    heads = [line.split() for line in lines if line.startswith("node")]
    assert [name for head in heads for name in head if name != "node"] == list(COLUMNS[1:])


def test_one_table_where_all_fits():
    assert sum(line.startswith("node") for line in printed(120)) == 1
    assert sum(line.startswith("node") for line in printed(80)) == 2


def test_every_table_has_a_column_beside_the_names():
    assert groups([12, 5, 5, 5], 26) == [[0, 1, 2], [0, 3]]
    assert groups([100, 5, 5], 80) == [[0, 1], [0, 2]]
    assert groups([10], 80) == [[0]]
