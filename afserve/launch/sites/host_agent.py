"""`afserve host`: one process per host that starts the nodes which the controller wants here, and ends with the run.

It knows the controller's address and the token; what runs here comes from there. Processes are `LocalSite`, as on
the controller's own host. It decides nothing: a node that ends is reported, and started again when the membership says.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc

from afserve import __version__
from afserve.control.node.stream import Stream, Wire, reason_of
from afserve.control.wire.channel import read_token
from afserve.control.wire.hosts import (
    CARRY_METHOD,
    Attach,
    EndHost,
    FromHost,
    HostFailed,
    NodeExited,
    StartNode,
    ToHost,
    Welcome,
    decode_to_host,
    encode_host,
)
from afserve.errors import AfserveError, DeadlineError, PeerLost, RendezvousError
from afserve.launch.plan.footprint import gib
from afserve.launch.plan.gpus import Gpus, probe_gpus
from afserve.launch.plan.host_memory import free_on
from afserve.launch.plan.hosts import TOGETHER_SECONDS, own_addresses
from afserve.launch.processes.environment import forget_secrets
from afserve.launch.processes.streams import tolerate_lost_output
from afserve.launch.sites.local import LocalSite
from afserve.member import NodeId
from afserve.tls import CertifiedRole, check_exposed, opened, probe

log = logging.getLogger("afserve.host")
SAY_SECONDS = 5.0  # between two words about who is missing
_DIAL_SECONDS = 1.0
_END_SECONDS = 8.0  # for nodes that were told to stop by the controller
CARRYING: Wire[FromHost, ToHost] = Wire(CARRY_METHOD, "to_node", encode_host, lambda: decode_to_host)


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Where to join, and what the cluster file calls this host, where its addresses do not say it."""

    join: str
    token_file: Path
    called: str = ""
    certs: Path | None = None
    insecure: bool = False


def carry(settings: HostSettings) -> None:
    """Until the run ends. Raises what ended it otherwise, or kept this host from taking part."""
    tolerate_lost_output()
    check_exposed("--join", settings.join.rpartition(":")[0], settings.certs, settings.insecure)
    forget_secrets()
    with LocalSite(settings.token_file) as site:
        asyncio.run(HostAgent(settings, site).run())


