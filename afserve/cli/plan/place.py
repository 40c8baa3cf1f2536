"""`afserve place`: expert placement from routing counts. It reads files and prints a table, JSON or a heat map."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from afserve.cli.options import Within, group_options, option, output_file, read_given_bytes
from afserve.errors import ConfigError, shown
from afserve.json_file import LIST_BYTES
from afserve.placement.placement_text import MOST_NODES, MOST_ROWS, MOST_SLOTS

if TYPE_CHECKING:
    from afserve.placement.optimizer.problem import Floats, Nodes
    from afserve.placement.placement import Placement

_COUNT, _SLOTS = Within(1, MOST_NODES, whole=True), Within(1, MOST_SLOTS, whole=True)
_EXPERTS = Within(0, MOST_SLOTS, whole=True)
_SPEED, _WEIGHT, _NODE = Within(1e-6, 1e6), Within(0, 1e9), Within(0, MOST_NODES, whole=True)


@dataclass(frozen=True, slots=True)
class PlaceFlags:
    """What is placed on which nodes, and what may move."""

    files: tuple[Path, ...] = option(
        "--counts",
        multiple=True,
        type=Path,
        metavar="FILE",
        help='Routing counts: {"counts": [[per expert] per layer]}, several scenarios of that, or a recording. '
        "Repeatable.",
    )
    nodes: int = option(required=True, type=_COUNT, help="Expert nodes.")
    slots: int | None = option(
        type=_SLOTS, help="Slots per layer, all nodes together. Default: one spare slot on every node."
    )
    memory: int | None = option(
        type=_SLOTS, help="Slots per node over all layers together; the width of each layer is chosen."
    )
    groups: int = option(
        type=_COUNT, default=1, show_default=True, help="Racks: replicas are spread over them."
    )
    per_host: int = option(
        "--nodes-per-host",
        type=_COUNT,
        default=1,
        show_default=True,
        help="So many nodes in a row share a host; whole hosts stand in a rack.",
    )
    copies: int = option(
        "--expert-copies",
        type=_COUNT,
        default=1,
        show_default=True,
        help="Nodes that hold each expert at least: in different racks, else on different hosts, where there is room.",
    )
    speed: str | None = option(help="Relative speed of each node, such as 1,1,0.5,0.5.")
    dead: str = option(default="", help="Nodes to leave out, such as 3,7.")
    names: tuple[str, ...] = option(
        "--scenario",
        multiple=True,
        metavar="NAME[=WEIGHT]|FILE",
        help="Use only these scenarios of the files, with weights, or one more file. Repeatable. Default: all, alike.",
    )
    current: Path | None = option(
        type=Path, metavar="FILE", help="The placement that stands now (an earlier --json)."
    )
    moves: int | None = option(
        type=Within(0, 1 << 40, whole=True), help="How many experts may travel, with --current."
    )
    protect: int = option(
        type=_EXPERTS,
        default=0,
        show_default=True,
        help="The hottest K experts of each layer survive the loss of any one node.",
    )
    expert_mib: float | None = option(
        type=Within(1e-6, 1e9), help="Size of one expert: prices moves, with --link-gbs."
    )
    link_gbs: float = option(
        type=Within(1e-6, 1e6), default=25.0, show_default=True, help="GB/s into a node that moves may use."
    )
    horizon: float = option(
        type=Within(1e-3, 1e9), default=60.0, show_default=True, help="Seconds over which a move must pay."
    )
    as_json: bool = option("--json", is_flag=True, help="Print the placement file itself.")
    plot: Path | None = option(
        type=output_file, metavar="PNG", help="Write a heat map of node loads per layer."
    )


@click.command("place", short_help="Place experts on nodes from routing counts.")
@group_options(PlaceFlags)
@click.argument("more", nargs=-1, type=Path, metavar="[FILE]...")
def place(flags: PlaceFlags, more: tuple[Path, ...]) -> None:
    """Place experts on nodes so that every node gets equally many rows. FILE is the same as --counts FILE.

    Prints how close each layer is to a proved lower bound. With several scenarios the placement is made for all of
    them and for what they do not show; with --current it moves as few experts as it must.
    """
    from afserve.cli.plan.placed import plot_loads, print_table
    from afserve.placement.optimizer.balance import balance
    from afserve.placement.optimizer.problem import MovePrice, Problem, scenarios

    extra = [name for name in flags.names if os.path.isfile(name)]
    counts = (*flags.files, *more, *map(Path, extra))
    if not counts:
        raise ConfigError(
            "no routing counts to place by; give a FILE of them, or --counts FILE", param="counts"
        )
    named = _read(counts)
    chosen, weights = _choose(named, [name for name in flags.names if name not in extra])
    load_CLE = scenarios([named[name] for name in chosen])
    now = _placement(flags.current) if flags.current is not None else None
    price = None
    if flags.expert_mib is not None:
        price = MovePrice(flags.expert_mib * 2**20, flags.link_gbs * 1e9, flags.horizon)
    pool = _nodes(flags, load_CLE.shape[1:])
    problem = Problem(
        load_CLE,
        pool,
        weights,
        now,
        flags.moves,
        price,
        memory=flags.memory,
        protect=_hottest(load_CLE, flags.protect),
        copies=flags.copies,
    )
    found = balance(problem)
    epoch = 0 if now is None else now.epoch + 1
    if flags.plot is not None:
        plot_loads(flags.plot, found, problem)
    if flags.as_json:
        click.echo(found.placement(epoch).to_json())
    else:
        print_table(found, problem, chosen, flags.plot)


def _read(files: Sequence[Path]) -> "dict[str, Floats]":
    """Scenarios of all files by name; names that occur twice get their file's name in front."""
    from afserve.placement.rebalance.record import MAGIC, decode, read_counts

    named: dict[str, Floats] = {}
    for file in files:
        data = read_given_bytes(file, f"--counts {file}", LIST_BYTES)
        try:
            if data.startswith(MAGIC):
                found = {file.stem: decode(data).total_load()}
            else:
                found = read_counts(_text(data))
        except ConfigError as error:
            raise ConfigError(f"{file}: {error.message}") from error
        for name, table in found.items():
            key = name if len(files) == 1 else f"{file.stem}:{name}" if len(found) > 1 else file.stem
            named[key if key not in named else f"{file}:{name}"] = table
    shapes = {name: table.shape for name, table in named.items()}
    if len(set(shapes.values())) > 1:
        raise ConfigError(f"the counts are of different models (layers, experts): {shapes}")
    return named


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError("it is neither JSON text nor a routing recording") from error


