"""`afserve certs`: a private authority for a deployment, and its hosts' certificates; see `launch/sites/authority`."""

from pathlib import Path

import click

from afserve.tls import CertifiedRole

_folder = click.Path(file_okay=False, path_type=Path)
_AUTHORITY = click.option(
    "--authority", required=True, type=_folder, help="The folder that `afserve certs init` made."
)
_DAYS = click.option(
    "--days", default=90.0, show_default=True, metavar="N", help="How long the certificate is valid."
)


@click.group()
def certs() -> None:
    """Certificates by which the hosts of a deployment know each other.

    One private authority per deployment; keep its folder on a machine of yours, no node needs it. Each host has a
    folder with its own certificate, which `--certs FOLDER` of up, host and node reads. Needs afserve[tls].
    """


@certs.command()
@click.argument("folder", type=_folder)
@click.option("--days", default=3650, show_default=True, metavar="N", help="How long the authority is valid.")
def init(folder: Path, days: int) -> None:
    """Make an authority in FOLDER."""
    from afserve.launch.sites.authority import make_authority

    click.echo(
        f"{make_authority(folder, days)}: keep {folder} private; hosts need only what `certs issue` writes"
    )


@certs.command()
@click.argument("name")
@_AUTHORITY
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice([str(role) for role in CertifiedRole]),
    help="What this host may be; may be given several times. Where `up` runs: controller and gateway.",
)
@click.option(
    "--address", "addresses", multiple=True, help="A host name or IP that HTTPS clients use; may be repeated."
)
@click.option("--out", required=True, type=_folder, help="Where the host's files are written.")
@_DAYS
def issue(
    name: str, authority: Path, roles: tuple[str, ...], addresses: tuple[str, ...], out: Path, days: float
) -> None:
    """Issue a certificate for the host that people call NAME."""
    from afserve.launch.sites.authority import Subject, roles_of
    from afserve.launch.sites.authority import issue as write

    _say(write(authority, Subject(name, roles_of(roles), addresses), out, days))


@certs.command()
@click.argument("folder", type=_folder)
@_AUTHORITY
@_DAYS
def renew(folder: Path, authority: Path, days: float) -> None:
    """Replace the certificate in FOLDER with one for the same host. Nodes use it for their next connection."""
    from afserve.launch.sites.authority import issue as write
    from afserve.launch.sites.authority import subject_of

    _say(write(authority, subject_of(folder), folder, days))


def _say(path: Path) -> None:
    from afserve.launch.sites.authority import as_text, expires, subject_of

    subject = subject_of(path.parent)
    what = ", ".join(filter(None, (as_text(subject.roles), ", ".join(subject.addresses))))
    click.echo(f"{path}: {subject.name}, {what}, valid until {expires(path):%Y-%m-%d %H:%M} UTC")
