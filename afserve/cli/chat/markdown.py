"""An answer on the terminal while it comes: as Markdown, block by block, or as the plain text that it is.

A block is finished by an empty line outside of a fence; it is printed once and stays. Only the last one is redrawn, so
an answer may be longer than the screen.
"""

import sys
from types import TracebackType
from typing import Protocol

import click

_FENCES = ("```", "~~~")


class Shown(Protocol):
    """`with` ends the answer's last line."""

    def __enter__(self) -> "Shown": ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...
    def add(self, text: str) -> None: ...
    def think(self, text: str) -> None:
        """Reasoning, before the answer."""
        ...


class PlainText:
    """Every piece as it comes. Reasoning is set apart where there is a terminal, and left out elsewhere."""

    def __init__(self) -> None:
        self._thinks = False

    def __enter__(self) -> Shown:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, KeyboardInterrupt):
            click.echo()

    def add(self, text: str) -> None:
        if self._thinks:
            click.echo("\n")
            self._thinks = False
        click.echo(text, nl=False)

    def think(self, text: str) -> None:
        if sys.stdout.isatty():
            self._thinks = True
            click.secho(text, dim=True, nl=False)


class MarkdownText:
    """Rendered with rich; needs a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, refresh_per_second=12, transient=True)
        self._open = self._thought = ""

    def __enter__(self) -> Shown:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._live.stop()
        self._thought_ends()
        self._print(self._open)

    def add(self, text: str) -> None:
        from rich.markdown import Markdown

        self._thought_ends()
        finished, self._open = split(self._open + text)
        for block in finished:
            self._print(block)
        self._live.update(Markdown(self._open))

    def think(self, text: str) -> None:
        from rich.text import Text

        self._thought += text
        self._live.update(Text(self._thought, style="dim"))

    def _thought_ends(self) -> None:
        if self._thought.strip():
            self._console.print(self._thought.strip(), style="dim", markup=False, highlight=False)
            self._console.print()
        self._thought = ""

    def _print(self, block: str) -> None:
        from rich.markdown import Markdown

        if block.strip():
            self._console.print(Markdown(block))


def split(text: str) -> tuple[list[str], str]:
    """The finished blocks, and what is still open. A list is one block with what follows it closely."""
    blocks, lines, fence = [], [], ""
    for line in text.splitlines(keepends=True):
        lines.append(line)
        begins = line.strip()[:3]
        if fence:
            fence = "" if begins == fence else fence
        elif begins in _FENCES:
            fence = begins
        elif line == "\n" and any(one.strip() for one in lines):
            blocks.append("".join(lines))
            lines = []
    return blocks, "".join(lines)
