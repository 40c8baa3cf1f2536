"""How many nodes of each role a run begins with, unless the user says. `picked` gets a reason for each choice."""

from afserve.errors import ConfigError
from afserve.launch.plan.cores import cores_in_words
from afserve.launch.plan.expert_slots import least_nodes
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.wishes import Share, Wishes
from afserve.member import MOST_NODES
from afserve.settings import in_range
from afserve.spec import ModelSpec


def counts_of(spec: ModelSpec, machine: Machine, wishes: Wishes, seats: int, picked: dict[str, str]) -> Share:
    """`seats` is how many NUMA nodes they may be bound to, 0 for none. Raises ConfigError."""
    if wishes.colocated and wishes.experts:
        raise ConfigError(
            "--colocated: the experts are in the attention nodes then; drop --experts", param="experts"
        )
    wishes.check_phases()
    for key, value in (("attention", wishes.attention), ("experts", wishes.experts)):
        if value is not None:
            in_range(f"--{key}", value, 1, MOST_NODES)
    attention = wishes.attention or _attention(machine, wishes, seats, picked)
    if wishes.colocated:
        return Share(attention, 0)
    experts = wishes.experts or _experts(spec, machine, wishes, seats, attention, picked)
    if experts > spec.experts:
        raise ConfigError(f"--experts: {experts} nodes, but the model has {spec.experts} experts")
    return Share(attention, experts)


def _attention(machine: Machine, wishes: Wishes, seats: int, picked: dict[str, str]) -> int:
    if gpus := _gpus(wishes):
        count, reason = max(1, gpus // 2 // wishes.engine.tensor_parallel), f"of {gpus} GPUs"
    elif seats:
        count, reason = beside(wishes.experts or 0, seats), _seated(seats)
    else:
        count, reason = max(1, min(machine.cores // 8, 4)), f"one per 8 of {cores_in_words(machine)}"
    picked["attention"] = f"{count}, {reason}"
    return count


def _experts(
    spec: ModelSpec, machine: Machine, wishes: Wishes, seats: int, attention: int, picked: dict[str, str]
) -> int:
    gpus, most = _gpus(wishes), min(spec.experts, 8)
    least = min(spec.experts, least_nodes(spec.experts, wishes))
    if gpus:
        usual, reason = gpus - attention * wishes.engine.tensor_parallel, f"of {gpus} GPUs"
    elif seats:
        usual, most, reason = beside(attention, seats), spec.experts, _seated(seats)
    else:
        usual, reason = machine.cores // 4, f"one per 4 of {cores_in_words(machine)}"
    experts = max(least, min(usual, most))
    picked["experts"] = f"{experts}, " + ("for the copies" if experts == least > 1 else reason)
    return experts


def _gpus(wishes: Wishes) -> int:
    return len(wishes.gpus) if wishes.gpus is not None and wishes.engine.device == "cuda" else 0


def beside(others: int, seats: int) -> int:
    """The fewest nodes with which each of `seats` has as many as any other. Example: 1 beside 3 on two, 2 beside 2."""
    return seats - others % seats


def _seated(seats: int) -> str:
    return f"for {seats} NUMA nodes"
