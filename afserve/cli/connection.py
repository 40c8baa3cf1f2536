"""Options that every command talking to a server shares."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import click

from afserve.cli.options import Within, option, read_given_text
from afserve.doors.client import DEFAULT_URL, Client
from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., object])
_KEY_BYTES = 1 << 20


def server_options(command: Command) -> Command:
    """--url and --api-key-file; also AFSERVE_URL and AFSERVE_API_KEY_FILE."""
    for one in (
        click.option(
            "--api-key-file",
            type=click.Path(dir_okay=False),
            envvar="AFSERVE_API_KEY_FILE",
            help="File whose first line is the key.",
        ),
        click.option(
            "--url", default=DEFAULT_URL, show_default=True, envvar="AFSERVE_URL", help="Where the server is."
        ),
    ):
        command = one(command)
    return command


def model_option(command: Command) -> Command:
    """--model NAME."""
    return click.option(
        "--model", metavar="NAME", help="Which model, of a server that has several; else its first."
    )(command)


@dataclass(frozen=True, slots=True)
class AdminFlags:
    """Which server is changed, who asks, and how long the command waits for what goes on after the answer."""

    url: str = option(
        default=DEFAULT_URL, show_default=True, envvar="AFSERVE_URL", help="Where the server is."
    )
    admin_key_file: str | None = option(
        "--admin-key-file",
        "--api-key-file",
        type=click.Path(dir_okay=False),
        envvar="AFSERVE_ADMIN_KEY_FILE",
        help="File whose first line is the admin key.",
    )
    no_wait: bool = option(is_flag=True, help="Return once the change has begun.")
    timeout: float = option(default=600.0, show_default=True, type=Within(0, 86_400), help="Seconds to wait.")
    as_json: bool = option("--json", is_flag=True, help="Print one JSON object at the end.")


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """How tokens are chosen, and where answers end."""

    temperature: float = option(type=float, default=0.7, show_default=True, help="0 is greedy.")
    top_p: float = option(type=float, default=1.0, show_default=True, help="Keep the likeliest share.")
    seed: int | None = option(type=int, help="Make a random choice repeatable.")
    stop: tuple[str, ...] = option(multiple=True, help="End at this text; may be given several times.")

    def params(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, **asdict(self))


def connect(url: str, api_key_file: str | None, model: str | None = None) -> Client:
    """`model`: which of the server's."""
    return Client(url, api_key=key_of(api_key_file), model=model)


def key_of(path: str | None) -> str | None:
    """The first key of a file. Raises ConfigError."""
    if path is None:
        return None
    keys = read_given_text(Path(path), f"--api-key-file {path}", _KEY_BYTES).split()
    if not keys:
        raise ConfigError(f"--api-key-file {path}: is empty", param="api-key-file")
    return keys[0]


def first_model(url: str, api_key_file: str | None) -> str:
    """Of those that a server lists. Raises ConfigError where it lists none."""
    with connect(url.rstrip("/").removesuffix("/v1"), api_key_file) as client:
        served = client.models()
    if not served:
        raise ConfigError(f"--model: {url} lists none; name one")
    return served[0]
