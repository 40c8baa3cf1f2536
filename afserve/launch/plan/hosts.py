"""Assigns the nodes of a run to hosts: which are started here, and what to type on the other hosts.

It is computed from a cluster file and this machine's addresses. It starts nothing and opens nothing.
"""

import ipaddress
import shlex
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from afserve.control.hosts import HostPlace
from afserve.control.wire.desired import Deployment
from afserve.errors import ConfigError
from afserve.launch.plan.cluster import Cluster, Host
from afserve.launch.plan.gpus import Gpus
from afserve.launch.plan.wishes import Share
from afserve.member import MODEL_ROLES, NodeId, Role

LOOPBACK = "127.0.0.1"
TOGETHER_SECONDS = 300.0  # for people to start what is elsewhere
_COPY = "afserve.token"
_ROLE = {"attention": Role.ATTENTION, "experts": Role.EXPERT}
Resolve = Callable[[str], frozenset[str]]


@dataclass(frozen=True, slots=True)
class HostedNode:
    """One node's place."""

    node: NodeId
    host: str
    here: bool
    device: str


@dataclass(frozen=True, slots=True)
class HostAssignment:
    """All nodes of a run, each with its host and device.

    `listen` is where the controller takes nodes in; port 0 takes a free one. `managed`: the run's launcher reaches
    every host, so that nobody types anything anywhere. `awaited`: every node is started by others.
    """

    hosted: tuple[HostedNode, ...]
    listen: str = LOOPBACK
    port: int = 0
    unused: tuple[str, ...] = ()  # devices of this machine that no node is on
    managed: bool = False
    awaited: bool = False
    places: tuple[HostPlace, ...] = ()  # the hosts that are not this machine
    width: int = 1  # GPUs in a row that an attention node has

    @classmethod
    def all_here(cls, deployment: Deployment, gpus: Gpus) -> "HostAssignment":
        """Where the run's device is `cuda`, each node has a GPU of its own while there are enough, and each attention
        node as many in a row as it is to have, of which its own is the first."""
        device, width = deployment.engine.device, deployment.engine.tensor_parallel
        number, hosted = 0, list[HostedNode]()
        for node in (n for n in deployment.nodes if n.role in MODEL_ROLES):
            hosted.append(
                HostedNode(node, LOOPBACK, True, gpus.device(number) if device == "cuda" else device)
            )
            number += width if node.role is Role.ATTENTION else 1
        every = [gpus.device(n) for n in range(len(gpus))] if device == "cuda" else []
        return cls(tuple(hosted), unused=tuple(every[number:]), width=width)

    def having(self, node: NodeId) -> "HostAssignment":
        """The same with a place for this node, if it has none: here, on the device that the fewest nodes use.

        Where the launcher or others find the host, it has a device of its own, such as its role has.
        """
        if any(one.node == node for one in self.hosted):
            return self
        if self.managed or self.awaited:
            device = next((one.device for one in self.hosted if one.node.role is node.role), "cpu")
            return replace(self, hosted=(*self.hosted, HostedNode(node, "", False, device)))
        width = self.width if node.role is Role.ATTENTION else 1
        used = [one.device for one in self.here if width == 1 or one.node.role is node.role]
        free = self.unused[: max(0, 1 + len(self.unused) - width)]  # they are the last ones of the machine
        device = min(free or dict.fromkeys(used), key=used.count, default="cpu")
        taken = self.unused[self.unused.index(device) :][:width] if device in self.unused else ()
        hosted = (*self.hosted, HostedNode(node, LOOPBACK, True, device))
        return replace(self, hosted=hosted, unused=tuple(d for d in self.unused if d not in taken))

    def free_rows(self, taken: Iterable[NodeId], experts: int = 0) -> int:
        """How many more attention nodes would have GPUs of their own, beside those that are `taken` and so many more
        expert nodes: nodes with the lowest numbers come first, and places of those that went are theirs."""
        gone = {one.node for one in self.here}.difference(taken)
        empty = sum(node.role is Role.ATTENTION for node in gone)
        ahead = max(0, experts - (len(gone) - empty))
        return empty + max(0, len(self.unused) - ahead) // self.width

    def instead(self, node: NodeId, of: NodeId) -> "HostAssignment":
        """The same with this node on the host and device of one that has gone."""
        before = next((one for one in self.hosted if one.node == of), None)
        if before is None:
            return self
        hosted = (one for one in self.hosted if one.node not in (of, node))
        return replace(self, hosted=(*hosted, replace(before, node=node)))

    @property
    def here(self) -> list[HostedNode]:
        return [one for one in self.hosted if one.here]

    @property
    def elsewhere(self) -> list[HostedNode]:
        return [one for one in self.hosted if not one.here]

    @property
    def devices(self) -> dict[NodeId, str]:
        return {one.node: one.device for one in self.hosted}

    def starts(self, node: NodeId) -> bool:
        """Whether this run's launcher starts it."""
        return self.managed or any(one.here for one in self.hosted if one.node == node)

    def node_counts(self) -> tuple[Share, ...]:
        """How many nodes of each role are on each host. All addresses of this machine are one host."""
        counts: dict[str, list[int]] = {}
        for one in self.hosted:
            count = counts.setdefault("" if one.here else one.host, [0, 0])
            count[one.node.role is Role.EXPERT] += 1
        return tuple(Share(a, e, here=not host) for host, (a, e) in counts.items())

    def expert_hosts(self) -> tuple[int, ...]:
        """The number of each expert node's host, in the order of the nodes."""
        experts = [one for one in self.hosted if one.node.role is Role.EXPERT]
        experts.sort(key=lambda one: one.node.index)
        names = ["" if one.here else one.host for one in experts]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return tuple(numbers[name] for name in names)

    def commands(self, join: str, token: Path, certs: Path | None = None) -> list[str]:
        """What to type so that the nodes elsewhere join: for each host the token's copy here, then one line there."""
        lines: list[str] = []
        for host in (place.name for place in self.places):
            at = f"[{host}]" if ":" in host else host
            lines.append(f"here:  scp -p {shlex.quote(str(token))} {at}:{_COPY}")
            lines.append(f"{host}:  {host_command(join, _COPY, certs)}")
        return lines


