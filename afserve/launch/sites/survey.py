"""What a run is planned for: the checkpoint, and the machine, GPUs and hosts that a site has for its nodes."""

from dataclasses import dataclass, replace
from pathlib import Path

from afserve.errors import ConfigError
from afserve.kernels.isa import check_isa
from afserve.launch.plan.gpus import Gpus, probe_gpus
from afserve.launch.plan.hosts import HostAssignment, HostedNode
from afserve.launch.plan.machine import Machine, this_machine
from afserve.launch.plan.models import FoundModel, find_model
from afserve.launch.plan.numa import seats_here
from afserve.launch.plan.wishes import RunSettings, UpFlags
from afserve.tls import check_exposed


@dataclass(frozen=True, slots=True)
class Survey:
    """`flags` with what the site has to say of them. `assigned` None: all of it is on this machine; `devices` tell
    transports who shares one."""

    flags: UpFlags
    found: FoundModel
    machine: Machine
    gpus: Gpus
    assigned: HostAssignment | None = None
    devices: tuple[HostedNode, ...] = ()


def survey_this_machine(flags: UpFlags, scratch: Path) -> Survey:
    """Raises ConfigError for flags of other hosts."""
    for name in ("listen", "ssh"):
        if getattr(flags.run, name):
            raise ConfigError(f"--{name}: is for other hosts, of a --cluster FILE for example")
    check_isa(flags.wishes.engine.isa)
    gpus = Gpus() if flags.wishes.engine.device == "cpu" else probe_gpus()
    machine = replace(this_machine(), numa=seats_here())
    return Survey(flags, find_asked(flags.run, scratch), machine, gpus)


def find_asked(run: RunSettings, scratch: Path) -> FoundModel:
    """The checkpoint, fetched with bars first where that is asked for. Raises what `pull` raises."""
    return find_model(run.model, scratch, run.revision, _fetched if run.download else None)


def _fetched(model: str, revision: str) -> Path:
    """Its folder with what all roles read. An HTTP client and a terminal's bars are imported by those who ask."""
    from rich.console import Console

    from afserve.launch.hub.bars import bars
    from afserve.launch.hub.listing import roles_of
    from afserve.launch.hub.pull import hub_of, pull

    with hub_of(model) as hub, bars(Console(stderr=True)) as progress:
        return pull(hub, revision, roles_of(None), progress)


def check_elsewhere(flags: UpFlags, assignment: HostAssignment, found: FoundModel, scratch: Path) -> None:
    """Raises ConfigError for what works on one machine only. `scratch` is the run's own folder."""
    if not assignment.elsewhere:
        return
    check_exposed("nodes on other hosts", assignment.listen, flags.run.certs, flags.run.insecure_nodes)
    if found.folder.is_relative_to(scratch) and found.weights:
        raise ConfigError(
            f"{found.name}: a GGUF file is served on one host; give a Hugging Face folder that every host has",
            param="model",
        )
    if found.folder.is_relative_to(scratch):
        raise ConfigError(
            f"{found.name}: only its shape is known, and the other hosts have no folder of it; write model.path of "
            "a folder that every host has",
            param="model",
        )
