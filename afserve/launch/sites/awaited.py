"""Nodes that are all started by others as a site (`--elsewhere`): by Kubernetes, Slurm (`afserve render` writes their
files), or people. Nobody here starts one, now or later: whoever comes with the run's token takes a free place, and so
does whoever comes after a loss. With `--nodes-from` their scheduler is told how many there are to be.
"""

from dataclasses import replace
from pathlib import Path

from afserve.control.controller import Controller
from afserve.errors import ConfigError
from afserve.launch.plan.gpus import Gpus
from afserve.launch.plan.hosts import HostAssignment, HostedNode, listening
from afserve.launch.plan.machine import Machine, this_machine
from afserve.launch.plan.wishes import RunSettings, Share, UpFlags, Wishes
from afserve.launch.providers.kubernetes import KubernetesNodes
from afserve.launch.providers.provider import NodeProvider, bring
from afserve.launch.providers.slurm import SlurmNodes
from afserve.launch.sites.local import LocalSite
from afserve.launch.sites.survey import Survey, check_elsewhere, find_asked
from afserve.member import MODEL_ROLES, NodeId, Role

_GIB = 1 << 30


class AwaitedSite(LocalSite):
    """This machine has the controller; its keeper keeps the run's token and folder. A scheduler is asked for nodes
    where the user says which one."""

    def __init__(self, token: Path | None, run: RunSettings) -> None:
        """Raises ConfigError where that scheduler cannot be asked from here."""
        super().__init__(token, warm=False)
        self._provider = _provider_of(run)

    async def bring(self, controller: Controller) -> None:
        if self._provider is not None:
            await bring(self._provider, controller)

    def survey(self, flags: UpFlags) -> Survey:
        if flags.run.cluster is not None or flags.run.ssh:
            raise ConfigError("--elsewhere: starts no node of a --cluster FILE; drop one of them")
        found = find_asked(flags.run, self.folder)
        wishes, assignment, machine, gpus = awaiting(flags.run, flags.wishes, this_machine())
        check_elsewhere(flags, assignment, found, self.folder)
        return Survey(replace(flags, wishes=wishes), found, machine, gpus, assignment, assignment.hosted)


def _provider_of(run: RunSettings) -> NodeProvider | None:
    if run.nodes_from == "kubernetes":
        return KubernetesNodes()
    if run.nodes_from is None:
        return None
    if run.token_file is None:
        raise ConfigError("--nodes-from slurm: needs --token-file FILE in a folder that every host sees")
    trust = ["--certs", str(run.certs.resolve())] if run.certs else ["--insecure-nodes"]
    return SlurmNodes(run.slurm_options, run.token_file.resolve(), trust)


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
    said = () if run.node_memory is None else (machine.memory, f"{run.node_memory:g} GiB (--node-memory)")
    shares = tuple(
        Share(int(one.node.role is Role.ATTENTION), int(one.node.role is Role.EXPERT), False, *said)
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
