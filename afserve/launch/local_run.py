"""A run: controller and frontend in this process, nodes as processes here or on other hosts, as `assignment` says.

`up` and `LLM` use it. It owns the order in which things start and end, and knows neither HTTP nor a terminal.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from afserve.clock import AwakeClock
from afserve.control.backend import ServedModel
from afserve.control.changing import Changing
from afserve.control.controller import Controller
from afserve.control.frontend import Frontend
from afserve.control.gateway import Gateway
from afserve.control.homes import home_rules
from afserve.control.identifying import OwnCopy, reading
from afserve.control.membership.balancing import BalanceRules
from afserve.control.membership.desired import Deployment
from afserve.control.membership.events import Incident
from afserve.control.membership.members import Member
from afserve.control.membership.recovery import REGISTER_SECONDS, OnLoss, Rules
from afserve.control.membership.tables import first_generation
from afserve.control.queries import OwnQueries
from afserve.control.wire.channel import read_token
from afserve.errors import AfserveError, DeadlineError, DoesNotFitError, PeerLost
from afserve.launch.chaos import Chaos
from afserve.launch.gateway_options import GatewayOptions
from afserve.launch.hosts import TOGETHER_SECONDS, HostAssignment
from afserve.launch.machine import this_machine
from afserve.launch.models import FoundModel
from afserve.launch.processes import NodeProcesses
from afserve.launch.supervisor import Term
from afserve.launch.topology import Topology, gib, usable
from afserve.member import MODEL_ROLES, NodeId, Role
from afserve.models.identity import Identity, Progress
from afserve.trace import Trace

DRAIN_SECONDS = 5.0
ATTEND_SECONDS = 30.0  # from when all nodes are ready until each has a stream to the gateway


@dataclass(frozen=True, slots=True)
class GatewayProcesses:
    """What each of them is started with: `listening` is held here and shared by all."""

    options: GatewayOptions
    listening: socket.socket


class LocalRun:
    """`start()` starts the nodes, `wait_ready()` returns when they serve, `async with` ends all of it.

    `processes` was started by the caller, as early as possible, and is stopped by the caller.
    """

    def __init__(
        self,
        topology: Topology,
        model: FoundModel,
        name: str,
        processes: NodeProcesses,
        balance: BalanceRules | None,
        assignment: HostAssignment,
        gateways: GatewayProcesses | None = None,
        on_loss: str = OnLoss.RECOVER,
        term: Term | None = None,
    ) -> None:
        """`term` where a supervisor keeps the port that nodes join, and starts the next run when this one dies."""
        clock = (
            AwakeClock()
        )  # the controller polls it twice a second: a pause of this process makes nobody late
        token = read_token(processes.token_file)
        number = 0 if term is None else term.number
        self._term = term
        self._gateway = Gateway(
            token, home_rules(topology.deployment.engine), generation=first_generation(number)
        )
        self.topology = topology
        self.processes = processes
        self.assignment = assignment
        self._gateways = gateways
        self.controller = Controller(
            _wanted(topology.deployment, term),
            token,
            clock,
            balance,
            Rules(
                OnLoss(on_loss),
                register=TOGETHER_SECONDS if assignment.elsewhere else REGISTER_SECONDS,
                silence=topology.deployment.silence,
                deadline=topology.deployment.engine.loss_deadline,
            ),
            self._on_its_device,
            number,
        )
        if term is not None:
            self.controller.on_wanted = term.reports.wanted
        self.controller.on_start = self._start_here
        self.controller.on_failure = self._gateway.fail
        self.controller.on_attention = self._gateway.told
        self._own = OwnCopy(self._read_own, self.controller.known, clock)
        self.controller.own = self._own
        served = ServedModel(
            name=name,
            path=str(model.tokenizer),
            max_model_len=topology.deployment.engine.max_model_len,
            vocab_size=topology.spec.vocab_size,
            created=int(time.time()),
        )
        self._trace = Trace("gateway") if topology.deployment.trace_folder else None
        self.controller.on_incident = self._draw
        self._faults = Chaos(processes)
        changing = Changing(self.controller, self._check_room, self._is_started_here, self._faults.begin)
        queries = OwnQueries(self.controller, topology.picked, clock, changing)
        self.controller.on_query = queries.answer
        self.frontend = Frontend(queries, self._gateway, served, self._trace)
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "LocalRun":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def show_progress(self, loading: Callable[[Member], None], verifying: Progress) -> None:
        """`verifying` is told, from another thread, how much of all bytes of this host's copy has been read."""
        self.controller.on_progress = loading
        self._own.on_progress = verifying

    async def start(self) -> None:
        self._watch = asyncio.create_task(self.processes.watch(self.controller.report_exit))
        also, shares = [self._gateway.handler], self._term is not None
        await self.controller.start(self.assignment.listen, self.assignment.port, also, shares_port=shares)

    def _draw(self, incident: Incident) -> None:
        if self._trace is not None:
            self._trace.instant(str(incident), time.monotonic())

    def _start_here(self, node: NodeId) -> None:
        """Who is on another host is started there."""
        if node.role is Role.GATEWAY:
            assert self._gateways is not None, "the membership asks for gateways only where there are some"
            self.processes.spawn(
                node, self.controller.address, self._gateways.options.to_plain(), self._gateways.listening
            )
            return
        self.assignment = self.assignment.having(node)
        if self.assignment.is_here(node):
            self.processes.spawn(node, self.controller.address)

    def _is_started_here(self, node: NodeId) -> bool:
        return node.role is Role.GATEWAY or self.assignment.having(node).is_here(node)

    def _check_room(self, role: Role, more: int) -> None:
        """Raises DoesNotFitError where this machine's free memory does not hold so many more nodes of a role."""
        need = self.topology.expert if role is Role.EXPERT else self.topology.attention
        if (
            more <= 0
            or role is Role.GATEWAY
            or need is None
            or self.topology.deployment.engine.device != "cpu"
        ):
            return
        free = usable(this_machine())
        if more * need.total > free:
            raise DoesNotFitError(
                f"scale: {more} more {role} node{'s' * (more > 1)} need {gib(more * need.total)}, this machine has "
                f"{gib(free)} free"
            )

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
            if self._term is not None:
                self._term.reports.serves()
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

    async def stop(self) -> None:
        self.frontend.close()
        self._faults.stop()
        await self.controller.stop()
        self._gateway.stop()
        await asyncio.to_thread(self.processes.stop)
        if self._trace is not None:
            self._trace.write(Path(self.topology.deployment.trace_folder) / "gateway.trace")
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)


def _wanted(deployment: Deployment, term: Term | None) -> Deployment:
    """As it was asked for, with the counts that are wanted by now."""
    return deployment if term is None else replace(deployment, counts={**deployment.counts, **term.counts})
