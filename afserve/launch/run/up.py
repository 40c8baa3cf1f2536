"""`afserve up`: from what the user asked for to a served API, and back to nothing.

Everything that can be refused is refused before anything is listened on or loaded. What then runs, in a process that
the supervisor starts and starts again, is in `serving`.
"""

import asyncio
import logging
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from afserve.config import FULL
from afserve.control.membership.recovery import OnLoss
from afserve.launch.plan.gpus import check_device
from afserve.launch.plan.wishes import UpFlags
from afserve.launch.processes.environment import forget_secrets
from afserve.launch.processes.http import settings_for
from afserve.launch.processes.streams import tolerate_lost_output
from afserve.launch.processes.supervisor import Supervisor, Term, keep_port
from afserve.launch.run.planned_run import PlannedRun, plan_run
from afserve.launch.run.serving import Serving
from afserve.launch.run.several import check_names, naming_model, shared, trace_files
from afserve.launch.run.traced import write_parts
from afserve.launch.sites.site import Site
from afserve.logs import configure
from afserve.server.http.settings import ServerSettings
from afserve.server.serve import bind
from afserve.tls import is_loopback, opened
from afserve.tracing.trace import check_writable, merge

log = logging.getLogger("afserve.launch")


def serve_here(asked: Sequence[UpFlags], sites: Sequence[Site]) -> None:
    """One entry of each per model; what is said of HTTP and of the run as a whole is the same in all.

    Returns when the user ended it; raises what else did.
    """
    tolerate_lost_output()
    flags = asked[0]
    _log(flags)
    limits = replace(flags.limits, log_level=flags.run.log_level)
    settings = settings_for(flags.listening, limits, elsewhere=flags.wishes.gateways > 0)
    if not (settings.api_keys or settings.keys_file or is_loopback(flags.listening.host)):
        log.warning("%s is open to other machines and asks for no key; see --api-keys", flags.listening.host)
    opened(flags.run.certs)  # what is wrong with them is said first
    for each in asked:
        check_device(each.wishes.engine.device)
    surveys, runs = [], []
    for number, (site, each) in enumerate(zip(sites, asked, strict=True), 1):
        with naming_model(each, number):
            surveys.append(site.survey(each))
    for number, (survey, site) in enumerate(zip(shared(surveys), sites, strict=True), 1):
        with naming_model(survey.flags, number):
            runs.append(plan_run(survey, settings, site))
    check_names(runs)
    _serve(runs, settings)


def _serve(runs: Sequence[PlannedRun], settings: ServerSettings) -> None:
    flags = runs[0].flags
    traces = trace_files(runs)
    for path in filter(None, (flags.run.record_routing, *traces)):
        check_writable(str(path))
    with bind(flags.listening.host, flags.listening.port) as sock, ExitStack() as until_end:
        if traces:
            # The nodes' parts outlive the run's own folder, which goes with the last node.
            runs = [
                _traced(run, until_end.enter_context(tempfile.TemporaryDirectory(prefix="afserve-trace-")))
                for run in runs
            ]
        runs = [_with_port(run, until_end) for run in runs]
        started = time.monotonic()

        def live(term: Term) -> None:
            asyncio.run(Serving(runs, settings, sock, term, started).run())

        forget_secrets()
        keepers = [run.site.lend() for run in runs]
        recovers = any(run.flags.wishes.on_loss == OnLoss.RECOVER for run in runs)
        try:
            Supervisor(live, recovers, keepers).run()
        except KeyboardInterrupt:
            for run in runs:
                run.site.kill()
            raise
        for run in runs if traces else ():
            run.site.stop()
        for run, path in zip(runs, traces):
            _merge_trace(run, path)


def _with_port(run: PlannedRun, until_end: ExitStack) -> PlannedRun:
    """Where its nodes join, kept for every controller of the run."""
    kept = until_end.enter_context(keep_port(run.assignment.listen, run.assignment.port))
    return replace(run, assignment=replace(run.assignment, port=kept.getsockname()[1]))


def _traced(run: PlannedRun, folder: str) -> PlannedRun:
    """Nodes of other hosts send their parts, those of this one write them."""
    where = run.assignment
    sent = where.managed or where.awaited or bool(where.elsewhere)
    return replace(run, topology=run.topology.traced(folder, sent=sent))


def _merge_trace(run: PlannedRun, path: Path) -> None:
    """Once every node has written its part."""
    folder = Path(run.topology.deployment.trace_folder)
    write_parts(folder)
    dropped = merge(list(folder.glob("*.trace")), path)
    lost = f", {dropped:,} events were too many" if dropped else ""
    Console(stderr=True).print(f"trace: {path}{lost}; open it at ui.perfetto.dev", style="dim")


def _log(flags: UpFlags) -> None:
    configure(flags.run.log_level, flags.limits.log_format)
    if flags.run.verify == FULL and not Console(stderr=True).is_terminal:
        logging.getLogger("afserve.verify").setLevel(logging.INFO)  # lines instead of bars
