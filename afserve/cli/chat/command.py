"""`afserve chat`: talk to the model on the terminal, or ask it one thing.

What was typed is kept for the arrow keys of the next conversation, in a file that only its owner reads.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from afserve.cli.chat.conversation import ChatHistory
from afserve.cli.chat.markdown import MarkdownText, PlainText
from afserve.cli.connection import SamplingFlags, connect, model_option, server_options
from afserve.cli.options import group_options
from afserve.doors.client import Client
from afserve.errors import AfserveError

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


HELP = """\
  /reset         forget the conversation        /retry   answer the last message again
  /system TEXT   set the system message         /help    this list
  /params        show how tokens are chosen     /params temperature=0.2 seed=none ...   change it
  /exit          leave (or Ctrl-D)              Ctrl-C   stop the current answer
  A line that ends in \\ goes on in the next one."""


@click.command()
@click.argument("message", required=False)
@click.option("--system", help="A system message to begin with.")
@click.option("--max-tokens", type=int, help="At most this many tokens per answer. [default: what fits]")
@click.option("--plain", is_flag=True, help="Show answers as they come, without rendering Markdown.")
@click.option("--no-history", is_flag=True, help="Neither read nor keep what is typed.")
@group_options(SamplingFlags)
@server_options
@model_option
def chat(
    sampling: SamplingFlags,
    message: str | None,
    system: str | None,
    max_tokens: int | None,
    plain: bool,
    no_history: bool,
    url: str,
    api_key_file: str | None,
    model: str | None,
) -> None:
    """Talk to a running server.

    With MESSAGE, or with text on standard input, prints one answer. Otherwise a conversation begins;
    type /help in it. On a terminal answers are rendered as Markdown, and what you type is kept below
    $XDG_STATE_HOME/afserve for the arrow keys.
    """
    with connect(url, api_key_file, model) as client:
        params = sampling.params(max_tokens or 1)
        show = PlainText if plain or not sys.stdout.isatty() else MarkdownText
        talk = ChatHistory(client, system, params, unlimited=max_tokens is None, show=show)
        if message is None and not sys.stdin.isatty():
            message = sys.stdin.read()
        if message is not None:
            if not message.strip():
                raise click.UsageError(
                    'there is nothing to answer; give a message, such as: afserve chat "hello"'
                )
            if talk.ask_and_print(message).interrupted:
                raise KeyboardInterrupt
            return
        with line_editing(keep=not no_history):
            _converse(client, talk, model or client.models()[0])


def _converse(client: Client, talk: ChatHistory, model: str) -> None:
    click.secho(f"{model} at {client.url}. /help lists the commands, Ctrl-D leaves.", dim=True)
    while (line := _read()) is not None:
        if line.startswith("/"):
            if not _command(talk, line):
                return
        elif line.strip():
            _answer(talk, line)


def _command(talk: ChatHistory, line: str) -> bool:
    """Whether the conversation goes on."""
    name, _, rest = line.partition(" ")
    if name in ("/exit", "/quit", "/q"):
        return False
    if name == "/reset":
        talk.reset()
    elif name == "/system":
        talk.set_system(rest.strip() or None)
    elif name == "/params":
        _params(talk, rest)
    elif name == "/retry":
        last = talk.take_back()
        if last is None:
            click.secho("there is nothing to answer again", dim=True)
        else:
            _answer(talk, last)
    else:
        click.echo(HELP)
    return True


def _params(talk: ChatHistory, text: str) -> None:
    try:
        talk.set_params(text)
    except AfserveError as error:
        click.secho(error.message, fg="red", err=True)
    click.secho(talk.params, dim=True)


def _answer(talk: ChatHistory, text: str) -> None:
    try:
        said = talk.ask_and_print(text)
    except AfserveError as error:
        click.secho(str(error), fg="red", err=True)
        return
    rate = f", {said.rate:.0f} tokens/s" if said.rate else ""
    end = (
        " (stopped)" if said.interrupted else " (cut at the limit)" if said.finish_reason == "length" else ""
    )
    click.secho(
        f"{said.tokens} tokens, first after {said.first_after * 1e3:.0f} ms{rate}{end}", dim=True, err=True
    )


def _read() -> str | None:
    """One message; None at the end of input. Ctrl-C drops the line being typed."""
    lines: list[str] = []
    while True:
        try:
            line = input("... " if lines else ">>> ")
        except EOFError:
            click.echo()
            return None
        except KeyboardInterrupt:
            click.echo("  (Ctrl-D leaves)")
            lines = []
            continue
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])
