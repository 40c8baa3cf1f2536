"""`afserve complete`: continue a prompt, token by token on the terminal."""

import json
import sys

import click

from afserve.cli.connection import SamplingFlags, connect, model_option, server_options
from afserve.cli.options import group_options


@click.command()
@click.argument("prompt", required=False)
@click.option("--max-tokens", type=int, default=128, show_default=True, help="At most this many new tokens.")
@group_options(SamplingFlags)
@click.option("--echo", is_flag=True, help="Print the prompt first.")
@click.option("--json", "as_json", is_flag=True, help="Print the server's answer as JSON, at its end.")
@server_options
@model_option
def complete(
    sampling: SamplingFlags,
    prompt: str | None,
    max_tokens: int,
    echo: bool,
    as_json: bool,
    url: str,
    api_key_file: str | None,
    model: str | None,
) -> None:
    """Continue PROMPT; without one, what comes on standard input.

    \b
    Examples:
      afserve complete "def fibonacci(n):" --temperature 0
      git diff | afserve complete --max-tokens 64
    """
    if prompt is None:
        prompt = _standard_input()
    with connect(url, api_key_file, model) as client:
        params = sampling.params(max_tokens)
        if as_json:
            click.echo(json.dumps(dict(client.complete(prompt, params).body), ensure_ascii=False))
            return
        if echo:
            click.echo(prompt, nl=False)
        for delta in client.complete_stream(prompt, params):
            click.echo(delta.text, nl=False)
        click.echo()


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise click.UsageError('give a prompt, such as: afserve complete "Once upon a time"')
    return sys.stdin.read()
