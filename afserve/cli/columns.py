"""Tables for a terminal in which no cell is cut: columns that do not fit follow below, beside the first one again."""

from collections.abc import Collection, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_GAP = 2  # between two columns


def drawn(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, left: Collection[str]
) -> RenderableType:
    """A title and as many tables as `width` characters ask for. Columns not in `left` are set to the right."""
    parts: list[RenderableType] = [Text(title, style="bold")]
    for group in groups([_width(column, rows, at) for at, column in enumerate(columns)], width):
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        for at in group:
            column = columns[at]
            table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(row[at]) for at in group))
        parts.append(table)
    return Group(*parts)


def groups(widths: Sequence[int], most: int) -> list[list[int]]:
    """The columns of each table: column 0, and at least one more where there is one."""
    found, used = [[0]], widths[0]
    for at, width in enumerate(widths[1:], 1):
        if used + _GAP + width > most and len(found[-1]) > 1:
            found.append([0])
            used = widths[0]
        found[-1].append(at)
        used += _GAP + width
    return found


def _width(column: str, rows: Sequence[Sequence[str]], at: int) -> int:
    """Cells on a terminal."""
    return max(Text(text).cell_len for text in (column, *(row[at] for row in rows)))