class HostAgent:
    def __init__(self, settings: HostSettings, site: LocalSite) -> None:
        self._settings, self._site = settings, site
        self._certificates = opened(settings.certs)
        self._token = read_token(settings.token_file)
        self._inbox: asyncio.Queue[ToHost | Exception] = asyncio.Queue()
        self._stream: Stream[FromHost, ToHost] | None = None
        self._grace = 0.0
        self._stopped = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        watch = asyncio.create_task(self._site.watch_nodes(self._exited))
        try:
            await self._attach(TOGETHER_SECONDS)
            while not self._stopped:
                value = await self._inbox.get()
                if isinstance(value, EndHost):
                    return await self._end(value)
                await self._obey(value)
        finally:
            if self._stream is not None:
                self._stream.drop()
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _obey(self, value: ToHost | Exception) -> None:
        match value:
            case Welcome():
                self._grace = value.grace
                self._compare(value)
                await asyncio.to_thread(self._check_memory, value)
                log.warning("this host is %s; it carries %s", value.called, ", ".join(value.nodes))
            case StartNode():
                self._site.spawn(value.node, self._settings.join, certs=self._settings.certs)
            case PeerLost() if self._grace > 0:
                log.warning("%s; trying again for %.0f s", value.message, self._grace)
                await self._attach(self._grace)
            case Exception():
                raise value

    def _stop(self) -> None:
        self._stopped = True
        self._inbox.put_nowait(EndHost())

    # ---- the controller

    async def _attach(self, seconds: float) -> None:
        """Raises DeadlineError where no controller answers in time, and says every few seconds that it waits."""
        if self._stream is not None:
            self._stream.drop()
        until, said = time.monotonic() + seconds, time.monotonic()
        while not self._stopped:
            if self._certificates is not None:
                await asyncio.to_thread(
                    probe, self._settings.join, self._certificates, CertifiedRole.CONTROLLER
                )
            stream = self._new_stream()
            if await asyncio.to_thread(stream.wait_open, _DIAL_SECONDS):
                break
            stream.drop()
            now = time.monotonic()
            if now > until:
                raise DeadlineError(
                    f"no controller at {self._settings.join} after {seconds:.0f} s; is `afserve up` running there, "
                    f"{'with' if self._certificates else 'without'} --certs?"
                )
            if now - said >= SAY_SECONDS:
                said = now
                log.warning(
                    "waiting for `afserve up` at %s, %.0f s more", self._settings.join, max(0.0, until - now)
                )
        else:
            return
        self._stream = stream
        stream.send(
            Attach(
                socket.gethostname(),
                _routable(own_addresses()),
                self._settings.called,
                __version__,
                running=self._site.names(),
            )
        )
        stream.start()

    def _new_stream(self) -> Stream[FromHost, ToHost]:
        loop = asyncio.get_running_loop()

        def deliver(value: ToHost | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # this process is about to end
                loop.call_soon_threadsafe(self._inbox.put_nowait, value)

        def ended(error: grpc.RpcError | None) -> None:
            deliver(
                PeerLost("controller", "ended the stream")
                if error is None
                else reason_of(error, "controller")
            )

        return Stream(self._settings.join, self._token, CARRYING, deliver, ended, self._certificates)

    def _compare(self, welcome: Welcome) -> None:
        """Raises RendezvousError, and tells the controller, where this host has not the model that is served."""
        from afserve.families.table import load_spec

        folder = Path(welcome.model)
        try:
            mine = load_spec(folder).fingerprint()
        except (AfserveError, OSError) as error:
            self._fail("model", f"{folder}/config.json cannot be read here: {error}")
        if mine != welcome.fingerprint:
            self._fail(
                "model",
                f"{folder}/config.json describes another model here ({mine}) than at the controller "
                f"({welcome.fingerprint})",
            )

    def _check_memory(self, welcome: Welcome) -> None:
        """The same where less is free here than nodes take, as the cluster file's figures had them planned."""
        if self._site.names():  # a controller that is back: they have it already
            return
        taken: dict[str, int] = {}
        for device, size in zip(welcome.devices, welcome.takes, strict=True):
            taken[device] = taken.get(device, 0) + size
        gpus = probe_gpus() if taken.keys() - {"cpu"} else Gpus()
        for device, size in taken.items():
            free = free_on(device, gpus)
            if free < size:
                self._fail(
                    "memory",
                    f"nodes take {gib(size)} of {device} as they were planned, and {gib(free)} are free there; write "
                    f"memory_gb = {free / 1e9:.1f} for this host in the cluster file, or give --kv-tokens less",
                )

    def _fail(self, field: str, why: str) -> None:
        assert self._stream is not None
        self._stream.send(HostFailed(field, why))
        self._stream.close()
        raise RendezvousError(f"{field}: {why}")

    # ---- nodes

    def _exited(self, who: NodeId | str, reason: str) -> None:
        words = self._site.last_words(str(who))
        log.log(
            logging.INFO if reason.endswith("exit code 0") else logging.WARNING,
            "%s: %s%s",
            who,
            reason,
            f"; its last words:\n{words}" if words else "",
        )
        if not isinstance(who, NodeId):
            self._inbox.put_nowait(PeerLost(who, reason))
            self._grace = 0.0
        elif self._stream is not None:
            self._stream.send(NodeExited(who.role, who.index, reason))

    async def _end(self, value: EndHost) -> None:
        """Nodes were told by the controller; who has not gone by then is ended by `LocalSite`."""
        until = time.monotonic() + _END_SECONDS
        while not self._stopped and self._site.names() and time.monotonic() < until:
            await asyncio.sleep(0.05)
        if value.why:
            raise PeerLost("the run", value.why)


def _routable(addresses: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(a for a in addresses if a not in ("127.0.0.1", "::1")))
