"""The controller: the one that knows the members, what each is doing, and when one of them is lost.

Nodes open a stream to it; it hands out assignments, passes requests on and puts their events into lanes. It
lives in the gateway's event loop, imports no torch, and starts no process: whoever did reports their exits.
"""

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import TypeAlias

import grpc
import grpc.aio

from afserve import __version__
from afserve.clock import Clock
from afserve.config import FULL
from afserve.control.wire import channel
from afserve.control.wire import messages
from afserve.control.membership.balancing import BalanceRules, Balancing
from afserve.control.identifying import OwnCopy
from afserve.control.lanes import Lanes
from afserve.control.members import DRAINED, DRAINING, GONE, LOADING, READY, Member, Members
from afserve.control.migration import Crew, Outgoing
from afserve.control.wire.values import (
    Adopted,
    Assigned,
    Drain,
    Drained,
    Endpoint,
    Failed,
    Filled,
    FromNode,
    Heartbeat,
    Identity,
    Peers,
    Progress,
    Ready,
    Refused,
    Register,
    Routed,
    Run,
    Shutdown,
    Tokens,
    ToNode,
)
from afserve.errors import (
    AfserveError,
    ConfigError,
    DeadlineError,
    DoesNotFitError,
    PeerError,
    PeerLost,
    ProtocolError,
    RendezvousError,
    UserError,
)
from afserve.models.identity import is_full
from afserve.placement.placement import Placement

log = logging.getLogger("afserve.control")

REGISTER_SECONDS = 60.0  # from the start until every node has registered
SILENCE_SECONDS = 15.0  # between two signs of life of one node, while this process was running
STALL_SECONDS = 600.0  # between two steps of progress while loading
_TICK = 0.5
EXIT_REPORT_SECONDS = 2.0  # how long a broken stream waits for the reason from whoever started the process
_GRACE = 1.0

Context: TypeAlias = grpc.aio.ServicerContext


