"""The question for the optimizer: nodes, loads, prices and wishes, checked once.

Values only. Nothing is decided here; `balance.py` reads a `Problem` and answers it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from afserve.errors import ConfigError
from afserve.placement.placement import Placement
from afserve.placement.placement_text import MOST_LOAD

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Throttle = Callable[
    [], None
]  # called between the steps of a long search: whoever shares its processor waits there


@dataclass(frozen=True, slots=True)
class Nodes:
    """Expert nodes. `slots[n]` is per layer; `speed` is relative; `group` is a rack, `host` a machine inside one.

    Racks and hosts are failure domains: what stands in one of them may be lost together.
    """

    slots: tuple[int, ...]
    speed: tuple[float, ...] = ()
    group: tuple[int, ...] = ()
    dead: frozenset[int] = frozenset()
    host: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.slots)
        if count == 0:
            raise ConfigError("a placement needs at least one expert node")
        for name, values in (("speed", self.speed), ("group", self.group), ("host", self.host)):
            if values and len(values) != count:
                raise ConfigError(
                    f"{len(values)} values of {name} for {count} expert nodes: give one per node"
                )
        if min(self.slots) < 0:
            raise ConfigError(f"a node cannot have {min(self.slots)} slots: give 0 or more")
        if any(not np.isfinite(s) or s <= 0 for s in self.speed):
            raise ConfigError(f"node speeds must be finite and above 0, not {list(self.speed)}")
        if any(not 0 <= n < count for n in self.dead):
            raise ConfigError(f"dead nodes {sorted(self.dead)} are not all in [0, {count})")
        if (
            self.host
            and self.group
            and len(set(zip(self.host, self.group, strict=True))) > len(set(self.host))
        ):
            raise ConfigError("a host stands in two racks: give every node of a host the same rack")

    @classmethod
    def even(
        cls, nodes: int, slots: int, *, groups: int = 1, per_host: int = 1, dead: frozenset[int] = frozenset()
    ) -> "Nodes":
        """`slots` counts all nodes together; the first ones get one more where it does not divide.

        `per_host` nodes in a row share a host, whole hosts in a row share one of `groups` racks.
        """
        if nodes < 1:
            raise ConfigError(f"a placement needs at least one expert node, not {nodes}")
        if not 1 <= per_host <= nodes:
            raise ConfigError(f"{nodes} nodes cannot stand {per_host} to a host: give 1 to {nodes}")
        hosts = -(-nodes // per_host)
        if not 1 <= groups <= hosts:
            what = "nodes" if per_host == 1 else f"hosts of {per_host} nodes"
            raise ConfigError(f"{hosts} {what} cannot stand in {groups} groups: give 1 to {hosts}")
        if slots < 0:
            raise ConfigError(f"{slots} slots: give at least one per expert")
        width = tuple(slots // nodes + (n < slots % nodes) for n in range(nodes))
        host = tuple(n // per_host for n in range(nodes))
        group = tuple(h * groups // hosts for h in host)
        return cls(width, group=group, dead=dead, host=host if per_host > 1 else ())

    def __len__(self) -> int:
        return len(self.slots)

    def usable_slots(self) -> Ints:
        """Usable slots per node: 0 on a dead one."""
        return np.array([0 if n in self.dead else s for n, s in enumerate(self.slots)], dtype=np.int64)

    def pace(self) -> Floats:
        """Relative speed per node, scaled so that live nodes average 1."""
        speed = np.array(self.speed or (1.0,) * len(self.slots))
        live = self.usable_slots() > 0
        return speed / speed[live].mean() if live.any() else speed

    def racks(self) -> Ints:
        return np.array(self.group or (0,) * len(self.slots), dtype=np.int64)

    def hosts(self) -> Ints:
        """Where none are given, every node is a host of its own."""
        return np.array(self.host or range(len(self.slots)), dtype=np.int64)

    def domains(self, experts: int, copies: int) -> Ints:
        """domain_N, numbered from 0: racks, else hosts, else nodes, the widest in which all copies can stand apart.

        Copies in different racks are on different hosts, too.
        """
        kinds = [np.unique(kind, return_inverse=True)[1].ravel() for kind in (self.racks(), self.hosts())]
        nodes: Ints = np.arange(len(self.slots))
        return next((kind for kind in kinds if self.holds(experts, copies, kind)), nodes)

    def holds(self, experts: int, copies: int, domain_N: Ints) -> bool:
        """Whether `copies` of every expert fit, each in a domain of its own: a domain takes an expert once."""
        room_D = np.bincount(domain_N, weights=self.usable_slots().clip(max=experts)).clip(max=experts)
        return int(room_D.sum()) >= copies * experts


@dataclass(frozen=True, slots=True)
class MovePrice:
    """What filling one slot costs: its bytes over a link that serving uses too.

    A plan that fills k slots on its busiest node takes k * expert_bytes / link_bytes_per_s seconds, of which
    `interference` is lost to serving. It pays when the balance gained over `horizon_s` seconds is more.
    """

    expert_bytes: float
    link_bytes_per_s: float
    horizon_s: float = 60.0
    interference: float = 0.25

    def move_seconds(self, busiest: int) -> float:
        return self.interference * busiest * self.expert_bytes / self.link_bytes_per_s


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Seconds of a node in one layer: fixed + per_row * rows + per_expert * (distinct activated experts).

    `rows` is how many rows (tokens x top-k) one step brings to the layer over all nodes. An expert that expects
    r rows on a node is activated with probability 1 - exp(-r): independent arrivals.
    """

    per_row: float
    per_expert: float
    rows: float
    fixed: float = 0.0

    def cost(self, rows: Floats) -> Floats:
        """Expected seconds of each replica that expects `rows` rows, without the fixed part."""
        cost: Floats = self.per_row * rows + self.per_expert * -np.expm1(-rows)
        return cost


