"""Nodes that are all started by others as a site (`--elsewhere`): by Kubernetes, Slurm (`afserve render` writes their
files), or people. Nobody here starts one, now or later: whoever comes with the run's token takes a free place, and so
does whoever comes after a loss.
"""

from dataclasses import replace
from pathlib import Path

from afserve.errors import ConfigError
from afserve.launch.plan.gpus import Gpus
from afserve.launch.plan.hosts import HostAssignment, HostedNode, listening
from afserve.launch.plan.machine import Machine, this_machine
from afserve.launch.plan.wishes import RunSettings, Share, UpFlags, Wishes
from afserve.launch.sites.local import LocalSite
from afserve.launch.sites.survey import Survey, check_elsewhere, find_asked
from afserve.member import MODEL_ROLES, NodeId, Role

_GIB = 1 << 30


class AwaitedSite(LocalSite):
    """This machine has the controller; its keeper keeps the run's token and folder."""

    def __init__(self, token: Path | None) -> None:
        super().__init__(token, warm=False)

    def survey(self, flags: UpFlags) -> Survey:
        if flags.run.cluster is not None or flags.run.ssh:
            raise ConfigError("--elsewhere: starts no node of a --cluster FILE; drop one of them")
        found = find_asked(flags.run, self.folder)
        wishes, assignment, machine, gpus = awaiting(flags.run, flags.wishes, this_machine())
        check_elsewhere(flags, assignment, found, self.folder)
        return Survey(replace(flags, wishes=wishes), found, machine, gpus, assignment, assignment.hosted)


def awaiting(
    run: RunSettings, wishes: Wishes, machine: Machine
) -> tuple[Wishes, HostAssignment, Machine, Gpus]:
    """Who is awaited, and what each of them has; `machine` stands for a node where the user says nothing of it."""
    if run.listen is None:
        raise ConfigError("--elsewhere: say where the nodes join, with --listen ADDRESS:PORT")
    if wishes.attention is None or (wishes.experts is None and not wishes.colocated):
        raise ConfigError(
            "--elsewhere: say how many nodes will come, with --attention A and --experts F or --colocated"
        )
    if wishes.gateways:
        raise ConfigError(
            "--gateways: gateways that run elsewhere join when they like, in any number; drop it with --elsewhere"
        )
    cuda = wishes.engine.device != "cpu"
    counts = {Role.ATTENTION: wishes.attention, Role.EXPERT: wishes.experts or 0}
    hosted = tuple(
        HostedNode(NodeId(role, index), f"{role}-{index}", False, "cuda:0" if cuda else "cpu")
        for role in MODEL_ROLES
        for index in range(counts[role])
    )
    machine = _of_a_node(run, machine)
    n = len(hosted)
    gpus = Gpus(("elsewhere",) * n, (machine.memory,) * n, (machine.memory_total,) * n)
    host, port = listening(run.listen, "", set())
    shares = tuple(
        Share(int(one.node.role is Role.ATTENTION), int(one.node.role is Role.EXPERT), here=False)
        for one in hosted
    )
    assignment = HostAssignment(hosted, host, port, awaited=True)
    chosen = replace(wishes, hosts=shares, gpus=gpus if cuda else None)
    return chosen, assignment, machine, gpus if cuda else Gpus()


def _of_a_node(run: RunSettings, machine: Machine) -> Machine:
    if run.node_memory is None:
        return machine
    size = int(run.node_memory * _GIB)
    return Machine(machine.cores, size, size, "--node-memory")
