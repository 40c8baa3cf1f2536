"""From what a user asked of Ray to a run on its hosts: who runs where, and what the hosts have.

It asks the helper before anything is chosen, so that the rest is chosen for the hosts as they are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from afserve.errors import ConfigError
from afserve.launch.plan.gpus import Gpus
from afserve.launch.plan.hosts import HostAssignment, HostedNode, listening
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.models import FoundModel
from afserve.launch.plan.ray_settings import RaySettings
from afserve.launch.plan.wishes import Share, Wishes
from afserve.member import MODEL_ROLES, MOST_NODES, NodeId, Role
from afserve.settings import in_range

_MOST_EXPERTS = 8  # where the user does not say


@dataclass(frozen=True, slots=True)
class RayPlan:
    """What `topology` and `transports` choose from. `machine` is the least of the hosts in every respect."""

    wishes: Wishes
    assignment: HostAssignment
    machine: Machine
    gpus: Gpus
    devices: tuple[HostedNode, ...]  # the same nodes, each with a device of its own


def set_aside(
    ask: Callable[[Mapping[str, object]], Any],
    asked: RaySettings,
    wishes: Wishes,
    found: FoundModel,
    listen: str | None,
) -> RayPlan:
    """`ask` puts a question to the helper. Connects and waits for room. Raises ConfigError where there is no cluster,
    no room, or no checkpoint."""
    cluster = ask({"ask": "connect", "address": asked.ray})
    wishes = _counted(wishes, len(cluster["hosts"]))
    cuda = wishes.engine.device != "cpu"
    if ":" in wishes.engine.device:
        raise ConfigError(
            f"--device {wishes.engine.device}: Ray gives each node its own GPU; use --device cuda"
        )
    bundles = {role: dict(asked.bundle(role, cuda=cuda)) for role in MODEL_ROLES}
    counts = {Role.ATTENTION: wishes.attention or 1, Role.EXPERT: wishes.experts or 0}
    placed = ask(
        {
            "ask": "reserve",
            "pools": {str(role): {"bundle": bundles[role], "nodes": counts[role]} for role in MODEL_ROLES},
            "strategy": asked.ray_placement.upper().replace("-", "_"),
            "seconds": asked.ray_wait,
            "model": str(found.folder),
            "gpus": cuda,
        }
    )
    hosted = _hosted(placed, counts, bundles)
    host, port = listening(listen, cluster["own"], {one["address"] for one in placed})
    assignment = HostAssignment(hosted, host, port, managed=True)
    gpus = _gpus(placed) if cuda else Gpus()
    least = min(int(bundles[role].get("CPU", 1)) for role in MODEL_ROLES if counts[role])
    chosen = replace(
        wishes,
        threads=wishes.threads or max(1, least),
        hosts=_shares(hosted, apart=cuda),
        expert_hosts=assignment.expert_hosts(),
        gpus=gpus if cuda else None,
    )
    numbered = (
        replace(one, device=one.device.replace(":0", f":{number}")) for number, one in enumerate(hosted)
    )
    return RayPlan(chosen, assignment, _least(placed), gpus, tuple(numbered))


def _counted(wishes: Wishes, hosts: int) -> Wishes:
    """One attention node and an expert node per host, where the user says nothing."""
    for key, value in (("attention", wishes.attention), ("experts", wishes.experts)):
        if value is not None:
            in_range(f"--{key}", value, 1, MOST_NODES)
    experts = None if wishes.colocated else wishes.experts or min(hosts, _MOST_EXPERTS)
    return replace(wishes, attention=wishes.attention or 1, experts=experts)


def _hosted(
    placed: Sequence[Mapping[str, Any]],
    counts: Mapping[Role, int],
    bundles: Mapping[Role, Mapping[str, float]],
) -> tuple[HostedNode, ...]:
    """A node sees the GPU that Ray gives it as the first one. Hosts are told apart by Ray's own names."""
    nodes = (NodeId(role, index) for role in MODEL_ROLES for index in range(counts[role]))
    by_name = {one["node"]: one for one in placed}
    return tuple(
        HostedNode(
            node, by_name[str(node)]["host"], False, "cuda:0" if bundles[node.role].get("GPU") else "cpu"
        )
        for node in nodes
    )


def _shares(hosted: Sequence[HostedNode], *, apart: bool) -> tuple[Share, ...]:
    """What shares one memory: the nodes of a host, or each node where it has a GPU."""
    if apart:
        return tuple(_share([one]) for one in hosted)
    hosts = dict.fromkeys(one.host for one in hosted)
    return tuple(_share([one for one in hosted if one.host == host]) for host in hosts)


def _share(nodes: Sequence[HostedNode]) -> Share:
    experts = sum(one.node.role is Role.EXPERT for one in nodes)
    return Share(len(nodes) - experts, experts, here=False)


def _least(placed: Sequence[Mapping[str, Any]]) -> Machine:
    found = [Machine(**one["machine"]) for one in placed]
    return Machine(
        min(one.cores for one in found),
        min(one.memory for one in found),
        min(one.memory_total for one in found),
        "the smallest of Ray's hosts",
    )


def _gpus(placed: Sequence[Mapping[str, Any]]) -> Gpus:
    each = [one["gpus"] for one in placed if one["gpus"] and one["gpus"]["names"]]
    if not each:
        hosts = ", ".join(sorted({one["name"] for one in placed}))
        raise ConfigError(f"--device cuda: torch finds no CUDA device on {hosts}; use --device cpu")
    names, free, total = ([one[key][0] for one in each] for key in ("names", "free", "total"))
    return Gpus(tuple(names), tuple(free), tuple(total))
