"""What the hosts of a cluster file have for their nodes: this machine says it of itself, the file may say it of any,
and of other hosts' GPUs the planner's catalogue knows it by the chip's name.

Hosts elsewhere join when the run is planned already, and compare then. A CPU's name says nothing of its host's memory:
where the file does not either, that is taken to be like this machine's.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from afserve.errors import ConfigError
from afserve.launch.plan.cluster import Cluster, Host
from afserve.launch.plan.gpus import Gpus
from afserve.launch.plan.hosts import HostAssignment, HostedNode
from afserve.launch.plan.machine import Machine, this_machine
from afserve.launch.plan.models import CONFIGS, catalogued
from afserve.launch.plan.wishes import Share
from afserve.member import Role
from afserve.placement.planner.perf.fields import nearest
from afserve.placement.planner.perf.hardware import Hardware, hardware_from_table

Hosts = Mapping[tuple[str, str], Host]  # by address and role


@lru_cache(maxsize=64)
def find_chip(name: str) -> Hardware | None:
    """What the planner knows of a device by this name."""
    path = catalogued("hardware", name)
    if path is None:
        return None
    return hardware_from_table(str(path), tomllib.loads(path.read_text(encoding="utf-8")))


def free_on(device: str, gpus: Gpus, machine: Machine | None = None) -> int:
    """Bytes that are free here on cpu or cuda:N; none on a GPU that is not there."""
    if device == "cpu":
        return (machine or this_machine()).memory
    number = int(device.partition(":")[2])
    return gpus.free[number] if number < len(gpus) else 0


def memories(
    cluster: Cluster, assignment: HostAssignment, machine: Machine, gpus: Gpus
) -> tuple[tuple[Share, ...], Gpus | None]:
    """Nodes that share a memory, with the bytes there, and all GPUs of the run together, if it has any. `machine` and
    `gpus` are what is here. Raises ConfigError for a chip elsewhere of which nobody says what it has."""
    hosts = {(host.address, host.role): host for host in cluster.hosts}
    groups: dict[tuple[str, str], list[HostedNode]] = {}
    for one in assignment.hosted:
        groups.setdefault(("" if one.here else one.host, one.device), []).append(one)
    shares = tuple(_share(cluster, nodes, hosts, machine, gpus) for nodes in groups.values())
    sizes = tuple(share.memory for share in shares if share.device == "cuda")
    names = tuple(dict.fromkeys(host.hardware for host in cluster.hosts if not host.on_cpu))
    fp8 = all(chip is None or chip.flops_fp8 > 0 for chip in map(find_chip, names))
    every = Gpus(names, sizes, sizes, fp8=fp8 and (gpus.fp8 or not len(gpus)))
    return shares, every if sizes else None


def with_own_memory(cluster: Cluster, assignment: HostAssignment, machine: Machine) -> tuple[Share, ...]:
    """Nodes by host, with what the host has of its own memory, a GPU's host too: what the file says, and of this
    machine what is free. 0 bytes of a host elsewhere of which nobody says it."""
    names = dict.fromkeys("" if one.here else one.host for one in assignment.hosted)
    shares = []
    for name, share in zip(names, assignment.node_counts(), strict=True):
        addresses = {one.host for one in assignment.hosted if ("" if one.here else one.host) == name}
        rows = [host for host in cluster.hosts if host.address in addresses]
        said = min(
            (size for host in rows if (size := host.own_memory or host.memory * host.on_cpu)), default=0
        )
        size = min(machine.memory, said or machine.memory) if share.here else said
        shares.append(replace(share, memory=size, place=name))
    return tuple(shares)


def bytes_of_gpu(cluster: Cluster, host: Host) -> tuple[int, str]:
    """What each GPU of a host elsewhere has, and who says it. Raises ConfigError where nobody does."""
    if host.memory:
        return host.memory, "memory_gb of the file"
    if (chip := find_chip(host.hardware)) is not None:
        return int(chip.memory), f"configs/hardware/{chip.name}.toml"
    known = nearest(host.hardware, (path.stem for path in (CONFIGS / "hardware").glob("*.toml")))
    raise ConfigError(
        f"--cluster {cluster.file}: host {host.address}: hardware {host.hardware!r} is none of configs/hardware "
        f"({known.rstrip('.')}), so nobody says how much memory it has; write memory_gb = N, 10^9 bytes of each GPU",
        param="cluster",
    )


def _share(
    cluster: Cluster, nodes: Sequence[HostedNode], hosts: Hosts, machine: Machine, gpus: Gpus
) -> Share:
    first, experts = nodes[0], sum(one.node.role is Role.EXPERT for one in nodes)
    rows = [hosts[one.host, "experts" if one.node.role is Role.EXPERT else "attention"] for one in nodes]
    host, said = rows[0], min((row.memory for row in rows if row.memory), default=0)
    name = f"the {host.hardware} of {host.address}"
    if first.here:
        free = free_on(first.device, gpus, machine)
        memory, place = min(free, said or free), "" if host.on_cpu else f"{name}, {first.device} here"
    elif host.on_cpu:
        memory, place = said, f"{name}, by memory_gb of the file" if said else ""
    else:
        memory, who = bytes_of_gpu(cluster, host)
        place = f"{name}, by {who}"
    device = "cpu" if host.on_cpu else "cuda"
    return Share(len(nodes) - experts, experts, first.here, memory, place, device, host.on_cpu and said > 0)
