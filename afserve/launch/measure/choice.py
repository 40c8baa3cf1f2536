"""What `afserve up` would choose for a model on this machine, in values: nodes, threads, and in what experts fit."""

from dataclasses import dataclass

from afserve.config import EXPERT_DTYPES, EngineSettings, ModelSource
from afserve.errors import ConfigError, DoesNotFitError
from afserve.families.table import load_spec
from afserve.kernels.isa import used_isa
from afserve.launch.plan.footprint import kept_dtype, role_bytes
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.models import FoundModel
from afserve.launch.plan.topology import Topology, choose
from afserve.launch.plan.wishes import Wishes
from afserve.member import Role
from afserve.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class UpChoice:
    """`expert_dtype`: the first of auto, int8 and int4 with which the model fits; empty where it fits with none, and
    then there are no nodes. `weights`: bytes of all of them on one attention node and over all expert nodes, by
    expert dtype."""

    model: str
    isa: str
    expert_dtype: str
    weights: dict[str, int]
    attention: int = 0
    experts: int = 0
    threads: int = 0
    lends_cores: bool = False
    kv_tokens: int = 0


def choice_here(found: FoundModel, machine: Machine, isa: str) -> UpChoice:
    spec, source = load_spec(found.folder), ModelSource(str(found.folder), found.name)
    weights: dict[str, int] = {}
    for dtype in EXPERT_DTYPES:
        wishes = Wishes(engine=EngineSettings(expert_dtype=dtype, isa=isa))
        weights[dtype] = sum(role_bytes(spec, source, kept_dtype(spec, source, wishes)))
        if (topology := _fitting(spec, source, machine, wishes)) is not None:
            run, engine = topology.deployment, topology.deployment.engine
            nodes = run.count(Role.ATTENTION), run.count(Role.EXPERT)
            lends, tokens = bool(engine.share_cores), topology.kv_tokens_of_node
            return UpChoice(found.name, used_isa(isa), dtype, weights, *nodes, engine.threads, lends, tokens)
    return UpChoice(found.name, used_isa(isa), "", weights)


def _fitting(spec: ModelSpec, source: ModelSource, machine: Machine, wishes: Wishes) -> Topology | None:
    """None where it does not fit so, or nothing multiplies its experts so."""
    try:
        return choose(spec, source, machine, wishes)
    except (DoesNotFitError, ConfigError):
        return None