def host_command(join: str, token: str, certs: Path | None) -> str:
    """One line for a shell, there. `token` is written as the shell is to read it."""
    trust = "--insecure-nodes" if certs is None else f"--certs {shlex.quote(str(certs))}"
    return f"afserve host --join {join} --token-file {token} {trust}"


def listening(asked: str | None, own: str, addresses: set[str]) -> tuple[str, int]:
    """Where nodes join: on loopback where all of Ray is this machine, else the address that Ray knows it by."""
    if asked is not None:
        host, colon, port = asked.rpartition(":")
        return (host.strip("[]"), int(port)) if colon and port.isdecimal() else (asked, 0)
    return (LOOPBACK if addresses == {own} else own), 0


def check_join(address: str) -> None:
    """Raises ConfigError for what is not HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--join {address}: is not HOST:PORT")


def assign(cluster: Cluster, listen: str | None, resolve: Resolve, own: Iterable[str]) -> HostAssignment:
    """Raises ConfigError where a host is unknown or nobody could reach this one."""
    mine = {
        address: _is_own(cluster, address, resolve, own) for address in {h.address for h in cluster.hosts}
    }
    hosted = tuple(_hosted(cluster.hosts, mine))
    if all(mine.values()):
        if listen is not None:
            raise ConfigError(
                f"--listen {listen}: every host of {cluster.file} is this machine, no other joins; drop it"
            )
        return HostAssignment(hosted)
    places = _places(hosted, resolve)
    if listen is not None:
        host, port = _address(listen)
        _check_listen(listen, host, resolve, own)
        return HostAssignment(hosted, host, port, places=places)
    reachable = (h.address for h in cluster.hosts if mine[h.address] and not _loopback(resolve(h.address)))
    found = next(reachable, None)
    if found is None:
        raise ConfigError(
            f"--cluster {cluster.file}: no host in it is this machine at an address others can reach; say where to "
            "listen for them with --listen ADDRESS"
        )
    return HostAssignment(hosted, found, places=places)


def _places(hosted: Iterable[HostedNode], resolve: Resolve) -> tuple[HostPlace, ...]:
    """Hosts that are not this machine, each once, in the file's order."""
    found: dict[str, list[HostedNode]] = {}
    for one in hosted:
        if not one.here:
            found.setdefault(one.host, []).append(one)
    return tuple(
        HostPlace(name, resolve(name), tuple(o.node for o in there), tuple(o.device for o in there))
        for name, there in found.items()
    )


def _check_listen(listen: str, host: str, resolve: Resolve, own: Iterable[str]) -> None:
    try:
        found = resolve(host)
    except OSError as error:
        raise ConfigError(f"--listen {listen}: cannot be looked up: {error.strerror}") from error
    if _loopback(found):
        raise ConfigError(f"--listen {listen}: other hosts cannot reach it; give another address")
    if not found & frozenset(own):
        raise ConfigError(f"--listen {listen}: not an address of this machine ({', '.join(sorted(own))})")


def _hosted(hosts: Iterable[Host], mine: dict[str, bool]) -> Iterable[HostedNode]:
    """In the file's order; each host's CUDA devices are numbered through, whatever their role."""
    used: dict[str, int] = {}
    placed: dict[Role, int] = {}
    for host in hosts:
        machine = "" if mine[host.address] else host.address
        for _ in range(host.devices):
            role = _ROLE[host.role]
            index, device = placed.get(role, 0), used.get(machine, 0)
            placed[role] = index + 1
            used[machine] = device + (not host.on_cpu)
            name = "cpu" if host.on_cpu else f"cuda:{device}"
            yield HostedNode(NodeId(role, index), host.address, mine[host.address], name)


def _is_own(cluster: Cluster, address: str, resolve: Resolve, own: Iterable[str]) -> bool:
    try:
        found = resolve(address)
    except OSError as error:
        raise ConfigError(
            f"--cluster {cluster.file}: host {address}: cannot be looked up: {error.strerror}; write its IP address"
        ) from error
    return bool(found & frozenset(own)) or _loopback(found)


def _loopback(addresses: frozenset[str]) -> bool:
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def _address(text: str) -> tuple[str, int]:
    """ADDRESS, ADDRESS:PORT or [IPV6]:PORT."""
    try:
        return str(ipaddress.ip_address(text)), 0
    except ValueError:
        pass
    host, colon, port = text.rpartition(":")
    if not colon:
        return text, 0
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--listen {text}: is not ADDRESS or ADDRESS:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def look_up(name: str) -> frozenset[str]:
    """The IP addresses of a name. Raises OSError."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return frozenset(str(entry[4][0]).partition("%")[0] for entry in found)


def own_addresses() -> frozenset[str]:
    families = (socket.AF_INET, socket.AF_INET6)
    found = (entry for entries in psutil.net_if_addrs().values() for entry in entries)
    return frozenset(entry.address.partition("%")[0] for entry in found if entry.family in families)