class Controller:
    """`start()` listens; `wait_ready()` returns when everyone serves or raises why not; `stop()` ends it."""

    def __init__(
        self, run: Run, token: str, lanes: Lanes, clock: Clock, rules: BalanceRules | None = None
    ) -> None:
        self.run = run
        self.members = Members(run, __version__)
        self.balancing = Balancing(
            run.source.name,
            Placement.from_json(run.placement),
            Crew(run.attention_nodes, run.expert_nodes),
            rules or BalanceRules(),
        )
        self.on_progress: Callable[[Member], None] = lambda member: None
        self.devices: Mapping[str, str] = {}  # node name -> device, where it is not the run's
        self.register_seconds = REGISTER_SECONDS
        self.own: OwnCopy | None = None  # of the checkpoint; None compares the nodes with one another only
        self._token = token
        self._lanes = lanes
        self._clock = clock
        self._failure: AfserveError | None = None
        self._failed = asyncio.Event()
        self._settled = asyncio.Event()
        self._drained = asyncio.Event()
        self._accusers: set[str] = set()
        self._stopping = False
        self._started_at = clock.now()
        self._server: grpc.aio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- life

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen, by default on loopback only, and return the address that nodes join."""
        self._server = grpc.aio.server(options=channel.options(receive="from_node"))
        handler = grpc.stream_stream_rpc_method_handler(self._join)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(channel.SERVICE, {channel.JOIN: handler}),)
        )
        where = f"[{host}]" if ":" in host else host
        try:
            bound = self._server.add_insecure_port(f"{where}:{port}")
        except RuntimeError as error:
            raise ConfigError(f"cannot listen for nodes on {where}:{port}; is the port taken?") from error
        await self._server.start()
        self._started_at = self._clock.now()
        self._spawn(self._watch())
        self._compare_own(full=self.run.verify == FULL)
        return f"{where}:{bound}"

    @property
    def epoch(self) -> int:
        """Of the placement in force."""
        return self.balancing.migration.placement.epoch

    @property
    def ready(self) -> bool:
        return self._failure is None and not self._stopping and self._all_here

    def check(self) -> None:
        """Raises what ended the run, if anything did."""
        if self._failure is not None:
            raise self._failure

    async def wait_ready(self) -> None:
        await self._settled.wait()
        self.check()

    async def wait_failure(self) -> AfserveError:
        """Returns when the run cannot go on, with the reason."""
        await self._failed.wait()
        assert self._failure is not None
        return self._failure

    async def drain(self, seconds: float) -> bool:
        """Let running requests finish for at most `seconds`. True when all did."""
        for member in self.members.of("attention"):
            if member.alive:
                member.state = DRAINING
                self._put(member, Drain())
        try:
            await asyncio.wait_for(self._drained.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        self._stopping = True
        for member in self.members:
            self._put(member, Shutdown())
        await asyncio.sleep(0)  # lets the writers pick the message up before the server closes
        if self._server is not None:
            await self._server.stop(_GRACE)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- what others tell it

    def send(self, role: str, index: int, value: ToNode) -> None:
        """To one node. Silently nothing when that node is gone: its requests were answered when it went."""
        member = self.members.get(role, index)
        if member is not None and member.alive:
            self._put(member, value)

    def apply(self, placement: Placement) -> None:
        """Go to this placement while serving. Raises ConfigError where it does not fit the run."""
        self.check()
        self._tell(self.balancing.apply(placement, self._clock.now()))

    def _tell(self, outgoing: list[Outgoing]) -> None:
        for role, index, value in outgoing:
            self.send(role, index, value)

    def report_exit(self, name: str, reason: str) -> None:
        """The process of `name` ended, as its parent saw it."""
        if not self._stopping and name not in self._accusers:
            self._fail(PeerLost(name, reason))

    # ---- one stream

    async def _join(self, requests: AsyncIterator[bytes], context: Context) -> None:
        await self._authenticate(context)
        member = await self._admit(requests, context)
        writer = asyncio.create_task(_write(member, context))
        try:
            async for data in requests:
                self._handle(member, messages.decode_from_node(data))
            self._lose(member, "its control stream ended")
        except ProtocolError as error:
            self._lose(member, error.message)
        except RendezvousError as error:
            self._fail(error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        finally:
            writer.cancel()
            self._lose(member, "its control stream broke")

    async def _authenticate(self, context: Context) -> None:
        given = dict(context.invocation_metadata() or ()).get(channel.TOKEN_KEY, "")
        if not hmac.compare_digest(str(given).encode(), f"Bearer {self._token}".encode()):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "the token is not this run's; pass the controller's --token-file",
            )

    async def _admit(self, requests: AsyncIterator[bytes], context: Context) -> Member:
        try:
            first = messages.decode_from_node(await anext(requests))
            if not isinstance(first, Register):
                raise RendezvousError(f"a node registers first; got {type(first).__name__}")
            member = self.members.admit(first, self._clock.now())
        except (RendezvousError, ProtocolError) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
            raise
        self._put(member, Assigned(member.role, member.index, self._run_of(member)))
        return member

    def _run_of(self, member: Member) -> Run:
        """The run, on that node's own device."""
        engine = self.run.engine
        device = self.devices.get(member.name, engine.device)
        return (
            self.run if device == engine.device else replace(self.run, engine=replace(engine, device=device))
        )

    def _put(self, member: Member, value: ToNode) -> None:
        """Encoded here, so that what cannot be encoded fails its sender and not the stream."""
        member.outbox.put_nowait(messages.encode_to_node(value))

    # ---- what nodes say

    def _handle(self, member: Member, value: FromNode) -> None:
        member.seen_at = self._clock.now()
        match value:
            case Tokens(events):
                self._lanes.deliver(events)
            case Heartbeat(resident, stats):
                member.resident_bytes, member.stats = resident, stats
            case Routed(rows):
                self.balancing.heard(rows, member.seen_at)
            case Filled(epoch):
                self._tell(self.balancing.migration.filled(member.index, epoch, member.seen_at))
            case Adopted(epoch):
                self._tell(self.balancing.migration.adopted(member.index, epoch, member.seen_at))
            case Refused(number, error):
                self._lanes.refuse(number, error)
            case Progress():
                member.progress, member.progress_at = value, member.seen_at
                self.on_progress(member)
            case Endpoint():
                self._meet(member, value)
            case Identity(things):
                self.members.identify(member, things)
                self._compare_own(full=is_full(things))
            case Ready(resident):
                self._is_ready(member, resident)
            case Drained():
                self._has_drained(member)
            case Failed(error):
                self._has_failed(member, error)
            case Register():
                raise ProtocolError(f"{member.name} registered twice")

    def _meet(self, member: Member, endpoint: Endpoint) -> None:
        self.members.agree(member, endpoint)
        addresses = self.members.addresses()
        if addresses is None:
            return
        told = self.members.of("attention") if member.role == "expert" else [member]
        for attention in told:
            if attention.address is not None:
                self._put(attention, Peers(addresses))

    def _compare_own(self, full: bool) -> None:
        if self.own is not None and self.own.due(full):
            self._spawn(self._expect_own(self.own.compare(full)))

    async def _expect_own(self, compared: Coroutine[None, None, None]) -> None:
        try:
            await compared
        except AfserveError as error:
            self._fail(error)
        self._settle()

    @property
    def _all_here(self) -> bool:
        return self.members.all_ready and not (self.own is not None and self.own.busy)

    def _settle(self) -> None:
        if self._all_here:
            self._settled.set()

    def _is_ready(self, member: Member, resident: int) -> None:
        self.members.check_identified(member)
        member.state, member.resident_bytes = READY, resident
        member.progress = Progress(1.0, "ready")
        self.on_progress(member)
        self._settle()

    def _has_drained(self, member: Member) -> None:
        member.state = DRAINED
        if all(other.state in (DRAINED, GONE) for other in self.members.of("attention")):
            self._drained.set()

    # ---- losing one

    def _lose(self, member: Member, reason: str) -> None:
        if member.alive:
            member.state = GONE
            if not self._stopping and self._failure is None:
                self._spawn(self._fail_unless_reported(member.name, reason))

    def _has_failed(self, member: Member, error: AfserveError) -> None:
        """A node that gave up because of another one: the other one's end is the reason, if it is reported soon."""
        if isinstance(error, PeerError):
            self._accusers.add(member.name)
            self._spawn(self._fail_unless_reported(member.name, error.message))
        else:
            self._fail(_named(member.name, error))

    async def _fail_unless_reported(self, name: str, reason: str) -> None:
        await asyncio.sleep(EXIT_REPORT_SECONDS)
        if not self._stopping:
            self._fail(PeerLost(name, reason))

    def _fail(self, error: AfserveError) -> None:
        """The first reason counts; every open request is answered with it."""
        if self._failure is not None or self._stopping:
            return
        self._failure = error
        self._settled.set()
        self._drained.set()
        self._lanes.fail_all(error)
        self._failed.set()

    async def _watch(self) -> None:
        while self._failure is None:
            await asyncio.sleep(_TICK)
            now = self._clock.now()
            if self.members.missing() and now - self._started_at > self.register_seconds:
                self._fail(DeadlineError(_late(self.members.unready(), self.register_seconds)))
            for member in self.members:
                self._check_life(member, now)
            self._check_own(now)
            if self.ready:
                await self._balance(now)

    def _check_own(self, now: float) -> None:
        try:
            if self.own is not None:
                self.own.check(now)
        except DeadlineError as error:
            self._fail(error)

    async def _balance(self, now: float) -> None:
        """Tokens of all requests pass this event loop: the thinking is done beside it."""
        try:
            stats = self.balancing.age(now)
            if stats is not None:
                decision = await asyncio.to_thread(self.balancing.think, stats, now)
                self._tell(self.balancing.act_on(decision, now))
        except AfserveError as error:
            self._fail(error)

    def _check_life(self, member: Member, now: float) -> None:
        if not member.alive:
            return
        if now - member.seen_at > SILENCE_SECONDS:
            self._fail(PeerLost(member.name, f"silent for {now - member.seen_at:.0f} s (pid {member.pid})"))
        elif member.state == LOADING and now - member.progress_at > STALL_SECONDS:
            self._fail(DeadlineError(_late(self.members.unready(), STALL_SECONDS)))

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        """A bug in a background task ends the run instead of leaving it unwatched."""
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            log.error("the controller failed", exc_info=bug)
            self._fail(AfserveError(f"controller: {type(bug).__name__}: {bug}"))


async def _write(member: Member, context: Context) -> None:
    while True:
        await context.write(await member.outbox.get())


def _late(unready: list[str], seconds: float) -> str:
    return f"not ready after {seconds:.0f} s: {'; '.join(unready)}"


def _named(name: str, error: AfserveError) -> AfserveError:
    """The node's own error where the user can act on it, else the loss of the node with its reason."""
    if isinstance(error, UserError | DoesNotFitError):
        return type(error)(f"{name}: {error.message}", param=error.param)
    return PeerLost(name, error.message)
