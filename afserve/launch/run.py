"""`afserve up`: from what the user asked for to a served API, and back to nothing.

It puts topology, nodes, controller and HTTP together, shows the way, and ends everything on Ctrl-C, SIGTERM or
the loss of a node. Everything that can be refused is refused before anything is listened on or loaded.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from afserve.config import FULL
from afserve.control.membership.balancing import BalanceRules
from afserve.control.membership.recovery import OnLoss
from afserve.errors import DoesNotFitError
from afserve.families.table import load_spec
from afserve.launch.banner import banner
from afserve.launch.gateway_options import options_of
from afserve.launch.gpus import Gpus, check_device
from afserve.launch.hosts import HostAssignment
from afserve.launch.http import Http, HttpHere, HttpInProcesses, serving_in_words, settings_for
from afserve.launch.launcher import Launcher
from afserve.launch.loading import LoadingBars
from afserve.launch.local_run import GatewayProcesses, LocalRun
from afserve.launch.machine import Machine
from afserve.launch.models import FoundModel
from afserve.launch.other_hosts import OtherHosts
from afserve.launch.processes import NodeProcesses
from afserve.launch.ray_launcher import RayLauncher
from afserve.launch.rebalance import balance_rules
from afserve.launch.site import RunSite, attended, on_ray, on_this_machine
from afserve.launch.supervisor import BEAT_SECONDS, INSISTED, Supervisor, Term, keep_port
from afserve.launch.topology import Topology, choose, needs
from afserve.launch.transports import choose_transport
from afserve.launch.wishes import UpFlags
from afserve.logs import configure
from afserve.server.serve import bind
from afserve.server.settings import ServerSettings
from afserve.tls import is_loopback, opened
from afserve.tokenizer import Tokenizer
from afserve.trace import check_writable, merge

log = logging.getLogger("afserve.launch")
INSIST_SECONDS = 1.0  # from the second Ctrl-C: for streams to be told


def serve_here(flags: UpFlags, processes: NodeProcesses) -> None:
    """Returns when the user ended it; raises what else did."""
    _log(flags)
    limits = replace(flags.limits, log_level=flags.run.log_level)
    settings = settings_for(flags.listening, limits, elsewhere=flags.wishes.gateways > 0)
    if not (settings.api_keys or settings.keys_file or is_loopback(flags.listening.host)):
        log.warning("%s is open to other machines and asks for no key; see --api-keys", flags.listening.host)
    opened(flags.run.certs)  # what is wrong with them is said first
    check_device(flags.wishes.engine.device)
    with ExitStack() as until_end:
        launcher: Launcher = processes
        if flags.ray.ray is not None:
            launcher = ray = until_end.enter_context(
                RayLauncher(processes, insecure=flags.run.insecure_nodes)
            )
            site = on_ray(flags, ray, processes)
        elif flags.run.elsewhere:
            site = attended(flags, processes)
        else:
            site = on_this_machine(flags, processes)
        _serve(site, settings, launcher, processes)


def _serve(site: RunSite, settings: ServerSettings, launcher: Launcher, processes: NodeProcesses) -> None:
    flags, found, gpus = site.flags, site.found, site.gpus
    balance = balance_rules(flags.run.rebalance, flags.wishes.redundant_experts)
    flags = replace(flags, wishes=replace(flags.wishes, rebalance=balance.act))
    topology = plan_here(flags, found, site.machine, gpus)
    balance = topology.keeping(balance)
    assignment = site.assigned or HostAssignment.all_here(topology.deployment, gpus)
    hosted, certified = site.devices or assignment.hosted, flags.run.certs is not None
    choice = choose_transport(flags.run.transport, hosted, gpus, certified=certified)
    topology = topology.over(choice.kind, choice.reason)
    topology = topology.verified(flags.run.verify)
    topology = topology.told(flags.run.log_level, settings.log_format, settings.otlp_endpoint or "")
    for path in filter(None, (flags.run.record_routing, flags.run.trace)):
        check_writable(str(path))
    with bind(flags.listening.host, flags.listening.port) as sock, ExitStack() as until_end:
        if flags.run.trace:
            # The nodes' parts outlive the run's own folder, which goes with the last node.
            parts = until_end.enter_context(tempfile.TemporaryDirectory(prefix="afserve-trace-"))
            topology = topology.traced(parts)
        kept = until_end.enter_context(keep_port(assignment.listen, assignment.port))
        assignment = replace(assignment, port=kept.getsockname()[1])
        started = time.monotonic()

        def live(term: Term) -> None:
            up = _Up(topology, found, settings, sock, launcher, flags, balance, assignment, term, started)
            asyncio.run(up.run())

        processes.lend()
        try:
            Supervisor(live, flags.wishes.on_loss == OnLoss.RECOVER).run()
        except KeyboardInterrupt:
            processes.kill()
            raise
        _merge_trace(flags, topology, processes)


def _merge_trace(flags: UpFlags, topology: Topology, processes: NodeProcesses) -> None:
    """Once every node has written its part."""
    if flags.run.trace is None:
        return
    processes.stop()
    dropped = merge(list(Path(topology.deployment.trace_folder).glob("*.trace")), flags.run.trace)
    lost = f", {dropped:,} events were too many" if dropped else ""
    Console(stderr=True).print(f"trace: {flags.run.trace}{lost}; open it at ui.perfetto.dev", style="dim")


def _log(flags: UpFlags) -> None:
    configure(flags.run.log_level, flags.limits.log_format)
    if flags.run.verify == FULL and not Console(stderr=True).is_terminal:
        logging.getLogger("afserve.verify").setLevel(logging.INFO)  # lines instead of bars


def _absolute(path: Path | None) -> Path | None:
    """As other hosts are to find theirs."""
    return None if path is None else path.resolve()


def plan_here(flags: UpFlags, found: FoundModel, machine: Machine, gpus: Gpus) -> Topology:
    source = replace(flags.source, path=str(found.folder), name=found.name)
    wishes = flags.wishes
    spec = load_spec(found.folder)
    spec = spec if source.layers is None else spec.cut(source.layers)
    if source.load_format == "safetensors" and not found.weights:
        raise DoesNotFitError(
            f"{found.name} is known by its shape only; there are no weights here.\n"
            f"{needs(spec, source, machine, wishes.engine.expert_dtype)}"
        )
    if wishes.engine.device != "cpu" and not wishes.hosts:
        wishes = replace(wishes, gpus=gpus.chosen(wishes.engine.device))
    return choose(spec, source, machine, wishes)


class _Up:
    def __init__(
        self,
        topology: Topology,
        found: FoundModel,
        settings: ServerSettings,
        sock: socket.socket,
        processes: Launcher,
        flags: UpFlags,
        balance: BalanceRules,
        assignment: HostAssignment,
        term: Term,
        started: float,
    ) -> None:
        self._term = term
        self._started = started if not term.number else time.monotonic()
        self._topology = topology
        names = flags.listening.names(found.name)
        self._name = names[0]
        self._sock = sock
        self._settings = settings
        self._processes = processes
        self._console = Console(stderr=True)
        self._stop = asyncio.Event()
        self._insisted = False
        self._record = flags.run.record_routing
        options = options_of(names, str(found.tokenizer), settings)
        gateways = GatewayProcesses(options, sock) if flags.wishes.gateways else None
        self._run = LocalRun(
            topology,
            found,
            self._name,
            processes,
            balance,
            assignment,
            gateways,
            flags.wishes.on_loss,
            term,
            flags.run.certs,
            names[1:],
        )
        self._run.on_end = self._end
        self._others = OtherHosts(self._run, processes.token_file, _absolute(flags.run.certs), self._say)
        self._ssh = flags.run.ssh_command if flags.run.ssh and not term.number else ""
        self._scheme = "https" if settings.certfile else "http"
        self._http: Http
        if gateways is None:
            tokenizer = Tokenizer.from_folder(found.tokenizer)
            self._http = HttpHere(self._run.frontend, tokenizer, settings, sock)
        else:
            self._http = HttpInProcesses(self._run.controller, settings.drain_seconds)

    async def run(self) -> None:
        if self._record is not None:
            await self._run.frontend.record_routing(True)
        self._listen_for_signals()
        self._beat()
        asyncio.get_running_loop().add_reader(
            self._term.reports, self._end_at_once
        )  # the supervisor has gone
        gc.freeze()  # full collections walk connections and streams, not what is there from the start
        async with self._run:
            serving = asyncio.create_task(self._http.run(self._stop))
            try:
                await self._until_over()
            finally:
                self._stop.set()
                await serving
                if self._insisted:
                    self._end_at_once()
                await self._save_recording()
        await self._others.stop()
        if self._insisted:
            self._end_at_once()

    async def _until_over(self) -> None:
        """Until the user or a failure ends it. Raises the failure."""
        ending = asyncio.create_task(self._stop.wait())
        failing = asyncio.create_task(self._run.controller.wait_failure())
        starting = asyncio.create_task(self._show_start())
        template = asyncio.create_task(self._http.check())
        checking = {ending, failing, template}
        try:
            await asyncio.wait(checking, return_when=asyncio.FIRST_COMPLETED)
            if template.done():
                template.result()
            await asyncio.wait({ending, failing}, return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                raise self._run.explained(failing.result())
        finally:
            for task in (ending, failing, starting, template):
                task.cancel()
            await asyncio.gather(starting, return_exceptions=True)

    async def _save_recording(self) -> None:
        if self._record is not None:
            data = await self._run.frontend.record_routing(False)
            self._record.write_bytes(data)
            self._console.print(f"routing counts: {self._record} ({len(data):,} bytes)", style="dim")

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    async def _show_start(self) -> None:
        """What is going on until everyone serves."""
        if self._term.number:
            await self._run.wait_ready()
            seconds = time.monotonic() - self._started
            log.warning("the new controller serves, with the nodes that were there; it took %.2f s", seconds)
            return
        await self._others.start(self._ssh)
        with LoadingBars(self._console) as bars:
            self._run.show_progress(bars.update, bars.verify)
            await self._run.wait_ready()
        seconds = time.monotonic() - self._started
        said = serving_in_words(self._settings)
        errors = [member.expert_error or 0.0 for member in self._run.controller.members]
        lost = max(errors, default=0.0) or None
        self._console.print(banner(self._topology, self._name, self._url(), seconds, said, lost))

    def _url(self) -> str:
        host, port = self._sock.getsockname()[:2]
        return f"{self._scheme}://[{host}]:{port}" if ":" in host else f"{self._scheme}://{host}:{port}"

    def _listen_for_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

    def _beat(self) -> None:
        """Until the loop ends: the supervisor kills a process that does not."""
        self._term.reports.beats()
        asyncio.get_running_loop().call_later(BEAT_SECONDS, self._beat)

    def _on_signal(self, number: signal.Signals) -> None:
        """The first asks, the second insists: streams are told so in their last event. A third waits for nothing."""
        if self._insisted:
            self._end_at_once()
        if self._stop.is_set():
            self._insisted = True
            self._http.insist()
            asyncio.get_running_loop().call_later(INSIST_SECONDS, self._end_at_once)
            return
        self._console.print("stopping; once more to stop at once", style="dim")
        self._stop.set()

    def _end(self) -> None:
        """As somebody asked over HTTP, who is answered first: the drain waits for it."""
        self._console.print("stopping, as asked", style="dim")
        self._stop.set()

    def _end_at_once(self) -> None:
        os._exit(INSISTED)
