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
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from afserve.config import FULL
from afserve.control.membership.balancing import BalanceRules
from afserve.control.membership.recovery import OnLoss
from afserve.errors import ConfigError, DoesNotFitError
from afserve.families.table import load_spec
from afserve.launch.awaited import awaiting
from afserve.launch.banner import banner
from afserve.launch.cluster import Cluster, read_cluster
from afserve.launch.gateway_options import options_of
from afserve.launch.gpus import Gpus, check_device, probe_gpus
from afserve.launch.hosts import HostAssignment, HostedNode, assign, look_up, own_addresses
from afserve.launch.http import Http, HttpHere, HttpInProcesses, settings_for
from afserve.launch.launcher import Launcher
from afserve.launch.loading import LoadingBars
from afserve.launch.local_run import GatewayProcesses, LocalRun
from afserve.launch.machine import Machine, this_machine
from afserve.launch.models import FoundModel, find_model
from afserve.launch.other_hosts import OtherHosts
from afserve.launch.processes import NodeProcesses
from afserve.launch.ray_launcher import RayLauncher
from afserve.launch.ray_run import set_aside
from afserve.launch.rebalance import balance_rules
from afserve.launch.supervisor import BEAT_SECONDS, INSISTED, Supervisor, Term, keep_port
from afserve.launch.topology import Topology, choose, needs
from afserve.launch.transports import choose_transport
from afserve.launch.wishes import UpFlags
from afserve.server.serve import bind
from afserve.server.settings import ServerSettings
from afserve.settings import flag_of
from afserve.tls import check_exposed, is_loopback, opened
from afserve.tokenizer import Tokenizer
from afserve.trace import check_writable, merge

log = logging.getLogger("afserve.launch")
INSIST_SECONDS = 1.0  # from the second Ctrl-C: for streams to be told
_IN_FILE = {  # flag -> the key of a cluster file that says the same
    "model": "model",
    "attention": "attention.nodes",
    "experts": "experts.nodes",
    "colocated": "experts.nodes",
    "micro_batches": "micro_batches",
    "device": "host.hardware",
}


def serve_here(flags: UpFlags, processes: NodeProcesses) -> None:
    """Returns when the user ended it; raises what else did."""
    _log(flags)
    settings = settings_for(flags.listening, flags.limits)
    if not settings.api_keys and not is_loopback(flags.listening.host):
        log.warning(
            "%s is open to other machines and asks for no key; see --api-key-file", flags.listening.host
        )
    opened(flags.run.certs)  # what is wrong with them is said first
    check_device(flags.wishes.engine.device)
    with ExitStack() as until_end:
        launcher: Launcher = processes
        if flags.ray.ray is not None:
            launcher = ray = until_end.enter_context(
                RayLauncher(processes, insecure=flags.run.insecure_nodes)
            )
            site = _on_ray(flags, ray, processes)
        elif flags.run.elsewhere:
            site = _elsewhere(flags, processes)
        else:
            site = _here(flags, processes)
        _serve(site, settings, launcher, processes)


@dataclass(frozen=True, slots=True)
class _Site:
    """Where a run takes place. `assigned` None: all of it on this machine; `devices` tell transports who shares one."""

    flags: UpFlags
    found: FoundModel
    machine: Machine
    gpus: Gpus
    assigned: HostAssignment | None = None
    devices: tuple[HostedNode, ...] = ()


def _here(flags: UpFlags, processes: NodeProcesses) -> _Site:
    """This machine, or the hosts of a cluster file."""
    cluster = None if flags.run.cluster is None else read_cluster(flags.run.cluster)
    device = flags.wishes.engine.device if cluster is None else cluster.device
    experts_on_gpus = cluster is not None and cluster.expert_device != "cpu"
    gpus = Gpus() if device == "cpu" and not experts_on_gpus else probe_gpus()
    flags, assigned = _assigned(flags, cluster, gpus)
    found = find_model(flags.run.model, processes.folder)
    if assigned is not None:
        _check_elsewhere(flags, assigned, found, processes.folder)
    return _Site(flags, found, this_machine(), gpus, assigned, () if assigned is None else assigned.hosted)


def _elsewhere(flags: UpFlags, processes: NodeProcesses) -> _Site:
    if flags.run.cluster is not None or flags.run.ssh:
        raise ConfigError(
            "--elsewhere: starts no node of a --cluster FILE; drop one of them", param="elsewhere"
        )
    found = find_model(flags.run.model, processes.folder)
    wishes, assignment, machine, gpus = awaiting(flags.run, flags.wishes, this_machine())
    _check_elsewhere(flags, assignment, found, processes.folder)
    return _Site(replace(flags, wishes=wishes), found, machine, gpus, assignment, assignment.hosted)


