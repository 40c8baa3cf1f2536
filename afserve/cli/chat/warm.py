"""`afserve warm`: computes a prompt that will come, so that its first request finds it."""

import json
from pathlib import Path

import click

from afserve.cli.connection import connect, model_option, server_options
from afserve.cli.options import Within
from afserve.engine.scheduling.request import MAX_RETAIN
from afserve.errors import ConfigError
from afserve.json_file import read_text

MOST_BYTES = 64 << 20


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--retain",
    type=Within(0, MAX_RETAIN),
    default=300.0,
    show_default=True,
    help="Seconds that it is kept before all else in the cache.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON object.")
@model_option
@server_options
def warm(
    file: Path, retain: float, as_json: bool, model: str | None, url: str, api_key_file: str | None
) -> None:
    """Compute what FILE has and keep it in the cache: a text, or JSON with "prompt" or "messages" and "tools"."""
    text = read_text(file, MOST_BYTES, ConfigError)
    with connect(url, api_key_file, model) as client:
        said = client.warm(_body_of(file, text) | {"retain": retain})
    if as_json:
        click.echo(json.dumps(said))
        return
    usage = said["usage"]
    assert isinstance(usage, dict)
    click.echo(
        f"{usage['prompt_tokens']} tokens are warm ({usage['cached_tokens']} were already), kept for {retain:g} s; "
        f"it took {said['seconds']:.2f} s"
    )


def _body_of(file: Path, text: str) -> dict[str, object]:
    if file.suffix != ".json":
        return {"prompt": text}
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(body, dict) or not ("prompt" in body or "messages" in body):
        raise ConfigError(f'{file}: an object with "prompt" or "messages" was expected')
    return body
