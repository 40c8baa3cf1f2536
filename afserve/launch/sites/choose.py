"""Picks the kind of site that a run's flags ask for: the only place that knows all of them."""

from pathlib import Path

from afserve.control.wire import channel
from afserve.errors import ConfigError
from afserve.launch.plan.ray_settings import RaySettings
from afserve.launch.plan.wishes import RunSettings
from afserve.launch.sites.site import Site


def choose_site(run: RunSettings, ray: RaySettings) -> Site:
    """Not yet started. Each kind is imported when it is asked for: this machine's begins before its imports are over.

    Raises ConfigError where a token's file cannot be made.
    """
    token = _token_at(run.token_file)
    if ray.ray is not None:
        from afserve.launch.sites.ray import RaySite

        return RaySite(token, insecure=run.insecure_nodes)
    if run.elsewhere:
        from afserve.launch.sites.awaited import AwaitedSite

        return AwaitedSite(token, run)
    if run.cluster is not None:
        from afserve.launch.sites.hosts import HostsSite

        return HostsSite(token, run.cluster, run.certs, run.ssh_command if run.ssh else "")
    from afserve.launch.sites.local import LocalSite

    return LocalSite(token)


def _token_at(path: Path | None) -> Path | None:
    """A user's token file, made where there is none."""
    if path is not None and not path.exists():
        try:
            channel.write_token(path)
        except OSError as error:
            raise ConfigError(f"--token-file {path}: {error.strerror}") from error
    return path
