"""`afserve completion`: the script with which a shell completes commands, options and their values."""

import click

from afserve.cli.main import cli
from afserve.errors import ConfigError

VARIABLE = "_AFSERVE_COMPLETE"  # click's own: the script calls afserve with it
SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print what makes SHELL complete `afserve`.

    \b
    bash:  afserve completion bash > ~/.local/share/bash-completion/completions/afserve
    zsh:   afserve completion zsh > "${fpath[1]}/_afserve"
    fish:  afserve completion fish > ~/.config/fish/completions/afserve.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    if found is None:
        raise ConfigError(f"{shell}: this click completes nothing for it; update click", param="shell")
    click.echo(found(cli, {}, "afserve", VARIABLE).source())
