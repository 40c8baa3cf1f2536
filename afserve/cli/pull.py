"""`afserve pull`: a checkpoint from a Hugging Face hub into its local cache."""

import json

import click

from afserve.member import MODEL_ROLES


@click.command()
@click.argument("model", metavar="OWNER/NAME")
@click.option(
    "--revision",
    default="main",
    show_default=True,
    help="Branch, tag or commit; a commit is always the same.",
)
@click.option(
    "--role",
    type=click.Choice([str(role.value) for role in MODEL_ROLES]),
    help="Only what nodes of this role read; for hosts that carry no others.",
)
@click.option("--json", "as_json", is_flag=True, help="Print folder and commit as JSON.")
def pull(model: str, revision: str, role: str | None, as_json: bool) -> None:
    """Fetch a checkpoint from the Hugging Face hub, for `afserve up --model OWNER/NAME`.

    Safetensors, JSON and the chat template are fetched, nothing that could hold a program. What breaks off goes on
    where it was, and every file is compared with the digest that the hub lists. It lies where Hugging Face's own tools
    have it; HF_HOME, HF_ENDPOINT and HF_TOKEN are theirs too.
    """
    from rich.console import Console

    from afserve.launch.hub.bars import bars
    from afserve.launch.hub.listing import roles_of
    from afserve.launch.hub.pull import hub_of
    from afserve.launch.hub.pull import pull as fetch

    with hub_of(model) as hub, bars(Console(stderr=True)) as progress:
        folder = fetch(hub, revision, roles_of(role), progress)
    if as_json:
        click.echo(json.dumps({"model": model, "commit": folder.name, "folder": str(folder)}))
    else:
        click.echo(folder)
