"""A run: controller and frontend in this process, nodes as processes here or on other hosts, as `assignment` says.

`up` and `LLM` use it. It owns the order in which things start and end, and knows neither HTTP nor a terminal.
"""

import asyncio
import logging
import shlex
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from afserve.clock import AwakeClock
from afserve.control.backend import ServedModel
from afserve.control.changing import Changing, not_from_here
from afserve.control.controller import TICK, Controller
from afserve.control.controller_wiring import Wiring, nobody
from afserve.control.frontend import Frontend
from afserve.control.gateway import Gateway
from afserve.control.homes import home_rules
from afserve.control.host_watch import HostWatch
from afserve.control.hosts import CarriedHosts, Served
from afserve.control.identifying import reading
from afserve.control.membership.balancing import BalanceRules
from afserve.control.membership.events import Incident
from afserve.control.membership.members import first_generation
from afserve.control.membership.recovery import REGISTER_SECONDS, OnLoss, Rules
from afserve.control.membership.roster import Member
from afserve.control.queries import OwnQueries
from afserve.control.wire.change_values import FaultKind
from afserve.control.wire.desired import Deployment
from afserve.control.wire.load_values import GatewayLoad
from afserve.control.wire.values import Query, QueryAnswer, Unheard
from afserve.engine.scheduling.routed_experts import row_bytes_of
from afserve.errors import AfserveError, DeadlineError, PeerLost
from afserve.families.table import load_spec
from afserve.launch.plan.hosts import TOGETHER_SECONDS, HostAssignment
from afserve.launch.plan.models import FoundModel
from afserve.launch.plan.topology import Topology
from afserve.launch.processes.gateway_options import GatewayOptions
from afserve.launch.processes.supervisor import Term, Wanted
from afserve.launch.run.chaos import Chaos
from afserve.launch.run.piloted import PilotPlan, pilot_loop
from afserve.launch.run.room import HostRoom
from afserve.launch.sites.site import Site
from afserve.member import MODEL_ROLES, NodeId, Role
from afserve.models.identity import Identity, Progress
from afserve.tls import opened
from afserve.tracing.trace import Trace

log = logging.getLogger("afserve.launch")
DRAIN_SECONDS = 5.0
ATTEND_SECONDS = 30.0  # from when all nodes are ready until each has a stream to the gateway


@dataclass(frozen=True, slots=True)
class GatewayProcesses:
    """What each of them is started with: `listening` is held here and shared by all."""

    options: GatewayOptions
    listening: socket.socket


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOwner:
    """Who started a run, and is told how far it is. `show_own_progress` comes from the thread that reads this host's
    copy of the checkpoint: how much of all its bytes. `end_run` is called where somebody asks for the end over HTTP.
    `read_load` says what the gateway in this process counts.
    """

    show_progress: Callable[[Member], None] = nobody
    show_own_progress: Progress = nobody
    end_run: Callable[[], None] = not_from_here
    read_load: Callable[[], GatewayLoad] = GatewayLoad


