"""Where a run takes place: this machine, the hosts of a cluster file, hosts that a site starts, or a Ray cluster."""

from dataclasses import dataclass, replace
from pathlib import Path

from afserve.errors import ConfigError
from afserve.launch.hub.fetched import fetched
from afserve.launch.plan.cluster import Cluster, read_cluster
from afserve.launch.plan.gpus import Gpus, probe_gpus
from afserve.launch.plan.hosts import HostAssignment, HostedNode, assign, look_up, own_addresses
from afserve.launch.plan.machine import Machine, this_machine
from afserve.launch.plan.models import FoundModel, find_model
from afserve.launch.plan.wishes import UpFlags
from afserve.launch.processes.processes import NodeProcesses
from afserve.launch.sites.awaited import awaiting
from afserve.launch.sites.ray_launcher import RayLauncher
from afserve.launch.sites.ray_run import set_aside
from afserve.settings import flag_of
from afserve.tls import check_exposed

_IN_FILE = {  # flag -> the key of a cluster file that says the same
    "model": "model",
    "attention": "attention.nodes",
    "experts": "experts.nodes",
    "colocated": "experts.nodes",
    "prefill": "attention.prefill",
    "decode": "attention.prefill",
    "prefill_tokens": "attention.prefill_tokens",
    "prompt_share": "experts.prompt_share",
    "micro_batches": "micro_batches",
    "device": "host.hardware",
}


@dataclass(frozen=True, slots=True)
class RunSite:
    """Where a run takes place. `assigned` None: all of it on this machine; `devices` tell transports who shares one."""

    flags: UpFlags
    found: FoundModel
    machine: Machine
    gpus: Gpus
    assigned: HostAssignment | None = None
    devices: tuple[HostedNode, ...] = ()


def on_this_machine(flags: UpFlags, processes: NodeProcesses) -> RunSite:
    """This machine, or the hosts of a cluster file."""
    cluster = None if flags.run.cluster is None else read_cluster(flags.run.cluster)
    device = flags.wishes.engine.device if cluster is None else cluster.device
    experts_on_gpus = cluster is not None and cluster.expert_device != "cpu"
    gpus = Gpus() if device == "cpu" and not experts_on_gpus else probe_gpus()
    flags, assigned = _assigned(flags, cluster, gpus)
    found = _found(flags, processes)
    if assigned is not None:
        _check_elsewhere(flags, assigned, found, processes.folder)
    return RunSite(flags, found, this_machine(), gpus, assigned, () if assigned is None else assigned.hosted)


def attended(flags: UpFlags, processes: NodeProcesses) -> RunSite:
    """Hosts whose nodes somebody else starts: the run waits for them."""
    if flags.run.cluster is not None or flags.run.ssh:
        raise ConfigError(
            "--elsewhere: starts no node of a --cluster FILE; drop one of them", param="elsewhere"
        )
    found = _found(flags, processes)
    wishes, assignment, machine, gpus = awaiting(flags.run, flags.wishes, this_machine())
    _check_elsewhere(flags, assignment, found, processes.folder)
    return RunSite(replace(flags, wishes=wishes), found, machine, gpus, assignment, assignment.hosted)


def on_ray(flags: UpFlags, launcher: RayLauncher, processes: NodeProcesses) -> RunSite:
    """The hosts that Ray finds. Raises ConfigError before Ray is asked, where a flag fits no cluster."""
    for name in ("cluster", "ssh", "elsewhere"):
        if getattr(flags.run, name):
            raise ConfigError(f"--{name}: Ray chooses the hosts; drop it or --ray", param=name)
    found = _found(flags, processes)
    plan = set_aside(launcher, flags.ray, flags.wishes, found, flags.run.listen)
    _check_elsewhere(flags, plan.assignment, found, processes.folder)
    flags = replace(flags, wishes=plan.wishes)
    return RunSite(flags, found, plan.machine, plan.gpus, plan.assignment, plan.devices)


