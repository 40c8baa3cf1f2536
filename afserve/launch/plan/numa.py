"""This machine's NUMA nodes: cores, memory and distances as /sys says, and how nodes of a run are dealt to them.

A NUMA node is a socket, or a part of one. One with memory and cores takes nodes of the run. Cores of one without memory
belong to the nearest one that has it, and memory without cores (CXL) is taken when memory elsewhere is full. Only cores
that this process may use count. Nothing is bound here; a seat is what a node of the run is to be bound to.
"""

import os
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from afserve.comm.binding import Binding, refusal, seat
from afserve.errors import ConfigError
from afserve.launch.plan.machine import Machine, read_words
from afserve.launch.plan.wishes import Share, Wishes
from afserve.member import MODEL_ROLES, NodeId, Role

SYSFS = Path("/sys/devices/system/node")
_FAR = 1 << 30
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class NumaNode:
    """`memory` and `free` in bytes; `distance` by the number of the other one, 10 being its own."""

    number: int
    cores: frozenset[int]
    memory: int
    free: int
    distance: Mapping[int, int]


def numa_nodes(root: Path | None = None) -> tuple[NumaNode, ...]:
    """In the order of their numbers; none where the system does not say."""
    root = root or SYSFS
    folders = {int(f.name[4:]): f for f in root.glob("node*") if f.name[4:].isdecimal()}
    return tuple(_node(number, folders[number], sorted(folders)) for number in sorted(folders))


def _node(number: int, folder: Path, numbers: Sequence[int]) -> NumaNode:
    sizes = {}
    for line in read_words(folder / "meminfo").splitlines():  # Node 0 MemTotal:  13068492 kB
        words = line.split()
        if len(words) >= 4 and words[3].isdecimal():
            sizes[words[2]] = 1024 * int(words[3])
    far = [int(word) for word in read_words(folder / "distance").split()]
    cores = frozenset(cores_of(read_words(folder / "cpulist")))
    total, free = sizes.get("MemTotal:", 0), sizes.get("MemFree:", 0)
    return NumaNode(number, cores, total, free, dict(zip(numbers, far, strict=False)))


def cores_of(text: str) -> list[int]:
    """0-2,5 as 0, 1, 2, 5."""
    ends = [run.partition("-") for run in text.split(",") if run]
    return [core for first, _, last in ends for core in range(int(first), int(last or first) + 1)]


def cores_in_words(cores: Collection[int]) -> str:
    """0, 1, 2, 5 as 0-2,5."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1][1:] = [core]
        else:
            runs.append([core])
    return ",".join("-".join(map(str, run)) for run in runs)


def usable_cores() -> frozenset[int]:
    """Of this process: what affinity and cpusets leave."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ())


def split(nodes: Sequence[NumaNode], usable: Collection[int]) -> tuple[Binding, ...]:
    """What to bind to: the usable cores of each NUMA node with memory. None are in two of them."""
    homes = [node for node in nodes if node.memory and node.cores]
    cores: dict[int, set[int]] = {home.number: set() for home in homes}
    for node in nodes if homes else ():
        away = ((node.distance.get(home.number, _FAR), home.number) for home in homes)
        number = node.number if node in homes else min(away)[1]
        cores[number] |= node.cores & frozenset(usable)
    return tuple(Binding(tuple(sorted(own)), number) for number, own in cores.items() if own)


def seats_here() -> tuple[Binding, ...]:
    """Of this machine, with the kernel's reason where it lets nobody choose a node's memory."""
    return tuple(replace(one, refused=refusal(one.memory)) for one in split(numa_nodes(), usable_cores()))


def seat_numbered(number: int) -> Binding:
    """Raises ConfigError where this machine has no such seat."""
    here = {one.memory: one for one in seats_here()}
    if number in here:
        return here[number]
    has = f"NUMA nodes {', '.join(map(str, here))}" if here else "no NUMA nodes that it names"
    raise ConfigError(
        f"--numa {number}: {socket.gethostname()} has {has} with memory and with cores for this process",
        param="numa",
    )


def seats_for(machine: Machine, wishes: Wishes, picked: dict[str, str]) -> tuple[Binding, ...]:
    """Those that a run may have; none where there is nothing to choose."""
    if len(machine.numa) < 2:
        return ()
    if wishes.numa == "off":
        picked["numa"] = "off, as asked for: nodes run on any core"
        return ()
    if wishes.engine.device != "cpu":
        picked["numa"] = "not bound: nodes compute on GPUs"
        return ()
    return machine.numa


def dealt(
    seats: tuple[Binding, ...], nodes: Share, wishes: Wishes, picked: dict[str, str]
) -> tuple[Binding, ...]:
    """The seats; none where some would have more nodes than others, or a node more threads than its seat has cores."""
    if not seats:
        return ()
    least = min(len(one.cores) for one in seats)
    if nodes.total % len(seats):
        picked["numa"] = (
            f"not bound: {nodes.total} nodes cannot be dealt evenly to {len(seats)} NUMA nodes; --attention and "
            f"--experts whose sum divides by {len(seats)} can"
        )
    elif (wishes.threads or 1) > least:
        picked["numa"] = (
            f"not bound: --threads {wishes.threads} are more than the {least} cores of a NUMA node"
        )
    else:
        picked["numa"] = _said(seats, nodes)
        return seats
    return ()


def _said(seats: Sequence[Binding], nodes: Share) -> str:
    """Who is where, of the first ones, and once what the kernel refuses."""
    counts = {Role.ATTENTION: nodes.attention, Role.EXPERT: nodes.experts}
    names: list[list[str]] = [[] for _ in seats]
    for node in (NodeId(role, n) for role in MODEL_ROLES for n in range(counts[role])):
        names[seat(node, len(seats))].append(str(node))
    said = [
        f"{', '.join(who)} on cores {cores_in_words(one.cores)}"
        for who, one in zip(names, seats, strict=True)
    ]
    more = [f"{len(said) - _SHOWN} more alike"] if len(said) > _SHOWN else []
    refused = next((f"cores only, {one.refused}" for one in seats if one.refused), "")
    return "; ".join([f"{len(seats)} nodes", *said[:_SHOWN], *more, *filter(None, [refused])])