class LocalRun:
    """`start()` starts the nodes, `wait_ready()` returns when they serve, `async with` ends all of it.

    `processes` was started by the caller, as early as possible, and is stopped by the caller.
    """

    def __init__(
        self,
        topology: Topology,
        model: FoundModel,
        name: str,
        processes: Site,
        balance: BalanceRules | None,
        assignment: HostAssignment,
        gateways: GatewayProcesses | None = None,
        on_loss: str = OnLoss.RECOVER,
        term: Term | None = None,
        certs: Path | None = None,
        aliases: tuple[str, ...] = (),
        owner: RunOwner | None = None,
        pilot: PilotPlan | None = None,
    ) -> None:
        """`term` where a supervisor keeps the port that nodes join, and starts the next run when this one dies.

        `certs` is this host's folder of certificates, for nodes beyond loopback.
        """
        self.topology, self.processes, self.assignment = topology, processes, assignment
        self._gateways, self._term, self._certs = gateways, term, certs
        deployment, owner = topology.deployment, owner or RunOwner()
        token, number = processes.token, 0 if term is None else term.number
        clock = AwakeClock()  # the controller polls it: a pause of this process makes nobody late
        self._trace = Trace("gateway") if deployment.trace_folder else None
        self._faults = Chaos(processes)
        self._gateway = Gateway(
            token,
            home_rules(deployment),
            generation=first_generation(number),
            report_unheard=self._report_unheard,
        )
        wanted = None if term is None else term.wanted.get(name)
        self.controller = Controller(
            _wanted(deployment, wanted),
            token,
            clock,
            balance,
            _rules(deployment, on_loss, assignment),
            self._wiring(name, owner),
            number,
        )
        self.hosts = CarriedHosts(
            token,
            assignment.places,
            _served(topology),
            self._is_there,
            self.controller.report_exit,
            self._host_failed,
        )
        room = HostRoom(
            topology, elsewhere=assignment.managed or assignment.awaited, free_rows=self._free_rows
        )
        changing = Changing(
            self.controller, room.check_more, self._can_start, self._break, room.check_change, owner.end_run
        )
        self._pilot = pilot_loop(pilot, self.controller, changing, clock, owner.read_load, term, name)
        self._queries = OwnQueries(self.controller, topology.picked, clock, changing, self._pilot)
        served = _served_model(topology, model, name, aliases)
        self.frontend = Frontend(self._queries, self._gateway, served, self._trace)
        self._tasks: list[asyncio.Task[None]] = []

    def _wiring(self, name: str, owner: RunOwner) -> Wiring:
        return Wiring(
            start_node=self._start,
            clear_place=self._take_place,
            assign=self._on_its_device,
            host_load=HostWatch(TICK),
            read_own=self._read_own,
            answer_query=self._answer,
            tell_failure=self._gateway.fail,
            tell_attention=self._gateway.update_nodes,
            keep_wanted=nobody if self._term is None else partial(self._term.reports.wanted, name),
            show_incident=self._draw,
            show_progress=owner.show_progress,
            show_own_progress=owner.show_own_progress,
        )

    async def __aenter__(self) -> "LocalRun":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self.processes.watch_nodes(self.controller.report_exit))]
        if self._pilot is not None:
            self._tasks.append(asyncio.create_task(self._pilot.run()))
        await self.controller.start(
            self.assignment.listen,
            self.assignment.port,
            [self._gateway.handler, self.hosts.handler],
            shares_port=self._term is not None,
            certificates=opened(self._certs),
        )
        self._tasks.append(asyncio.create_task(self.processes.bring(self.controller)))
        where = f"--join {self.controller.address} --token-file {shlex.quote(str(self.processes.token_file))}"
        certs = f" --certs {shlex.quote(str(self._certs.absolute()))}" if self._certs else ""
        log.info("nodes may also be started by hand: afserve node --role expert %s%s", where, certs)

    def _report_unheard(self, said: Unheard) -> None:
        self.controller.report_unheard(said)

    async def _answer(self, query: Query) -> QueryAnswer:
        return await self._queries.answer(query)

    def _draw(self, incident: Incident) -> None:
        if self._trace is not None:
            self._trace.instant(str(incident), time.monotonic())

    def _start(self, node: NodeId) -> None:
        """Here, or on the host that carries it."""
        if node.role is Role.GATEWAY:
            assert self._gateways is not None, "the membership asks for gateways only where there are some"
            options, listening = self._gateways.options.to_plain(), self._gateways.listening
            self.processes.spawn(node, self.controller.address, options, listening, self._certs)
            return
        self.assignment = self.assignment.having(node)
        if self.assignment.starts(node):
            binding = self.topology.binding(node)
            self.processes.spawn(node, self.controller.address, certs=self._certs, binding=binding)
        else:
            self.hosts.start(node)

    def _take_place(self, node: NodeId, of: NodeId) -> None:
        """What is left of a process that was told to go is ended: its memory is needed."""
        self.assignment = self.assignment.instead(node, of)
        if (pid := self.processes.pid_of(of)) is not None:
            self.processes.send_signal(of, pid, signal.SIGKILL)

    def _is_there(self, node: NodeId) -> bool:
        member = self.controller.members.last_at(node)
        return member is not None and member.alive

    def _host_failed(self, error: AfserveError) -> None:
        """A run that serves goes on without a host that has something else by now."""
        if self.controller.ready:
            log.warning("%s; it carries no nodes until that is mended", error.message)
        else:
            self.controller.end_run(error)

    def _free_rows(self, experts: int) -> int:
        taken = (node for role in MODEL_ROLES for node in self.controller.members.places(role))
        return self.assignment.free_rows(taken, experts)

    def _can_start(self, node: NodeId) -> bool:
        return (
            node.role is Role.GATEWAY or self.assignment.having(node).starts(node) or self.hosts.carries(node)
        )

    def _break(self, node: NodeId, kind: FaultKind, seconds: float) -> int:
        """Returns the pid. Raises ConfigError for a node that has no process of ours."""
        member = self.controller.members.last_at(node)
        if member is not None and member.alive and self._can_start(node):
            self.processes.inherit(node, member.pid)
        return self._faults.begin(node, kind, seconds)

    def _on_its_device(self, deployment: Deployment, node: NodeId) -> Deployment:
        device = self.assignment.devices.get(node, deployment.engine.device)
        return replace(deployment, engine=replace(deployment.engine, device=device))

    def _read_own(self, full: bool, progress: Progress) -> "Future[Identity]":
        return reading(self.topology.deployment.source, MODEL_ROLES, full=full, progress=progress)

    async def wait_ready(self) -> None:
        """Raises what kept a node from becoming ready, with the node's last words."""
        try:
            await self.controller.wait_ready()
            if not self.topology.deployment.count(Role.GATEWAY):
                await self._wait_attended()
        except AfserveError as error:
            raise self.explained(error) from None

    async def _wait_attended(self) -> None:
        """Attention nodes open a stream to the gateway as soon as they are ready."""
        attended = asyncio.create_task(self.frontend.wait_attended())
        failing = asyncio.create_task(self.controller.wait_failure())
        try:
            await asyncio.wait(
                {attended, failing}, timeout=ATTEND_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            self.controller.check()
            if not attended.done():
                missing = ", ".join(map(str, self.frontend.missing()))
                raise DeadlineError(
                    f"{missing}: opened no stream to the gateway within {ATTEND_SECONDS:.0f} s"
                )
        finally:
            attended.cancel()
            failing.cancel()

    def explained(self, error: AfserveError) -> AfserveError:
        """For the one who started the run: a lost node's last words below the reason."""
        if not isinstance(error, PeerLost):
            return error
        words = self.processes.last_words(str(error.peer))
        reason = error.message.removeprefix(f"{error.peer}: ")
        return PeerLost(error.peer, f"{reason}; its last words:\n{words}") if words else error

    async def drain(self, seconds: float = DRAIN_SECONDS) -> None:
        """Take nothing new and let running requests finish, for at most `seconds`."""
        self.frontend.close()
        await self.controller.drain(seconds)

    def _why(self) -> str:
        """What ended the run, empty where it ends by wish."""
        try:
            self.controller.check()
        except AfserveError as error:
            return error.message
        return ""

    async def stop(self) -> None:
        self.frontend.close()
        self._faults.stop()
        await self.hosts.end(self._why())
        await self.controller.stop()
        self._gateway.stop()
        await asyncio.to_thread(self.processes.stop)
        if self._trace is not None:
            self._trace.write(Path(self.topology.deployment.trace_folder) / "gateway.trace")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _served_model(topology: Topology, model: FoundModel, name: str, aliases: tuple[str, ...]) -> ServedModel:
    engine = topology.deployment.engine
    return ServedModel(
        name=name,
        path=str(model.tokenizer),
        max_model_len=engine.max_model_len,
        vocab_size=topology.spec.vocab_size,
        created=int(time.time()),
        aliases=aliases,
        drafts=engine.drafts().most > 0,
        routed_bytes=row_bytes_of(topology.spec),
        block_size=engine.block_size,
    )


def _served(topology: Topology) -> Served:
    """For other hosts to compare with what they have."""
    path, grace = topology.deployment.source.path, topology.deployment.engine.orphan_grace
    return Served(path, load_spec(Path(path)).fingerprint(), grace, topology.takes)


def _wanted(deployment: Deployment, by_now: Wanted | None) -> Deployment:
    """As it was asked for, or with the counts and phases that are wanted by now."""
    if by_now is None:
        return deployment
    return replace(deployment, counts={**deployment.counts, **by_now.counts}, phases=by_now.phases)


def _rules(deployment: Deployment, on_loss: str, assignment: HostAssignment) -> Rules:
    return Rules(
        OnLoss(on_loss),
        register=TOGETHER_SECONDS if assignment.elsewhere else REGISTER_SECONDS,
        silence=deployment.silence,
        deadline=deployment.engine.loss_deadline,
    )