@dataclass(frozen=True, slots=True)
class Problem:
    """`load_CLE` holds rows per (scenario, layer, expert), scenarios scaled alike per layer.

    moves: how many slots may be filled with an expert that was not on that node (None: any number). memory:
    slots per node over all layers together; the optimizer then chooses the width of each layer. protect:
    (layer, expert) pairs that must survive the loss of any one node (and rack, with two or more). copies: on how many
    nodes every expert stands at least, in different racks or hosts where there is room for that. prior: the
    weight, against all scenarios together, of one more in which all experts are alike: it stands for what
    nobody has seen. Below 0 (the default): what the scenarios' agreement suggests (`uncertainty.py`), 0 with one
    scenario, which is then taken as known.
    """

    load_CLE: Floats
    nodes: Nodes
    weight_C: tuple[float, ...] = ()
    current: Placement | None = None
    moves: int | None = None
    price: MovePrice | None = None
    time: TimeModel | None = None
    memory: int | None = None
    protect: frozenset[tuple[int, int]] = frozenset()
    prior: float = -1.0
    copies: int = 1

    def __post_init__(self) -> None:
        _check(self)

    @property
    def weights(self) -> Floats:
        scenarios = len(self.load_CLE)
        raw = np.array(self.weight_C or (1.0,) * scenarios)
        total: Floats = raw / raw.sum()
        return total


def unthrottled() -> None:
    """The breath of a search that has the processor to itself."""


