"""Options that every command talking to a server shares."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from afserve.cli.options import Within
from afserve.doors.client import DEFAULT_URL, Client
from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., object])


def server_options(command: Command) -> Command:
    """--url and --api-key-file; also AFSERVE_URL and AFSERVE_API_KEY_FILE."""
    key = click.option(
        "--api-key-file",
        type=click.Path(dir_okay=False),
        envvar="AFSERVE_API_KEY_FILE",
        help="File whose first line is the key.",
    )
    return _url(key(command))


def _url(command: Command) -> Command:
    return click.option(
        "--url", default=DEFAULT_URL, show_default=True, envvar="AFSERVE_URL", help="Where the server is."
    )(command)


def model_option(command: Command) -> Command:
    """--model NAME."""
    return click.option(
        "--model", metavar="NAME", help="Which model, of a server that has several; else its first."
    )(command)


def admin_options(command: Command) -> Command:
    """--url and --admin-key-file, --no-wait for what goes on after the answer, and --json."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end."),
        click.option(
            "--timeout", default=600.0, show_default=True, type=Within(0, 86_400), help="Seconds to wait."
        ),
        click.option("--no-wait", is_flag=True, help="Return once the change has begun."),
        click.option(
            "--admin-key-file",
            "--api-key-file",
            "admin_key_file",
            type=click.Path(dir_okay=False),
            envvar="AFSERVE_ADMIN_KEY_FILE",
            help="File whose first line is the admin key.",
        ),
        _url,
    ):
        command = option(command)
    return command


def sampling_options(command: Command) -> Command:
    """--max-tokens, --temperature, --top-p, --seed and --stop."""
    for option in (
        click.option("--stop", multiple=True, help="End at this text; may be given several times."),
        click.option("--seed", type=int, help="Make a random choice repeatable."),
        click.option("--top-p", type=float, default=1.0, show_default=True, help="Keep the likeliest share."),
        click.option("--temperature", type=float, default=0.7, show_default=True, help="0 is greedy."),
    ):
        command = option(command)
    return command


def sampling(
    max_tokens: int, temperature: float, top_p: float, seed: int | None, stop: tuple[str, ...]
) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop)


def connect(url: str, api_key_file: str | None, model: str | None = None) -> Client:
    """`model`: which of the server's."""
    return Client(url, api_key=key_of(api_key_file), model=model)


def key_of(path: str | None) -> str | None:
    """The first key of a file. Raises ConfigError."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").split()[0]
    except OSError as error:
        raise ConfigError(f"api-key-file: {path}: {error.strerror}", param="api-key-file") from error
    except IndexError as error:
        raise ConfigError(f"api-key-file: {path} is empty", param="api-key-file") from error
