"""What every rendered file says of a run, whatever the scheduler: from a cluster file to nodes, devices and flags.

Values only. Addresses of a cluster file are not looked at: a site's scheduler finds the hosts.
"""

from dataclasses import dataclass

from afserve.errors import ConfigError
from afserve.launch.plan.cluster import Cluster
from afserve.launch.plan.host_memory import bytes_of_gpu
from afserve.member import Role

NODES_PORT, HTTP_PORT = 7700, 8000
_ROLE = {Role.ATTENTION: "attention", Role.EXPERT: "experts"}  # as a cluster file calls them


@dataclass(frozen=True, slots=True)
class NodePool:
    """The nodes of a role: `nodes` on `hosts` machines of one kind, at most `per_host` on one."""

    role: Role
    nodes: int
    hosts: int
    per_host: int
    hardware: str
    on_cpu: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a node takes: cores, and GiB of memory of its host or, on a GPU, beside the GPU's."""

    cpus: int = 4
    memory: int = 16


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """A run as schedulers see it. `certs`: nodes speak TLS; without, they are told that plain text is meant."""

    cluster: Cluster
    pools: tuple[NodePool, ...]
    sizes: Sizes
    certs: bool = True
    extra: tuple[str, ...] = ()  # further arguments of `afserve up`

    @property
    def model(self) -> str:
        return self.cluster.model

    @property
    def mixed(self) -> bool:
        return len({pool.hardware for pool in self.pools}) > 1

    def up(self, listen: str, *trust: str) -> list[str]:
        """The arguments of the one process that knows the nodes, which others start."""
        return ["up", "--elsewhere", "--listen", listen, *self.counts(), *trust, *self.extra]

    def counts(self) -> list[str]:
        """What a cluster file says, as flags, and the sizes of a node."""
        cluster = self.cluster
        experts = ["--experts", str(cluster.experts)] if cluster.experts else ["--colocated"]
        attention = ["--attention", str(cluster.attention)]
        if cluster.prefill is not None:
            attention = ["--prefill", str(cluster.prefill), "--decode", str(cluster.decode_nodes)]
        if cluster.prefill_tokens is not None:
            attention += ["--prefill-tokens", str(cluster.prefill_tokens)]
        if cluster.prompt_share is not None:
            experts += ["--prompt-share", str(cluster.prompt_share)]
        words = ["--model", cluster.model, *attention, *experts]
        words += ["--micro-batches", str(cluster.micro_batches), "--threads", str(self.sizes.cpus)]
        if cluster.device == "cpu":
            return words
        least = min(bytes_of_gpu(cluster, host)[0] for host in cluster.hosts if not host.on_cpu)
        return [*words, "--device", "cuda", "--node-memory", f"{least / (1 << 30):.1f}"]


def layout_of(
    cluster: Cluster, sizes: Sizes, *, certs: bool = True, extra: tuple[str, ...] = ()
) -> ClusterLayout:
    """Raises ConfigError where a role has hosts of several kinds."""
    pools = tuple(pool for role in _ROLE if (pool := _pool(cluster, role)) is not None)
    return ClusterLayout(cluster, pools, sizes, certs, extra)


def _pool(cluster: Cluster, role: Role) -> NodePool | None:
    hosts = [host for host in cluster.hosts if host.role == _ROLE[role]]
    if not hosts:
        return None
    kinds = sorted({host.hardware for host in hosts})
    if len(kinds) > 1:
        raise ConfigError(
            f"{cluster.file}: the {_ROLE[role]} hosts are of several kinds ({', '.join(kinds)}); a rendered file has "
            "one kind for each role",
            param="cluster",
        )
    devices = [host.devices for host in hosts]
    return NodePool(role, sum(devices), len(hosts), max(devices), kinds[0], hosts[0].on_cpu)
