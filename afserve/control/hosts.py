"""The hosts that carry nodes of a run beside the controller's own: who has come, and what each is told to start.

The membership says which node is to have a process; this passes it on to the node's host, or keeps it until that has
come. It starts nothing, counts no losses and decides nothing about nodes.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from afserve import __version__
from afserve.control.wire import channel
from afserve.control.wire.hosts import (
    CARRY,
    HOSTS,
    Attach,
    EndHost,
    HostFailed,
    NodeExited,
    StartNode,
    ToHost,
    Welcome,
    decode_from_host,
    encode_host,
)
from afserve.control.wire.values import PROTOCOL
from afserve.errors import AfserveError, ProtocolError, RendezvousError
from afserve.member import NodeId, Role
from afserve.tls import CertifiedRole

log = logging.getLogger("afserve.control")
_GRACE = 1.0  # between the last word to a host and the end of its stream


@dataclass(frozen=True, slots=True)
class HostPlace:
    """A host of the cluster file that is not the controller's: its name there, its addresses, the nodes it carries and
    the device of each."""

    name: str
    addresses: frozenset[str]
    nodes: tuple[NodeId, ...]
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Served:
    """What every host is told of the run, to compare with what is there. `takes`: bytes of a node, by role."""

    model: str
    fingerprint: str
    grace: float
    takes: Mapping[Role, int]


@dataclass(eq=False, slots=True)
class _Host:
    """One that has come. `over` is set with the reason why its stream is to end."""

    place: HostPlace
    outbox: "asyncio.Queue[bytes]" = field(default_factory=asyncio.Queue)

    def put(self, value: ToHost) -> None:
        self.outbox.put_nowait(encode_host(value))


class CarriedHosts:
    """`is_there(node)`: whether a member has this place already. `on_exit` and `on_failure` tell the controller."""

    def __init__(
        self,
        token: str,
        places: Sequence[HostPlace],
        served: Served,
        is_there: Callable[[NodeId], bool],
        on_exit: Callable[[NodeId, str], None],
        on_failure: Callable[[AfserveError], None],
    ) -> None:
        self._token, self._served = token, served
        self._places = {place.name: place for place in places}
        self._place_of = {node: place.name for place in places for node in place.nodes}
        self._is_there, self._on_exit, self._on_failure = is_there, on_exit, on_failure
        self._hosts: dict[str, _Host] = {}
        self._due: set[NodeId] = set()
        self._ended: str | None = None

    @property
    def handler(self) -> grpc.GenericRpcHandler:
        method = grpc.stream_stream_rpc_method_handler(self._carry)
        return grpc.method_handlers_generic_handler(HOSTS, {CARRY: method})

    def start(self, node: NodeId) -> None:
        """At once where its host is there, else when it comes."""
        host = self._hosts.get(self._place_of.get(node, ""))
        if host is None:
            self._due.add(node)
        else:
            host.put(StartNode(node.role, node.index))

    def carries(self, node: NodeId) -> bool:
        """Whether its host is there and would start it."""
        return self._place_of.get(node) in self._hosts

    def missing(self) -> dict[str, list[NodeId]]:
        """By host, the nodes that nobody has seen yet; hosts of which nothing is missing are left out."""
        found = {
            place.name: [node for node in place.nodes if not self._is_there(node)]
            for place in self._places.values()
        }
        return {name: nodes for name, nodes in found.items() if nodes}

    def has_come(self, name: str) -> bool:
        return name in self._hosts

    async def end(self, why: str = "") -> None:
        """Every host is told, and has a moment to hear it."""
        self._ended = why
        for host in self._hosts.values():
            host.put(EndHost(why))
        for _ in range(int(_GRACE / 0.02)):
            if all(host.outbox.empty() for host in self._hosts.values()):
                return
            await asyncio.sleep(0.02)

    # ---- one host

    async def _carry(self, requests: AsyncIterator[bytes], context: channel.Context) -> None:
        await channel.authenticate(context, self._token)
        host = await self._enter(requests, context)
        name = host.place.name
        writer = asyncio.create_task(channel.write(host.outbox, context))
        try:
            async for data in requests:
                self._hear(name, decode_from_host(data))
        except ProtocolError as error:
            log.warning("host %s: %s", name, error.message)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        finally:
            writer.cancel()
            if self._hosts.get(name) is host:
                del self._hosts[name]
                if self._ended is None:
                    log.warning("host %s has gone; its nodes are started again when it is back", name)

    async def _enter(self, requests: AsyncIterator[bytes], context: channel.Context) -> _Host:
        """Whoever is no host of this run, or is here already, is told so and logged."""
        try:
            first = decode_from_host(await anext(requests))
            if not isinstance(first, Attach):
                raise ProtocolError(f"a host says first which one it is; got {type(first).__name__}")
            place = self._place_for(first)
            for role in {CertifiedRole(node.role) for node in place.nodes}:
                await channel.certify(context, role)
        except StopAsyncIteration:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a host says first which one it is")
            raise
        except (ProtocolError, RendezvousError) as error:
            log.warning("%s was refused as a host: %s", context.peer(), error.message)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
            raise
        return self._welcome(_Host(place), first)

    def _place_for(self, attach: Attach) -> HostPlace:
        """Raises RendezvousError with the field that differs, and both values."""
        mine = {"version": __version__, "protocol": str(PROTOCOL)}
        theirs = {"version": attach.version, "protocol": str(attach.protocol)}
        for name, value in mine.items():
            if value != theirs[name]:
                raise RendezvousError(
                    f"host {attach.host}: {name} is {theirs[name]} there and {value} at the controller; install "
                    "the same afserve on both"
                )
        place = self._named(attach)
        if place.name in self._hosts:
            raise RendezvousError(
                f"host {attach.host}: {place.name} is connected already; one `afserve host` carries all of its nodes"
            )
        return place

    def _named(self, attach: Attach) -> HostPlace:
        names = ", ".join(self._places) or "none but the controller's own"
        if attach.called:
            if attach.called not in self._places:
                raise RendezvousError(
                    f"host {attach.host}: --as {attach.called}: the cluster file's other hosts are {names}"
                )
            return self._places[attach.called]
        found = [place for place in self._places.values() if place.addresses & frozenset(attach.addresses)]
        if len(found) != 1:
            raise RendezvousError(
                f"host {attach.host}: its addresses ({', '.join(attach.addresses)}) are those of "
                f"{'several hosts' if found else 'no host'} of the cluster file, whose others are {names}; say which "
                "it is with --as NAME"
            )
        return found[0]

    def _welcome(self, host: _Host, attach: Attach) -> _Host:
        """From here on it is told whatever is due."""
        place, served = host.place, self._served
        self._hosts[place.name] = host
        names = tuple(map(str, place.nodes))
        takes = tuple(served.takes[node.role] for node in place.nodes)
        told = served.model, served.fingerprint, served.grace
        host.put(Welcome(place.name, names, *told, place.devices, takes))
        log.info("host %s (%s) has come; it carries %s", place.name, attach.host, ", ".join(names))
        if self._ended is not None:
            host.put(EndHost(self._ended))
        for node in [node for node in sorted(self._due) if node in place.nodes]:
            self._due.discard(node)
            if not self._is_there(node) and str(node) not in attach.running:
                host.put(StartNode(node.role, node.index))
        return host

    def _hear(self, name: str, value: object) -> None:
        match value:
            case NodeExited() if self._place_of.get(value.node) == name:
                self._on_exit(value.node, value.reason)
            case HostFailed():
                self._on_failure(RendezvousError(f"host {name}: {value.field}: {value.why}"))
            case _:
                raise ProtocolError(f"a host does not say {type(value).__name__} now")
