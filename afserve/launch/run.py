"""`afserve up`: from what the user asked for to a served API, and back to nothing.

It puts topology, nodes, controller and HTTP together, shows the way, and ends everything on Ctrl-C, SIGTERM or
the loss of a node. Everything that can be refused is refused before anything is listened on or loaded.
"""

import asyncio
import gc
import ipaddress
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
from afserve.errors import ConfigError, DoesNotFitError
from afserve.families.table import load_spec
from afserve.launch.banner import banner
from afserve.launch.cluster import Cluster, read_cluster
from afserve.launch.gateway_options import options_of
from afserve.launch.gpus import Gpus, check_device, probe_gpus
from afserve.launch.hosts import TOGETHER_SECONDS, HostAssignment, assign, look_up, own_addresses
from afserve.launch.http import Http, HttpHere, HttpInProcesses, settings_for
from afserve.launch.loading import LoadingBars
from afserve.launch.local_run import GatewayProcesses, LocalRun
from afserve.launch.machine import Machine, this_machine
from afserve.launch.models import FoundModel, find_model
from afserve.launch.processes import NodeProcesses
from afserve.launch.supervisor import INSISTED, Supervisor, Term, keep_port
from afserve.launch.topology import Topology, choose, needs
from afserve.launch.transports import choose_transport
from afserve.launch.wishes import UpFlags
from afserve.server.serve import bind
from afserve.server.settings import ServerSettings
from afserve.settings import flag_of, in_range
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
    if not settings.api_keys and _reachable(flags.listening.host):
        log.warning(
            "%s is open to other machines and asks for no key; see --api-key-file", flags.listening.host
        )
    cluster = None if flags.run.cluster is None else read_cluster(flags.run.cluster)
    check_device(flags.wishes.engine.device)
    device = flags.wishes.engine.device if cluster is None else cluster.device
    gpus = Gpus() if device == "cpu" else probe_gpus()
    flags, assigned = _assigned(flags, cluster, gpus)
    found = find_model(flags.run.model, processes.folder)
    balance = balance_rules(flags)
    flags = replace(flags, wishes=replace(flags.wishes, rebalance=balance.act))
    topology = plan_here(flags, found, this_machine(), gpus)
    balance = topology.keeping(balance)
    assignment = assigned or HostAssignment.all_here(topology.deployment, gpus)
    if assigned is not None:
        _check_elsewhere(flags, assigned, found, processes.folder)
    choice = choose_transport(flags.run.transport, assignment.hosted, gpus)
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
            up = _Up(topology, found, settings, sock, processes, flags, balance, assignment, term, started)
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


def balance_rules(flags: UpFlags) -> BalanceRules:
    """`--rebalance`: auto where there are redundant experts, unless the user says."""
    when = flags.run.rebalance or ("auto" if flags.wishes.redundant_experts else "off")
    if when in ("auto", "off"):
        return BalanceRules(act=when == "auto")
    try:
        seconds = float(when)
    except ValueError:
        raise ConfigError(f"--rebalance: {when!r} is not auto, off or a number of seconds") from None
    in_range("--rebalance", seconds, 0.1, 86_400)
    return BalanceRules(act=True, every=seconds)


def _assigned(flags: UpFlags, cluster: Cluster | None, gpus: Gpus) -> tuple[UpFlags, HostAssignment | None]:
    """What a cluster file says, as flags, and who runs where. Raises ConfigError where a flag says otherwise."""
    if cluster is None:
        if flags.run.listen is not None:
            raise ConfigError("--listen: is for the nodes on other hosts of a --cluster FILE", param="listen")
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
        return cluster.hosts[0].hardware
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
    if flags.run.trace:
        raise ConfigError("--trace: the nodes on other hosts cannot write it here; drop it", param="trace")
    if found.folder.is_relative_to(scratch):
        raise ConfigError(
            f"{found.name}: only its shape is known, and the other hosts have no folder of it; write model.path of "
            "a folder that every host has",
            param="model",
        )


def _reachable(host: str) -> bool:
    """Whether others than this machine's users can connect."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


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
        processes: NodeProcesses,
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
        )
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

    async def _save_recording(self) -> None:
        if self._record is not None:
            data = await self._run.frontend.record_routing(False)
            self._record.write_bytes(data)
            self._console.print(f"routing counts: {self._record} ({len(data):,} bytes)", style="dim")

    def _show_commands(self) -> None:
        """How to start what is not started from here."""
        assignment, processes = self._run.assignment, self._processes
        if not assignment.elsewhere:
            return
        missing = len(assignment.elsewhere)
        lines = [f"waiting {TOGETHER_SECONDS:.0f} s for {missing} node{'s' * (missing > 1)} elsewhere:"]
        lines += assignment.commands(self._run.controller.address, processes.token_file)
        for line in lines:
            self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    async def _show_start(self) -> None:
        if self._term.number:
            await self._run.wait_ready()
            seconds = time.monotonic() - self._started
            log.warning("the new controller serves, with the nodes that were there; it took %.2f s", seconds)
            return
        self._show_commands()
        with LoadingBars(self._console) as bars:
            self._run.show_progress(bars.update, bars.verify)
            await self._run.wait_ready()
        seconds = time.monotonic() - self._started
        self._console.print(banner(self._topology, self._name, self._url(), seconds))

    def _url(self) -> str:
        host, port = self._sock.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _listen_for_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

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

    def _end_at_once(self) -> None:
        os._exit(INSISTED)
