"""What was typed in `afserve chat`, kept for the arrow keys of the next one, in a file that only its owner reads."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

_MOST = 1000  # lines


def state_folder() -> Path | None:
    """`afserve` below XDG_STATE_HOME, or below ~/.local/state; None where the user has no home."""
    given = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(given):  # others are to be ignored, says the XDG specification
        return Path(given) / "afserve"
    try:
        return Path.home() / ".local" / "state" / "afserve"
    except RuntimeError:
        return None


@contextmanager
def line_editing(*, keep: bool) -> Iterator[None]:
    """`input()` has line editing meanwhile; with `keep` it knows earlier lines, and this one's are added at the end."""
    try:
        import readline
    except ImportError:
        yield
        return
    folder = state_folder() if keep else None
    if folder is None:
        yield
        return
    path = folder / "chat_history"
    with suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(_MOST)
    try:
        yield
    finally:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            readline.write_history_file(path)
        except OSError as error:
            click.echo(f"what was typed is not kept: {path}: {error.strerror}", err=True)
