"""How many slots an expert node has for each MoE layer, and what for. Values in, values out."""

from dataclasses import dataclass

from afserve.errors import ConfigError
from afserve.launch.plan.wishes import END, Wishes
from afserve.placement.optimizer.problem import Nodes
from afserve.placement.placement import Placement
from afserve.placement.rebalance.copies import copied, least_slots
from afserve.settings import in_range


@dataclass(frozen=True, slots=True)
class ExpertSlots:
    """Per node and layer: `used` by placements, `moving` to change them through, `spare` for recovery alone."""

    used: int = 0
    moving: int = 0
    spare: int = 0

    @property
    def total(self) -> int:
        return self.used + self.moving + self.spare


def without_spare(experts: int, nodes: int, wishes: Wishes) -> ExpertSlots:
    """What placements need. `nodes` is 0 where the run is colocated. Raises ConfigError where nodes do not suffice."""
    copies, redundant = wishes.expert_copies, wishes.redundant_experts
    if not nodes:
        _check_colocated(wishes)
        return ExpertSlots(experts)
    if copies < 1:
        raise ConfigError(f"--expert-copies: {copies} is less than 1")
    if copies > nodes:
        raise ConfigError(
            f"--expert-copies: {copies} copies of every expert need {copies} expert nodes, here are {nodes}; "
            f"give --experts {copies}, or fewer copies"
        )
    _check_redundant(redundant, experts, nodes, copies)
    used = -(-(experts * copies + redundant) // nodes)
    if copies > 1:
        used = max(used, least_slots(experts, copies, nodes, wishes.expert_hosts))
    return ExpertSlots(used, moving=1 if wishes.rebalance else 0)


def least_nodes(experts: int, wishes: Wishes) -> int:
    """As many expert nodes as the copies need that were asked for: a node holds each expert at most once."""
    return max(1, wishes.expert_copies) + -(-max(0, wishes.redundant_experts) // experts)


def _check_redundant(redundant: int, experts: int, nodes: int, copies: int) -> None:
    most = experts * (nodes - copies)
    if not 0 <= redundant <= most:
        raise ConfigError(
            f"--redundant-experts: {redundant} is outside [0, {most}]: a node holds each of the {experts} experts at "
            f"most once, and --experts is {nodes}"
        )


def spare_for_recovery(experts: int, nodes: int, slots: ExpertSlots, wishes: Wishes, affordable: int) -> int:
    """As asked; else what the others need to hold a lost node's experts as well, at most `affordable`.

    None where a loss ends the run.
    """
    if not nodes:
        return 0
    if wishes.spare_slots is not None:
        _check_spare(wishes.spare_slots, experts, slots.used)
        return wishes.spare_slots
    left = nodes - 1
    if not left or wishes.on_loss == END:
        return 0
    wanted = -(-experts * min(wishes.expert_copies, left) // left) - slots.used
    return max(0, min(wanted, affordable))


def _check_spare(spare: int, experts: int, used: int) -> None:
    most = max(0, experts - used)
    if not 0 <= spare <= most:
        raise ConfigError(
            f"--spare-slots: {spare} is outside [0, {most}]: {used} slots of each node hold experts, of which a layer "
            f"has {experts}"
        )


def first_placement(layers: int, experts: int, nodes: int, slots: ExpertSlots, wishes: Wishes) -> Placement:
    """What expert nodes are started with: experts in order, or each as often as was asked for."""
    if wishes.expert_copies == 1 or not nodes:
        return Placement.contiguous(
            layers=layers, experts=experts, nodes=max(1, nodes), slots_per_node=slots.total
        )
    pool = Nodes((slots.used,) * nodes, host=wishes.expert_hosts)
    return copied(
        layers=layers, experts=experts, copies=wishes.expert_copies, nodes=pool, slots_per_node=slots.total
    )


def _check_colocated(wishes: Wishes) -> None:
    if wishes.rebalance:
        raise ConfigError("--rebalance: a colocated run has no expert nodes to balance")
    in_range("--redundant-experts", wishes.redundant_experts, 0, 0)
    if wishes.expert_copies != 1:
        raise ConfigError(
            f"--expert-copies {wishes.expert_copies}: a colocated run has all experts in every attention node; drop it"
        )
    if wishes.spare_slots:
        raise ConfigError(
            f"--spare-slots {wishes.spare_slots}: a colocated run has no expert nodes to lose; drop it"
        )
