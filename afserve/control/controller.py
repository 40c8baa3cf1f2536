"""The controller: the one place where the membership's effects become deeds.

What nodes say (`streams`) goes into `membership`, which decides; this file keeps time and holds what others wait for.
It lives in the gateway's event loop, imports no torch, and starts no process: whoever does stands in its `Wiring`.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence

import grpc
import grpc.aio

from afserve import __version__
from afserve.adviser import Adviser
from afserve.clock import Clock
from afserve.config import FULL
from afserve.control.attention_news import AttentionNews
from afserve.control.chronicle import Chronicle
from afserve.control.controller_wiring import Wiring
from afserve.control.identifying import OwnCopy
from afserve.control.membership import events
from afserve.control.membership.balancing import BalanceRules, Balancing
from afserve.control.membership.members import Members
from afserve.control.membership.membership import Membership
from afserve.control.membership.recovery import Rules
from afserve.control.rebalance_loop import RebalanceLoop
from afserve.control.streams import NodeStreams
from afserve.control.wire import values
from afserve.control.wire.desired import Deployment
from afserve.engine.stats import AttentionStats
from afserve.errors import AfserveError, DeadlineError, PeerLost, UserError
from afserve.member import Life, NodeId, Role
from afserve.models.identity import is_full
from afserve.placement.placement import Placement
from afserve.tls import Certificates

log = logging.getLogger("afserve.control")

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
        wiring: Wiring | None = None,
        life: int = 0,
    ) -> None:
        """`life` counts the controllers of a run: a later one begins with the nodes that are there."""
        self._life, self._wiring = life, wiring or Wiring()
        spare = 1 if balance is not None and balance.act else 0
        self.membership = Membership(deployment, __version__, rules, self._wiring.assign, spare, life)
        self.balancing = Balancing(
            deployment.source.name,
            self.membership.migration,
            balance or BalanceRules(),
            self.membership.state.holders,
        )
        self.rebalancing = RebalanceLoop(self.balancing, clock, self._on, lambda: self._failure is not None)
        self.chronicle = Chronicle(
            deployment, self.members, self.balancing, clock, self._tell, self._wiring.show_incident
        )
        self._progress_advice = Adviser("showing how far nodes are")
        read = self._wiring.read_own
        self._own = read and OwnCopy(read, self._expect, clock, self._wiring.show_own_progress)
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
        self._on(events.TakenOver() if self._life else events.Begun())
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
        self._on(events.DrainAll())
        try:
            await asyncio.wait_for(self._drained.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def interrupt(self, error: AfserveError) -> None:
        """Gateways end what is open, with this reason."""
        for gateway in self.members.living(Role.GATEWAY):
            self._tell(gateway.id, values.Shutdown(error))

    async def stop(self) -> None:
        self._stopping = True
        await self._streams.stop(values.Shutdown(self._failure))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- what others tell it

    def apply(self, placement: Placement) -> None:
        """Go to this placement while serving. Raises ConfigError where it does not fit the run."""
        self.check()
        self._on(self.balancing.asked(placement))

    def obey(self, event: events.Event) -> None:
        """Something that people ask for. Raises ConfigError, and changes nothing, for what cannot be."""
        self.check()
        self._on(event)

    def report_unheard(self, said: values.Unheard) -> None:
        """By the gateway of this process."""
        self._on(events.Waited(said))

    def report_exit(self, who: NodeId | str, reason: str) -> None:
        """A process ended, as its parent saw it: a node's, or one that all depend on."""
        if isinstance(who, NodeId):
            self._on(events.Exited(who, reason))
        else:
            self.end_run(PeerLost(who, reason))

    # ---- what nodes say

    def _hear(self, member: Life, value: values.FromNode) -> None:
        if isinstance(value, values.Query):
            self._spawn(self._answer(member, value))
        elif not self.chronicle.keep_said(member, value):
            self._on(events.Said(member, value))
            self._follow(member, value)

    async def _answer(self, member: Life, query: values.Query) -> None:
        try:
            answer = await self._wiring.answer_query(query)
        except Exception:  # whatever a question leads to, it is that one question's
            log.exception("a gateway's question (%s) was not answered", query.what)
            answer = values.QueryAnswer(query.number, error=AfserveError(UNANSWERED))
        self._tell(member, answer)

    def _follow(self, member: Life, value: values.FromNode) -> None:
        """What else hangs on it."""
        if isinstance(value, values.Heartbeat) and isinstance(value.stats, AttentionStats):
            self.chronicle.keep_stats(member, value.stats)
        if isinstance(value, values.Identity):
            self._compare_own(full=is_full(value.things))
        found = self.members.find_life(member)
        if found is not None and isinstance(value, values.Progress | values.Ready):
            self._progress_advice.ask(self._clock.now(), lambda: self._wiring.show_progress(found), None)
            if found.node.role is Role.GATEWAY and found.serving and self._settled.is_set():
                self._tell(member, values.Serve())  # it came after all were ready

    # ---- events in, effects carried out

    def _on(self, event: events.Event) -> None:
        """Raises ConfigError for what was asked and cannot be."""
        if self._stopping or self._failure is not None:
            return
        wanted = self.deployment
        effects = self.membership.on(event, self._clock.now())
        if not effects and isinstance(event, events.Said) and isinstance(event.value, values.Heartbeat):
            return  # it has changed nothing that anybody is told of
        now = self.deployment
        if (now.counts, now.phases) != (wanted.counts, wanted.phases):
            self._wiring.keep_wanted(now.counts, now.phases)
        others = self._news.changed()
        # What is thought out goes first: it goes on in a thread while a thousand nodes are told.
        for effect in sorted(effects, key=lambda effect: not isinstance(effect, events.Replan)):
            self._carry_out(effect)
        if others:
            self._wiring.tell_attention(self._news.nodes)
            self._news.tell_all()

    def _carry_out(self, effect: events.Effect) -> None:
        match effect:
            case events.Admit(connection, member, assigned):
                self._streams.admit(connection, member)
                if assigned is not None:
                    self._tell(member, assigned)
                self._news.tell_who_came(member, knew=assigned is None, serves=self._settled.is_set())
            case events.Refuse(connection, error):
                self._streams.refuse(connection, error)
            case events.Tell(member, value):
                self._tell(member, value)
            case events.Start(node, instead):
                if instead is not None:
                    self._wiring.clear_place(node, instead)
                self._wiring.start_node(node)
            case events.Dismiss(member, error):
                self._streams.dismiss(member, error)
            case events.Replan():
                self._spawn(self.rebalancing.replan_places(effect))
            case events.Incident():
                self.chronicle.keep_incident(effect)
            case events.Settled():
                self._settle()
            case events.AllDrained():
                self._drained.set()
            case events.EndRun(error):
                self.end_run(error)

    def _tell(self, member: Life, value: values.ToNode) -> None:
        self._streams.tell(member, value)

    def end_run(self, error: AfserveError) -> None:
        """The run ends with this; the first reason counts."""
        if self._failure is not None or self._stopping:
            return
        self._failure = error
        self._settled.set()
        self._drained.set()
        self._wiring.tell_failure(error)
        self._failed.set()

    # ---- the controller's own copy of the checkpoint

    def _compare_own(self, full: bool) -> None:
        if self._own is not None and self._own.due(full):
            self._spawn(self._expect_own(self._own.compare(full)))

    async def _expect_own(self, compared: Coroutine[None, None, None]) -> None:
        try:
            await compared
        except AfserveError as error:
            if isinstance(error, UserError) and (self._life or self._settled.is_set()):
                # What cannot be read now was read before: nodes are compared with one another.
                log.warning("the controller's own copy of the checkpoint is not compared: %s", error.message)
            else:
                self.end_run(error)
        self._settle()

    def _expect(self, things: Mapping[str, str]) -> None:
        """What this host has of the checkpoint: all others must have the same."""
        self._on(events.Known(things))

    @property
    def _all_here(self) -> bool:
        return self.membership.settled and not (self._own is not None and self._own.busy)

    def _settle(self) -> None:
        if self._all_here and not self._settled.is_set():
            self._settled.set()
            for gateway in self.members.living(Role.GATEWAY):
                self._tell(gateway.id, values.Serve())

    # ---- time

    async def _watch(self) -> None:
        while self._failure is None:
            await asyncio.sleep(TICK)
            self._on(events.Ticked(self._wiring.host_load()))
            self._check_own(self._clock.now())
            if self.ready:
                await self.rebalancing.rebalance(self._clock.now())

    def _check_own(self, now: float) -> None:
        try:
            if self._own is not None:
                self._own.check(now)
        except DeadlineError as error:
            self.end_run(error)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        """A bug in a background task ends the run instead of leaving it unwatched."""
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            log.error("the controller failed", exc_info=bug)
            self.end_run(AfserveError("the controller failed; its log says why"))
