"""One model's run before anything is started: its nodes, where they are, what carries rows, who rebalances."""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile

from afserve.control.membership.balancing import BalanceRules
from afserve.errors import ConfigError, DoesNotFitError
from afserve.families.table import load_spec
from afserve.launch.plan.drafting import planned_spec
from afserve.launch.plan.footprint import needs
from afserve.launch.plan.gpus import Gpus
from afserve.launch.plan.hosts import HostAssignment
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.models import FoundModel
from afserve.launch.plan.node_memory import smallest
from afserve.launch.plan.topology import Topology, choose
from afserve.launch.plan.transports import check_kv_transport, choose_transport
from afserve.launch.plan.ways_on import ways_on
from afserve.launch.plan.wishes import UpFlags
from afserve.launch.run.piloted import PilotPlan, pilot_plan
from afserve.launch.sites.site import Site
from afserve.launch.sites.survey import Survey
from afserve.member import Role
from afserve.server.access.classes import read_classes
from afserve.server.http.settings import ServerSettings
from afserve.settings import in_range


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """`names` are what clients may call the model, the one that answers have first."""

    flags: UpFlags
    found: FoundModel
    names: tuple[str, ...]
    topology: Topology
    balance: BalanceRules
    assignment: HostAssignment
    site: Site
    pilot: PilotPlan | None = None


def plan_run(survey: Survey, settings: ServerSettings, site: Site) -> PlannedRun:
    """Raises ConfigError or DoesNotFitError for what cannot be."""
    flags, found, gpus = survey.flags, survey.found, survey.gpus
    balance = balance_rules(flags.run.rebalance, flags.wishes.redundant_experts)
    flags = replace(flags, wishes=replace(flags.wishes, rebalance=balance.act))
    topology = plan_here(flags, found, survey.machine, gpus)
    assignment = survey.assigned or HostAssignment.all_here(topology.deployment, gpus)
    if flags.wishes.engine.kv_ssd and any(one.node.role is Role.ATTENTION for one in assignment.here):
        check_disk_tier(flags.wishes.engine.kv_ssd)
    hosted, certified = survey.devices or assignment.hosted, flags.run.certs is not None
    check_kv_transport(flags.wishes.engine.kv_transport, hosted, certified=certified)
    choice = choose_transport(flags.run.transport, hosted, gpus, certified=certified)
    topology = topology.with_transport(choice.kind, choice.reason).verified(flags.run.verify)
    topology = topology.told(flags.run.log_level, settings.log_format, settings.otlp_endpoint or "")
    if flags.source.load_format == "safetensors":
        found.warn_of_tokenizer()
    names = flags.listening.names(found.name)
    if flags.pilot.pilot_idle and flags.run.models is None:
        raise ConfigError("--pilot-idle: only models of --models sleep; drop it", param="pilot_idle")
    classes = read_classes(settings.classes_file).all if settings.classes_file else ()
    pilot = pilot_plan(flags.pilot, topology, settings.ttft, settings.tpot, classes)
    return PlannedRun(flags, found, names, topology, topology.keeping(balance), assignment, site, pilot)


def plan_here(flags: UpFlags, found: FoundModel, machine: Machine, gpus: Gpus) -> Topology:
    """How many nodes of which size. Raises DoesNotFitError where the machine is too small, with the ways on."""
    source = replace(flags.source, path=str(found.folder), name=found.name)
    wishes = flags.wishes
    whole = load_spec(found.folder)
    spec = planned_spec(source, wishes.engine.drafts())
    if wishes.engine.device != "cpu" and not wishes.hosts:
        wishes = replace(wishes, gpus=gpus.chosen(wishes.engine.device))
    try:
        if source.load_format == "safetensors" and not found.weights:
            needed = needs(found.published(spec), source, smallest(machine, wishes), wishes)
            stored = f" Those that are published are {found.stored}:" * bool(found.stored)
            raise DoesNotFitError(
                f"{found.name} is known by its shape only; there are no weights here.{stored}\n{needed}",
                param="model",
            )
        return choose(spec, source, machine, wishes)
    except DoesNotFitError as error:
        if error.param != "model":
            raise
        further = ways_on(whole, source, machine, wishes, found.hub, weights=found.weights)
        raise DoesNotFitError(f"{error.message}\n{further}", param="model") from None


def check_disk_tier(folder: str) -> None:
    """Makes the folder of --kv-ssd. Raises ConfigError where no file can be written there: nodes that cannot use it
    serve without it, which nobody would notice who asked for it."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"--kv-ssd {folder}: {error.strerror}; give a folder that it may write to", param="kv_ssd"
        ) from error


def balance_rules(when: str | None, redundant_experts: int) -> BalanceRules:
    """`when` is auto, off or a number of seconds; without it auto where there are redundant experts.

    Copies, hosts and spare slots are the topology's (`Topology.keeping`). Raises ConfigError for anything else.
    """
    when = when or ("auto" if redundant_experts else "off")
    if when in ("auto", "off"):
        return BalanceRules(act=when == "auto")
    try:
        seconds = float(when)
    except ValueError:
        raise ConfigError(f"--rebalance: {when!r} is not auto, off or a number of seconds") from None
    in_range("--rebalance", seconds, 0.1, 86_400)
    return BalanceRules(act=True, every=seconds)
