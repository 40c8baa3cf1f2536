"""Chooses the transport that carries rows between the nodes of a run, and says why. Values in, a choice out. What
carries KV blocks is asked for by name, and only checked here.

Between GPUs rows stay in device memory: in the other GPU's mailboxes where every GPU of this machine reaches the
others', else over NCCL. Rows pass through host memory, pinned at a GPU's end, where one end is on a CPU or where nodes
share a GPU: NCCL takes one process per GPU, and a kernel of `symm` that waits holds the others up; it works there when
it is asked for.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from afserve.comm.kv.carriers.table import lacking
from afserve.config import SOCKETS
from afserve.errors import ConfigError
from afserve.launch.plan.gpus import Gpus
from afserve.launch.plan.hosts import HostedNode
from afserve.member import MODEL_ROLES, Role


@dataclass(frozen=True, slots=True)
class Choice:
    kind: str
    reason: str


def choose_transport(
    asked: str, hosted: Sequence[HostedNode], gpus: Gpus, *, certified: bool = False
) -> Choice:
    """What `auto` stands for here. Raises ConfigError for one that cannot reach every node of this run.

    `certified`: what travels between hosts is to be encrypted, as only tcp is.
    """
    elsewhere = any(not one.here for one in hosted)
    if elsewhere and certified:
        if asked not in ("auto", "tcp", "pairs"):
            raise ConfigError(
                f"--transport {asked}: rows would travel between hosts in plain text, although there are --certs; "
                "use tcp, which encrypts them"
            )
        if asked == "auto":
            kind, where = _in_host_memory(hosted)
            return Choice(kind, f"{where}, over TLS")
    if asked == "auto":
        return _auto(hosted, gpus, elsewhere=elsewhere)
    if elsewhere and asked in ("shm", "symm"):
        raise ConfigError(f"--transport {asked}: reaches no other host; use tcp or dist")
    on_gpus = [one for one in hosted if one.device != "cpu"]
    if asked == "symm" and len(on_gpus) < len(hosted):
        raise ConfigError("--transport symm: is for nodes on GPUs; give --device cuda")
    if asked == "symm" and not gpus.reach:
        raise ConfigError(
            "--transport symm: these GPUs do not reach each other's memory (nvidia-smi topo -p2p r says which do); "
            "use shm or dist"
        )
    if asked == "dist" and on_gpus:
        _check_own(on_gpus)
    return Choice(asked, "as asked")


def check_kv_transport(asked: str, hosted: Sequence[HostedNode], *, certified: bool = False) -> None:
    """Raises ConfigError where no attention node on this host could move KV so: the library is missing, or what
    travels is to be encrypted."""
    if asked == SOCKETS:
        return
    if certified:
        raise ConfigError(
            f"--kv-transport {asked}: its library neither encrypts nor asks who reads, although there are --certs; "
            f"use {SOCKETS}"
        )
    here = any(one.here and one.node.role is Role.ATTENTION for one in hosted)
    if here and (why := lacking(asked)):
        raise ConfigError(f"--kv-transport {asked}: {why}")


def _auto(hosted: Sequence[HostedNode], gpus: Gpus, *, elsewhere: bool) -> Choice:
    host, where = _in_host_memory(hosted) if elsewhere else ("shm", "all nodes on this machine")
    on_gpus = [one for one in hosted if one.device != "cpu"]
    if not on_gpus:
        return Choice(host, where)
    if len(on_gpus) < len(hosted):
        return Choice(host, f"{where}, rows of GPUs through pinned host memory")
    shared = _most_shared(on_gpus)
    if shared is not None:
        device, nodes = shared
        return Choice(host, f"{where}, {nodes} nodes share {device}, rows through pinned host memory")
    if not elsewhere and gpus.reach:
        return Choice("symm", "GPUs that reach each other's memory")
    return Choice("dist", "between GPUs over NCCL")


def _in_host_memory(hosted: Sequence[HostedNode]) -> tuple[str, str]:
    """Over several hosts, and why."""
    machines = {
        role: {one.here or one.host for one in hosted if one.node.role is role} for role in MODEL_ROLES
    }
    if machines[Role.ATTENTION] & machines[Role.EXPERT]:
        return "pairs", "tcp between hosts, shared memory inside one"
    return "tcp", "between hosts"


def _check_own(hosted: Sequence[HostedNode]) -> None:
    shared = _most_shared(hosted)
    if shared is not None:
        device, nodes = shared
        raise ConfigError(
            f"--transport dist: needs a GPU for each node, but {nodes} nodes are on {device}; use shm or tcp, "
            "start fewer nodes, or give --device cuda where there are more GPUs"
        )


def _most_shared(hosted: Sequence[HostedNode]) -> tuple[str, int] | None:
    counts = Counter((one.here or one.host, one.device) for one in hosted)
    (_, device), nodes = counts.most_common(1)[0]
    return (device, nodes) if nodes > 1 else None