def _found(flags: UpFlags, processes: NodeProcesses) -> FoundModel:
    asked = flags.run
    return find_model(asked.model, processes.folder, asked.revision, fetched if asked.download else None)


def _assigned(flags: UpFlags, cluster: Cluster | None, gpus: Gpus) -> tuple[UpFlags, HostAssignment | None]:
    """What a cluster file says, as flags, and who runs where. Raises ConfigError where a flag says otherwise."""
    if cluster is None:
        for name in ("listen", "ssh"):
            if getattr(flags.run, name):
                raise ConfigError(
                    f"--{name}: is for other hosts, of a --cluster FILE for example", param=name
                )
        return flags, None
    assignment = assign(cluster, flags.run.listen, look_up, own_addresses())
    _check_cuda(cluster, assignment, gpus)
    wishes = flags.wishes
    engine = replace(
        wishes.engine,
        device=cluster.device,
        prefill_tokens=cluster.prefill_tokens or wishes.engine.prefill_tokens,
        prompt_share=cluster.prompt_share or wishes.engine.prompt_share,
    )
    found = replace(
        flags,
        run=replace(flags.run, model=cluster.model),
        wishes=replace(
            wishes,
            attention=cluster.attention,
            prefill=cluster.prefill or wishes.prefill,
            decode=cluster.decode or wishes.decode,
            experts=cluster.experts or None,
            colocated=not cluster.experts,
            micro_batches=str(cluster.micro_batches),
            engine=engine,
            expert_device=cluster.expert_device,
            batch=cluster.batch,
            hosts=assignment.shares(),
            expert_hosts=assignment.expert_hosts(),
        ),
    )
    asked, wanted = _in_file(flags), _in_file(found)
    for name, key in _IN_FILE.items():
        if name in flags.given and asked[name] != wanted[name]:
            flag = flag_of(name) if name == "colocated" else f"{flag_of(name)} {asked[name]}"
            raise ConfigError(
                f"{flag}: {cluster.file} has {key} = {_as_written(cluster, name)}; drop the flag or edit the file",
                param=name,
            )
    return found, assignment


def _in_file(flags: UpFlags) -> dict[str, object]:
    """What a cluster file says too, by the flags' names."""
    wishes = flags.wishes
    return {
        "model": flags.run.model,
        "attention": wishes.attention,
        "experts": wishes.experts,
        "colocated": wishes.colocated,
        "prefill": wishes.prefill,
        "decode": wishes.decode,
        "prefill_tokens": wishes.engine.prefill_tokens,
        "prompt_share": wishes.engine.prompt_share,
        "micro_batches": wishes.micro_batches,
        "device": wishes.engine.device,
    }


def _as_written(cluster: Cluster, flag: str) -> str:
    if flag == "device":
        return cluster.hardware_of("attention")
    return str(getattr(cluster, {"colocated": "experts", "decode": "prefill"}.get(flag, flag)))


def _check_cuda(cluster: Cluster, assignment: HostAssignment, gpus: Gpus) -> None:
    """Of the hosts that are this machine; the others' nodes say it themselves."""
    for mine in assignment.here:
        if mine.device != "cpu" and int(mine.device.partition(":")[2]) >= len(gpus):
            kind = next(h.hardware for h in cluster.hosts if h.address == mine.host)
            raise ConfigError(
                f"--cluster {cluster.file}: host {mine.host}: {kind} needs {mine.device}, but this machine has "
                f'{len(gpus)} CUDA devices; hardware = "cpu-host" runs it on the CPU',
                param="cluster",
            )


def _check_elsewhere(flags: UpFlags, assignment: HostAssignment, found: FoundModel, scratch: Path) -> None:
    """What works on one machine only."""
    if not assignment.elsewhere:
        return
    check_exposed("nodes on other hosts", assignment.listen, flags.run.certs, flags.run.insecure_nodes)
    if found.folder.is_relative_to(scratch):
        raise ConfigError(
            f"{found.name}: only its shape is known, and the other hosts have no folder of it; write model.path of "
            "a folder that every host has",
            param="model",
        )