def scenarios(loads: ArrayLike | Sequence[ArrayLike]) -> Floats:
    """load_CLE, checked, from one load (layers x experts) or several (scenarios x layers x experts).

    Raises ConfigError: a layer has at most MOST_LOAD rows, as the file of a placement has.
    """
    try:
        array = np.asarray(loads, dtype=np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(
            "counts are ragged or not numbers that a float holds: every layer needs one number per expert"
        ) from error
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3 or 0 in array.shape:
        raise ConfigError(f"counts have shape {array.shape}: give layers x experts, or scenarios of that")
    bad = np.argwhere(~np.isfinite(array) | (array < 0))
    if len(bad):
        scenario, layer, expert = bad[0]
        value = array[scenario, layer, expert]
        raise ConfigError(
            f"counts of layer {layer}, expert {expert} are {value}: counts are finite and not negative"
        )
    with np.errstate(over="ignore"):
        full = np.argwhere(array.sum(2) > MOST_LOAD)
    if len(full):
        raise ConfigError(f"counts of layer {full[0][1]} are more than {MOST_LOAD:g} together")
    return _alike(array)


def _alike(load_CLE: Floats) -> Floats:
    """Each scenario scaled, per layer, to the mean total: a longer recording is not a heavier scenario."""
    if len(load_CLE) == 1:
        return load_CLE
    total_CL = load_CLE.sum(2)
    mean_L = total_CL.sum(0) / np.maximum((total_CL > 0).sum(0), 1)
    scale_CL = np.divide(mean_L, total_CL, out=np.zeros_like(total_CL), where=total_CL > 0)
    scaled: Floats = load_CLE * scale_CL[:, :, None]
    return scaled


def _check(problem: Problem) -> None:
    """Raises ConfigError where no valid placement can exist or the wishes contradict one another."""
    scenarios, layers, experts = problem.load_CLE.shape
    room_N, live = problem.nodes.usable_slots(), len(problem.nodes) - len(problem.nodes.dead)
    if problem.memory is None and room_N.sum() < experts:
        raise ConfigError(
            f"{experts} experts need at least {experts} slots, not {room_N.sum()} on {live} live nodes: "
            "give more slots or nodes"
        )
    if problem.weight_C and (
        len(problem.weight_C) != scenarios
        or not np.isfinite(problem.weight_C).all()
        or min(problem.weight_C) < 0
        or sum(problem.weight_C) <= 0
    ):
        raise ConfigError(
            f"{len(problem.weight_C)} scenario weights for {scenarios} scenarios: one each, finite and not negative"
        )
    if problem.moves is not None and problem.moves < 0:
        raise ConfigError(f"a budget of {problem.moves} moves: give 0 or more")
    if problem.moves is not None and problem.current is None:
        raise ConfigError("a budget of moves needs the current placement to move from")
    if problem.current is not None:
        problem.current.check_shape(layers=layers, experts=experts, nodes=len(problem.nodes))
    check_copies(problem.copies, problem.nodes, experts, problem.memory)
    _check_protected(problem, layers, experts, live)


def check_copies(copies: int, nodes: Nodes, experts: int, memory: int | None = None) -> None:
    """Raises ConfigError where so many copies of every expert cannot stand on different nodes."""
    room_N = nodes.usable_slots().clip(max=experts)
    live, room = int((room_N > 0).sum()), int(room_N.sum())
    if copies < 1:
        raise ConfigError(f"{copies} copies of every expert: give 1 or more", param="expert_copies")
    if copies > 1 and copies > live:
        raise ConfigError(
            f"{copies} copies of every expert need {copies} live nodes, not {live}: give more nodes or fewer copies",
            param="expert_copies",
        )
    if copies > 1 and memory is None and room < copies * experts:
        raise ConfigError(
            f"{copies} copies of {experts} experts need {copies * experts} slots per layer, not {room} on {live} live "
            "nodes: give more slots or nodes, or fewer copies",
            param="expert_copies",
        )


def _check_protected(problem: Problem, layers: int, experts: int, live: int) -> None:
    extra = [0] * layers
    for layer, expert in problem.protect:
        if not (0 <= layer < layers and 0 <= expert < experts):
            raise ConfigError(f"no expert {expert} in layer {layer}: there are {layers} layers of {experts}")
        extra[layer] += 1
    if problem.protect and live < 2:
        raise ConfigError("surviving the loss of a node needs at least two live nodes")
    room = int(problem.nodes.usable_slots().sum())
    if problem.protect and problem.memory is None and room < experts + max(extra):
        raise ConfigError(
            f"protecting {max(extra)} of {experts} experts needs {experts + max(extra)} slots per layer, not {room}"
        )
