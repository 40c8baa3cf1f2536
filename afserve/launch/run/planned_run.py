"""One model's run before anything is started: its nodes, where they are, what carries rows, who rebalances."""

from dataclasses import dataclass, replace

from afserve.control.membership.balancing import BalanceRules
from afserve.errors import DoesNotFitError
from afserve.families.table import load_spec
from afserve.launch.plan.footprint import needs
from afserve.launch.plan.gpus import Gpus
from afserve.launch.plan.hosts import HostAssignment
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.models import FoundModel
from afserve.launch.plan.rebalance import balance_rules
from afserve.launch.plan.topology import Topology, choose
from afserve.launch.plan.transports import check_kv_transport, choose_transport
from afserve.launch.plan.ways_on import ways_on
from afserve.launch.plan.wishes import UpFlags
from afserve.launch.processes.launcher import Launcher
from afserve.launch.sites.site import RunSite
from afserve.server.http.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """`names` are what clients may call the model, the one that answers have first."""

    flags: UpFlags
    found: FoundModel
    names: tuple[str, ...]
    topology: Topology
    balance: BalanceRules
    assignment: HostAssignment
    launcher: Launcher


def plan_run(site: RunSite, settings: ServerSettings, launcher: Launcher) -> PlannedRun:
    """Raises ConfigError or DoesNotFitError for what cannot be."""
    flags, found, gpus = site.flags, site.found, site.gpus
    balance = balance_rules(flags.run.rebalance, flags.wishes.redundant_experts)
    flags = replace(flags, wishes=replace(flags.wishes, rebalance=balance.act))
    topology = plan_here(flags, found, site.machine, gpus)
    assignment = site.assigned or HostAssignment.all_here(topology.deployment, gpus)
    hosted, certified = site.devices or assignment.hosted, flags.run.certs is not None
    check_kv_transport(flags.wishes.engine.kv_transport, hosted, certified=certified)
    choice = choose_transport(flags.run.transport, hosted, gpus, certified=certified)
    topology = topology.over(choice.kind, choice.reason).verified(flags.run.verify)
    topology = topology.told(flags.run.log_level, settings.log_format, settings.otlp_endpoint or "")
    if flags.source.load_format == "safetensors":
        found.warn_of_tokenizer()
    names = flags.listening.names(found.name)
    return PlannedRun(flags, found, names, topology, topology.keeping(balance), assignment, launcher)


def plan_here(flags: UpFlags, found: FoundModel, machine: Machine, gpus: Gpus) -> Topology:
    """How many nodes of which size. Raises DoesNotFitError where the machine is too small, with the ways on."""
    source = replace(flags.source, path=str(found.folder), name=found.name)
    wishes = flags.wishes
    whole = load_spec(found.folder)
    spec = whole if source.layers is None else whole.cut(source.layers)
    if wishes.engine.device != "cpu" and not wishes.hosts:
        wishes = replace(wishes, gpus=gpus.chosen(wishes.engine.device))
    try:
        if source.load_format == "safetensors" and not found.weights:
            needed = needs(spec, source, machine, wishes.engine.expert_dtype, wishes.engine.dense_dtype)
            raise DoesNotFitError(
                f"{found.name} is known by its shape only; there are no weights here.\n{needed}",
                param="model",
            )
        return choose(spec, source, machine, wishes)
    except DoesNotFitError as error:
        if error.param != "model":
            raise
        further = ways_on(whole, source, machine, wishes, found.hub, weights=found.weights)
        raise DoesNotFitError(f"{error.message}\n{further}", param="model") from None