def _placement(file: Path) -> "Placement":
    from afserve.placement.placement import Placement

    data = read_given_bytes(file, f"--current {file}", LIST_BYTES)
    try:
        return Placement.from_json(_text(data))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}") from error


def _choose(named: "dict[str, Floats]", wanted: Sequence[str]) -> tuple[list[str], tuple[float, ...]]:
    if not wanted:
        return list(named), ()
    chosen, weights = [], []
    for text in wanted:
        name, _, weight = (text, "", "1") if text in named else text.rpartition("=")
        if name not in named:
            raise ConfigError(
                f"no scenario {shown(name or text)} in the counts: there are {', '.join(named)}"
            )
        chosen.append(name)
        weights.append(_number("--scenario", weight, _WEIGHT))
    return chosen, tuple(weights)


def _nodes(flags: PlaceFlags, shape: tuple[int, ...]) -> "Nodes":
    """Without --slots and --memory every node has one slot more than it must have."""
    from afserve.placement.optimizer.problem import Nodes

    layers, experts = shape
    count, memory = flags.nodes, flags.memory
    if flags.slots is not None and memory is not None:
        raise ConfigError("give --slots or --memory, not both")
    least = (-(-experts * flags.copies // count) + 1) * count if memory is None else experts * count
    slots = least if flags.slots is None else flags.slots
    kept = count * memory if memory is not None else layers * slots
    if kept > MOST_SLOTS or layers * count > MOST_ROWS:
        raise ConfigError(
            f"{layers} layers on {count} nodes, {kept:,} slots together: over all layers a placement has at most "
            f"{MOST_ROWS:,} nodes and {MOST_SLOTS:,} slots; lower --nodes, --slots or --memory"
        )
    dead = frozenset(int(value) for value in _numbers("--dead", flags.dead, _NODE))
    pool = Nodes.even(count, slots, groups=flags.groups, per_host=flags.per_host, dead=dead)
    return pool if flags.speed is None else replace(pool, speed=_numbers("--speed", flags.speed, _SPEED))


def _numbers(flag: str, text: str, within: Within) -> tuple[float, ...]:
    return tuple(_number(flag, part, within) for part in text.split(",") if part.strip())


def _number(flag: str, text: str, within: Within) -> float:
    value = within.read_number(text.strip())
    if value is None or not within.range.holds(value):
        raise ConfigError(f"{flag}: {shown(text)} is not {within.range}")
    return value


def _hottest(load_CLE: "Floats", count: int) -> frozenset[tuple[int, int]]:
    if not 0 <= count <= load_CLE.shape[2]:
        raise ConfigError(f"--protect {count}: a layer has {load_CLE.shape[2]} experts")
    order = (-load_CLE.mean(0)).argsort(1, kind="stable")[:, :count]
    return frozenset((layer, int(expert)) for layer, row in enumerate(order) for expert in row)
