"""The controller: the one place where the membership's effects become deeds.

What nodes say (`streams`) goes into `membership`, which decides; this file keeps time and holds what others wait for.
It lives in the gateway's event loop, imports no torch, and starts no process: whoever does gives it `on_start`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path

import grpc
import grpc.aio

from afserve import __version__
from afserve.adviser import Adviser
from afserve.clock import Clock
from afserve.config import FULL
from afserve.control.attention_news import AttentionNews
from afserve.control.identifying import OwnCopy
from afserve.control.incidents import Incidents
from afserve.control.membership.balancing import BalanceRules, Balancing
from afserve.control.membership.events import (
    Admit,
    AllDrained,
    Begun,
    Dismiss,
    DrainAll,
    Effect,
    EndRun,
    Event,
    Exited,
    Incident,
    Known,
    Place,
    Refuse,
    Replan,
    Said,
    Settled,
    Start,
    TakenOver,
    Tell,
    Ticked,
    Waited,
)
from afserve.control.membership.joining import Assign, same_everywhere
from afserve.control.membership.members import Members
from afserve.control.membership.membership import Membership
from afserve.control.membership.recovery import Rules
from afserve.control.membership.roster import Member
from afserve.control.membership.silence import HostLoad
from afserve.control.recordings import Recordings
from afserve.control.streams import NodeStreams
from afserve.control.traces import TraceFiles
from afserve.control.wire.desired import Deployment
from afserve.control.wire.values import (
    AttentionNodes,
    FromNode,
    Heartbeat,
    Identity,
    Noted,
    Progress,
    Query,
    QueryAnswer,
    Ready,
    Recorded,
    Routed,
    Serve,
    Shutdown,
    ToNode,
    Traced,
    Unheard,
)
from afserve.engine.stats import AttentionStats
from afserve.errors import AfserveError, ConfigError, DeadlineError, PeerLost, ProtocolError, UserError
from afserve.member import MODEL_ROLES, AttentionPhase, Life, NodeId, Role
from afserve.models.identity import is_full
from afserve.placement.placement import Placement
from afserve.tls import Certificates

log = logging.getLogger("afserve.control")

Wanted = Callable[[Mapping[Role, int], Mapping[int, AttentionPhase]], None]
UNANSWERED = "the controller could not answer; its log says why"
TICK = 0.25  # seconds between two looks at the time


class Controller:
    """`start()` listens; `wait_ready()` returns when everyone serves or raises why not; `stop()` ends it."""

    def __init__(
        self,
        deployment: Deployment,
        token: str,
        clock: Clock,
        balance: BalanceRules | None = None,
        rules: Rules | None = None,
        assign: Assign = same_everywhere,
        life: int = 0,
        watch: Callable[[], HostLoad] = HostLoad,
    ) -> None:
        """`life` counts the controllers of a run: a later one begins with the nodes that are there. `watch` is asked
        TICK seconds apart what is known of this process and its host."""
        self._life, self._load = life, watch
        self.incidents = Incidents()
        self.recordings = Recordings(self._tell)
        self._traces = TraceFiles(Path(deployment.trace_folder)) if deployment.trace_sent else None
        spare = 1 if balance is not None and balance.act else 0
        self.membership = Membership(deployment, __version__, rules, assign, spare, life)
        self.balancing = Balancing(
            deployment.source.name,
            self.membership.migration,
            balance or BalanceRules(),
            self.membership.state.holders,
        )
        # What only advises: an exception there must not end serving.
        self._balance_advice = Adviser("balancing experts")
        self._placing_advice = Adviser("finding places for experts")
        self._counts_advice = Adviser("counting where rows go", ProtocolError)
        self._story_advice = Adviser("telling what happened")
        self._progress_advice = Adviser("showing how far nodes are")
        self._trace_advice = Adviser("keeping traces and recordings")
        self.on_start: Callable[[NodeId], None] = lambda node: None
        self.on_instead: Callable[[NodeId, NodeId], None] = lambda node, instead: None  # before its start
        self.on_query: Callable[[Query], Awaitable[QueryAnswer]] = _unknown
        self.on_failure: Callable[[AfserveError], None] = lambda error: None
        self.on_progress: Callable[[Member], None] = lambda member: None
        self.on_incident: Callable[[Incident], None] = lambda incident: None
        self.on_wanted: Wanted = lambda counts, phases: None
        self.on_attention: Callable[[AttentionNodes], None] = lambda nodes: None
        self.own: OwnCopy | None = None  # of the checkpoint; None compares the nodes with one another only
        self.address = ""
        self._clock = clock
        self._streams = NodeStreams(token, self.check, self._on, self._hear)
        self._failure: AfserveError | None = None
        self._failed = asyncio.Event()
        self._settled = asyncio.Event()
        self._drained = asyncio.Event()
        self._stopping = False
        self._news = AttentionNews(self.membership, self._tell)
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- life

    async def start(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        also: Sequence[grpc.GenericRpcHandler] = (),
        *,
        shares_port: bool = False,
        certificates: Certificates | None = None,
    ) -> str:
        """As `NodeStreams.listen`: returns the address that nodes join."""
        self.address = await self._streams.listen(
            host, port, also, shares_port=shares_port, certificates=certificates
        )
        self._on(TakenOver() if self._life else Begun())
        self._spawn(self._watch())
        self._compare_own(full=self.deployment.verify == FULL)
        return self.address

    @property
    def deployment(self) -> Deployment:
        """What is wanted now."""
        return self.membership.deployment

    @property
    def members(self) -> Members:
        return self.membership.members

    @property
    def placement(self) -> Placement:
        """The one in force."""
        return self.membership.migration.placement

    @property
    def ready(self) -> bool:
        return self._failure is None and not self._stopping and self._all_here

    @property
    def changeable(self) -> bool:
        """Whether what is wanted may change: also while nodes start, or are lost."""
        return self._failure is None and not self._stopping

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
        self._on(DrainAll())
        try:
            await asyncio.wait_for(self._drained.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def interrupt(self, error: AfserveError) -> None:
        """Gateways end what is open, with this reason."""
        for gateway in self.members.of(Role.GATEWAY):
            self._tell(gateway.id, Shutdown(error))

    async def stop(self) -> None:
        self._stopping = True
        await self._streams.stop(Shutdown(self._failure))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- what others tell it

    def apply(self, placement: Placement) -> None:
        """Go to this placement while serving. Raises ConfigError where it does not fit the run."""
        self.check()
        self._on(self.balancing.asked(placement))

    def obey(self, event: Event) -> None:
        """Something that people ask for. Raises ConfigError, and changes nothing, for what cannot be."""
        self.check()
        self._on(event)

    async def record(self) -> tuple[bytes, ...]:
        """What some nodes of each role that serve do for a moment from now on, packed."""
        serving = [member for role in MODEL_ROLES for member in self.members.of(role) if member.serving]
        return await self.recordings.take([member.id for member in serving])

    def waited(self, said: Unheard) -> None:
        """By the gateway of this process."""
        self._on(Waited(said))

    def report_exit(self, who: NodeId | str, reason: str) -> None:
        """A process ended, as its parent saw it: a node's, or one that all depend on."""
        if isinstance(who, NodeId):
            self._on(Exited(who, reason))
        else:
            self.fail(PeerLost(who, reason))

    # ---- what nodes say

    def _hear(self, member: Life, value: FromNode) -> None:
        """Routing counts, questions and lines for the log are no business of the membership."""
        match value:
            case Routed(rows):
                now = self._clock.now()
                self._counts_advice.ask(now, lambda: self.balancing.heard(rows, now), None)
            case Noted(text, warning):
                log.log(logging.WARNING if warning else logging.INFO, "%s: %s", member.node, text)
            case Recorded():
                self._trace_advice.ask(self._clock.now(), lambda: self.recordings.heard(member, value), None)
            case Traced(data):
                self._trace_advice.ask(self._clock.now(), lambda: self._keep_trace(member, data), None)
            case Query():
                self._spawn(self._answer(member, value))
            case _:
                self._on(Said(member, value))
                self._follow(member, value)

    def _keep_trace(self, member: Life, data: bytes) -> None:
        found = self.members.get(member)
        if self._traces is not None and found is not None:
            self._traces.keep(member, found.host, data, time.monotonic())

    async def _answer(self, member: Life, query: Query) -> None:
        try:
            answer = await self.on_query(query)
        except Exception:  # whatever a question leads to, it is that one question's
            log.exception("a gateway's question (%s) was not answered", query.what)
            answer = QueryAnswer(query.number, error=AfserveError(UNANSWERED))
        self._tell(member, answer)

    def _follow(self, member: Life, value: FromNode) -> None:
        """What else hangs on it."""
        if isinstance(value, Heartbeat) and isinstance(value.stats, AttentionStats):
            stats = value.stats
            self._story_advice.ask(self._clock.now(), lambda: self.incidents.heard(member, stats), None)
        if isinstance(value, Identity):
            self._compare_own(full=is_full(value.things))
        found = self.members.get(member)
        if found is not None and isinstance(value, Progress | Ready):
            self._progress_advice.ask(self._clock.now(), lambda: self.on_progress(found), None)
            if found.node.role is Role.GATEWAY and found.serving and self._settled.is_set():
                self._tell(member, Serve())  # it came after all were ready

    # ---- events in, effects carried out

    def _on(self, event: Event) -> None:
        """Raises ConfigError for what was asked and cannot be."""
        if self._stopping or self._failure is not None:
            return
        wanted = self.deployment
        effects = self.membership.on(event, self._clock.now())
        if not effects and isinstance(event, Said) and isinstance(event.value, Heartbeat):
            return  # it has changed nothing that anybody is told of
        now = self.deployment
        if (now.counts, now.phases) != (wanted.counts, wanted.phases):
            self.on_wanted(now.counts, now.phases)
        others = self._news.changed()
        # What is thought out goes first: it goes on in a thread while a thousand nodes are told.
        for effect in sorted(effects, key=lambda effect: not isinstance(effect, Replan)):
            self._carry_out(effect)
        if others:
            self.on_attention(self._news.nodes)
            self._news.tell_all()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Admit(connection, member, assigned):
                self._streams.admit(connection, member)
                if assigned is not None:
                    self._tell(member, assigned)
                self._news.tell_who_came(member, knew=assigned is None, serves=self._settled.is_set())
            case Refuse(connection, error):
                self._streams.refuse(connection, error)
            case Tell(member, value):
                self._tell(member, value)
            case Start(node, instead):
                if instead is not None:
                    self.on_instead(node, instead)
                self.on_start(node)
            case Dismiss(member, error):
                self._streams.dismiss(member, error)
            case Replan():
                self._spawn(self._replan(effect))
            case Incident():
                self._note(effect)
            case Settled():
                self._settle()
            case AllDrained():
                self._drained.set()
            case EndRun(error):
                self.fail(error)

    def _note(self, incident: Incident) -> None:
        now = self._clock.now()
        self._story_advice.ask(now, lambda: self.incidents.note(incident, time.time()), None)
        self._trace_advice.ask(now, lambda: self.on_incident(incident), None)

    def imbalance(self) -> tuple[float, ...]:
        """As `Balancing` says it; nothing while that cannot be said."""
        return self._balance_advice.ask(self._clock.now(), self.balancing.imbalance, ())

    def _tell(self, member: Life, value: ToNode) -> None:
        self._streams.tell(member, value)

    async def _replan(self, asked: Replan) -> None:
        """Where there is no way there now, the next change of who is there asks again."""
        while self._failure is None:
            now = self._clock.now()
            with self._placing_advice.guarded(now):
                place = await self._thought_out(asked, now)
                break
            await asyncio.sleep(max(TICK, self._placing_advice.rest_left(now)))
        else:
            return
        if place is not None:
            self._try(place, logging.WARNING)

    async def _thought_out(self, asked: Replan, now: float) -> Place | None:
        balancing = self.balancing
        try:
            if asked.lost:
                lost, nodes, barred = asked.lost, asked.nodes, asked.barred
                return await asyncio.to_thread(balancing.without, lost, nodes, now, barred)
            return await asyncio.to_thread(balancing.over, asked.nodes, now)
        except ConfigError as error:
            log.warning("the experts stay where they are: %s", error.message)
            return None

    def fail(self, error: AfserveError) -> None:
        """The run ends with this; the first reason counts."""
        if self._failure is not None or self._stopping:
            return
        self._failure = error
        self._settled.set()
        self._drained.set()
        self.on_failure(error)
        self._failed.set()

    # ---- the controller's own copy of the checkpoint

    def _compare_own(self, full: bool) -> None:
        if self.own is not None and self.own.due(full):
            self._spawn(self._expect_own(self.own.compare(full)))

    async def _expect_own(self, compared: Coroutine[None, None, None]) -> None:
        try:
            await compared
        except AfserveError as error:
            if isinstance(error, UserError) and (self._life or self._settled.is_set()):
                # What cannot be read now was read before: nodes are compared with one another.
                log.warning("the controller's own copy of the checkpoint is not compared: %s", error.message)
            else:
                self.fail(error)
        self._settle()

    def known(self, things: Mapping[str, str]) -> None:
        """What this host has of the checkpoint: all others must have the same."""
        self._on(Known(things))

    @property
    def _all_here(self) -> bool:
        return self.membership.settled and not (self.own is not None and self.own.busy)

    def _settle(self) -> None:
        if self._all_here and not self._settled.is_set():
            self._settled.set()
            for gateway in self.members.of(Role.GATEWAY):
                self._tell(gateway.id, Serve())

    # ---- time

    async def _watch(self) -> None:
        while self._failure is None:
            await asyncio.sleep(TICK)
            self._on(Ticked(self._load()))
            self._check_own(self._clock.now())
            if self.ready:
                await self._balance(self._clock.now())

    def _check_own(self, now: float) -> None:
        try:
            if self.own is not None:
                self.own.check(now)
        except DeadlineError as error:
            self.fail(error)

    async def _balance(self, now: float) -> None:
        """Tokens of all requests pass this event loop: the thinking is done beside it."""
        place = None
        if not self._balance_advice.rests(now):
            with self._balance_advice.guarded(now):
                stats = self.balancing.age(now)
                if stats is not None:
                    place = self.balancing.decided(await asyncio.to_thread(self.balancing.think, stats, now))
        if place is not None:
            self._try(place)

    def _try(self, place: Place, level: int = logging.INFO) -> None:
        """While it was thought out, a node that it needs may have gone; the next look at the load thinks anew."""
        try:
            self._on(place)
        except ConfigError as error:
            log.log(level, "the experts stay where they are: %s", error.message)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        """A bug in a background task ends the run instead of leaving it unwatched."""
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            log.error("the controller failed", exc_info=bug)
            self.fail(AfserveError("the controller failed; its log says why"))


async def _unknown(query: Query) -> QueryAnswer:
    return QueryAnswer(query.number, error=ConfigError(f"{query.what}: nobody here answers gateways"))
