"""`--download`: a checkpoint is fetched, with bars, before a run begins."""

from pathlib import Path

from rich.console import Console

from afserve.launch.hub.bars import bars
from afserve.launch.hub.listing import roles_of
from afserve.launch.hub.pull import hub_of, pull


def fetched(model: str, revision: str) -> Path:
    """Its folder with what all roles read. Raises what `pull` raises."""
    with hub_of(model) as hub, bars(Console(stderr=True)) as progress:
        return pull(hub, revision, roles_of(None), progress)
