"""`afserve node`: one node, for hosts that are started by other means than `afserve up`."""

import click

from afserve.config import FULL, SAMPLES
from afserve.member import Role


@click.command()
@click.option(
    "--role", required=True, type=click.Choice([role.value for role in Role]), help="What this node does."
)
@click.option("--join", required=True, metavar="HOST:PORT", help="The controller.")
@click.option(
    "--token-file",
    required=True,
    type=click.Path(exists=True, dir_okay=False),
    help="A copy of the run's token.",
)
@click.option(
    "--index", type=click.IntRange(min=0), help="Which node of its role; any free one if not given."
)
@click.option(
    "--verify",
    default=SAMPLES,
    show_default=True,
    type=click.Choice((SAMPLES, FULL)),
    help="full: compare all bytes of the checkpoint here with the controller's.",
)
def node(role: str, join: str, token_file: str, index: int | None, verify: str) -> None:
    """Start one node that joins a controller elsewhere.

    Model, sizes and limits come from the controller; the checkpoint must be at the same path here:
    a copy with other weights or another tokenizer is refused. An
    expert node listens for rows on the address that it reaches the controller from.
    """
    from afserve.control.node.worker import NodeSettings, run_node

    _show_progress()
    run_node(NodeSettings(role, join, token_file, index, verify))


def _show_progress() -> None:
    """Of reading all bytes, as lines."""
    import logging

    log = logging.getLogger("afserve.verify")
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