def _on_ray(flags: UpFlags, launcher: RayLauncher, processes: NodeProcesses) -> _Site:
    """The hosts that Ray finds. Raises ConfigError before Ray is asked, where a flag fits no cluster."""
    for name in ("cluster", "ssh", "elsewhere"):
        if getattr(flags.run, name):
            raise ConfigError(f"--{name}: Ray chooses the hosts; drop it or --ray", param=name)
    found = find_model(flags.run.model, processes.folder)
    plan = set_aside(launcher, flags.ray, flags.wishes, found, flags.run.listen)
    _check_elsewhere(flags, plan.assignment, found, processes.folder)
    flags = replace(flags, wishes=plan.wishes)
    return _Site(flags, found, plan.machine, plan.gpus, plan.assignment, plan.devices)


def _serve(site: _Site, settings: ServerSettings, launcher: Launcher, processes: NodeProcesses) -> None:
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
    logging.basicConfig(level=flags.run.log_level.upper(), format="%(asctime)s %(levelname)-7s %(message)s")
    if flags.run.verify == FULL and not Console(stderr=True).is_terminal:
        logging.getLogger("afserve.verify").setLevel(logging.INFO)  # lines instead of bars


def _assigned(flags: UpFlags, cluster: Cluster | None, gpus: Gpus) -> tuple[UpFlags, HostAssignment | None]:
    """What a cluster file says, as flags, and who runs where. Raises ConfigError where a flag says otherwise."""
    if cluster is None:
        for name in ("listen", "ssh"):
            if getattr(flags.run, name):
                raise ConfigError(
                    f"--{name}: is for other hosts, of a --cluster FILE for example", param=name
                )
        return flags, None
    assignment = assign(cluster, flags.run.listen, look_up, own_addresses())
    _check_cuda(cluster, assignment, gpus)
    found = replace(
        flags,
        run=replace(flags.run, model=cluster.model),
        wishes=replace(
            flags.wishes,
            attention=cluster.attention,
            experts=cluster.experts or None,
            colocated=not cluster.experts,
            micro_batches=str(cluster.micro_batches),
            engine=replace(flags.wishes.engine, device=cluster.device),
            expert_device=cluster.expert_device,
            batch=cluster.batch,
            hosts=assignment.shares(),
            expert_hosts=assignment.expert_hosts(),
        ),
    )
    asked, wanted = _in_file(flags), _in_file(found)
    for name, key in _IN_FILE.items():
        if name in flags.given and asked[name] != wanted[name]:
            flag = flag_of(name) if name == "colocated" else f"{flag_of(name)} {asked[name]}"
            raise ConfigError(
                f"{flag}: {cluster.file} has {key} = {_as_written(cluster, name)}; drop the flag or edit the file",
                param=name,
            )
    return found, assignment


def _in_file(flags: UpFlags) -> dict[str, object]:
    """What a cluster file says too, by the flags' names."""
    wishes = flags.wishes
    return {
        "model": flags.run.model,
        "attention": wishes.attention,
        "experts": wishes.experts,
        "colocated": wishes.colocated,
        "micro_batches": wishes.micro_batches,
        "device": wishes.engine.device,
    }


def _as_written(cluster: Cluster, flag: str) -> str:
    if flag == "device":
        return cluster.hardware_of("attention")
    return str(cluster.experts if flag == "colocated" else getattr(cluster, flag))


def _check_cuda(cluster: Cluster, assignment: HostAssignment, gpus: Gpus) -> None:
    """Of the hosts that are this machine; the others' nodes say it themselves."""
    for mine in assignment.here:
        if mine.device != "cpu" and int(mine.device.partition(":")[2]) >= len(gpus):
            kind = next(h.hardware for h in cluster.hosts if h.address == mine.host)
            raise ConfigError(
                f"--cluster {cluster.file}: host {mine.host}: {kind} needs {mine.device}, but this machine has "
                f'{len(gpus)} CUDA devices; hardware = "cpu-host" runs it on the CPU',
                param="cluster",
            )


def _check_elsewhere(flags: UpFlags, assignment: HostAssignment, found: FoundModel, scratch: Path) -> None:
    """What works on one machine only."""
    if not assignment.elsewhere:
        return
    check_exposed("nodes on other hosts", assignment.listen, flags.run.certs, flags.run.insecure_nodes)
    if flags.run.trace:
        raise ConfigError("--trace: the nodes on other hosts cannot write it here; drop it", param="trace")
    if found.folder.is_relative_to(scratch):
        raise ConfigError(
            f"{found.name}: only its shape is known, and the other hosts have no folder of it; write model.path of "
            "a folder that every host has",
            param="model",
        )


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
        self._name = flags.listening.served_model_name or found.name
        self._sock = sock
        self._processes = processes
        self._console = Console(stderr=True)
        self._stop = asyncio.Event()
        self._insisted = False
        self._record = flags.run.record_routing
        options = options_of(self._name, str(found.tokenizer), settings)
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
        self._console.print(banner(self._topology, self._name, self._url(), seconds))

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
