"""`afserve host`: one command per host; how many nodes run here, and which, the controller's cluster file says."""

from pathlib import Path

import click

from afserve.cli.options import existing_file
from afserve.cli.settings import ENVIRONMENT


@click.command(context_settings=ENVIRONMENT)
@click.option("--join", required=True, metavar="HOST:PORT", help="The controller.")
@click.option("--token-file", required=True, type=existing_file, help="A copy of the run's token.")
@click.option("--as", "called", default="", metavar="NAME", help="What the cluster file calls this host.")
@click.option(
    "--certs",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="This host's certificates, from `afserve certs issue`.",
)
@click.option("--insecure-nodes", is_flag=True, help="Speak plain text beyond this host.")
def host(join: str, token_file: Path, called: str, certs: Path | None, insecure_nodes: bool) -> None:
    """Carry this host's nodes for `afserve up --cluster FILE` elsewhere.

    The cluster file there says how many nodes run here, of which role and on which devices. Hosts may be started in any
    order, before `up` too: this one waits five minutes for it. Nodes that end are started again when the controller
    wants it, and this command ends when the run does.

    Each option may also stand in the environment, as AFSERVE_TOKEN_FILE for --token-file.
    """
    import logging

    from afserve.launch.plan.hosts import check_join
    from afserve.launch.sites.host_agent import HostSettings, carry

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)-7s %(message)s")
    check_join(join)
    carry(HostSettings(join, token_file, called, certs, insecure_nodes))
