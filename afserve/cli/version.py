"""`afserve version`: what is installed, without importing any of it."""

import json
import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

import click

from afserve import __version__

PACKAGES = (
    "torch",
    "grpcio",
    "protobuf",
    "safetensors",
    "tokenizers",
    "uvicorn",
    "starlette",
    "triton",
)


def versions() -> dict[str, str]:
    found = {"afserve": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = installed(package)
        except PackageNotFoundError:
            continue
    return found


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def version(as_json: bool) -> None:
    """Versions of afserve and what it stands on."""
    found = versions()
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, number in found.items():
        click.echo(f"{name:12} {number}")
