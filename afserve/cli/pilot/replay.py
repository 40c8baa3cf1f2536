"""`afserve pilot replay`: a pilot over a trace, or over days made of its lengths, beside an oracle, fixed sizes and an
autoscaler of whole replicas."""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from afserve.cli.options import Within, existing_file, group_options, option
from afserve.cli.pilot.outcome import beside_bursts, class_values, compared_values, replay_text
from afserve.cli.pilot.shares import ClassFlags, class_shares
from afserve.cli.plan.catalog import load_curves, load_hardware, load_model, read_lines
from afserve.cli.plan.flags import PRECISIONS
from afserve.cli.plan.options import seconds
from afserve.cli.plan.piloted import FLOOR
from afserve.control.pilot.plan import Planner
from afserve.control.pilot.policy import rules_for
from afserve.control.pilot.replay.compare import Rivals, compare, most_served, rivals_on
from afserve.control.pilot.replay.counts import Packet
from afserve.control.pilot.replay.days import MadeDay, burst_spans, made_day, traced
from afserve.control.pilot.replay.rivals import demand_of
from afserve.control.pilot.replay.run import World
from afserve.control.pilot.replay.tabled import TabledModel, TabledStages
from afserve.control.pilot.sizes import Limits, PoolSizes, TargetTimes
from afserve.errors import ConfigError, DoesNotFitError, shown
from afserve.placement.planner.perf.attention import Precision
from afserve.placement.planner.perf.experts import Routing
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.trace_reader import read_trace
from afserve.placement.planner.perf.workload import Workload
from afserve.placement.planner.simulate.phase_stages import pieces_on_gpu
from afserve.placement.planner.simulate.phase_tables import StageTables

_SKEW = 0.4
_PEAK = 0.7  # of what all devices serve, at the highest point of a made day: noise and bursts come on top


@dataclass(frozen=True, slots=True)
class ReplayFlags:
    """What comes, on which devices, and within which times."""

    trace: Path = option(
        type=existing_file, required=True, help="Requests of a Mooncake JSON-lines or Azure CSV trace."
    )
    model: str = option(
        "--model", "-m", default="deepseek-v3", help="As `afserve plan`.  [default: deepseek-v3]"
    )
    pool: str = option(default="h200=64", metavar="NAME=COUNT", help="Devices at most.  [default: h200=64]")
    precision: str = option(default="fp8", type=click.Choice(PRECISIONS), help="Weights.  [default: fp8]")
    ttft: str = option(default="2s", help="Time to the first token.  [default: 2s]")
    tpot: str = option(default="50ms", help="Time per further token.  [default: 50ms]")
    times: float = option(
        default=1.0, type=Within(1e-3, 1e6), help="Of each request of the trace, so many.  [default: 1]"
    )
    hold: float = option(
        default=600.0, type=Within(10, 86_400), help="Seconds as --pilot-hold.  [default: 600]"
    )
    start: float = option(
        default=20.0, type=Within(0, 3600), help="Seconds until a device serves.  [default: 20]"
    )
    replica_start: float = option(
        default=240.0, type=Within(0, 36_000), help="The same for a whole replica.  [default: 240]"
    )
    slower: float = option(
        default=1.0,
        type=Within(0.2, 5),
        help="All steps take so many times what the pilot's model says.  [default: 1]",
    )
    tick: float = option(default=1.0, type=Within(0.1, 10), help="Seconds played at once.  [default: 1]")


@dataclass(frozen=True, slots=True)
class DayFlags:
    """A day that is made instead of the trace's own arrivals; lengths are the trace's."""

    day: float | None = option(
        type=Within(0.1, 240),
        metavar="HOURS",
        help="Make so many hours by a stated rule, with the trace's lengths.",
    )
    peak: float | None = option(
        type=Within(1e-3, 1e6), help="Requests per second at its highest point.  [default: 0.7 of what fits]"
    )
    trough: float = option(default=0.3, type=Within(0.01, 1), help="Lowest over highest.  [default: 0.3]")
    uneven: float = option(
        default=0.08, type=Within(0, 2), help="Variation of five minutes (Gamma).  [default: 0.08]"
    )
    bursts: float = option(
        default=0.0, type=Within(0, 1000), help="A day, each twice the rate for 2 to 8 minutes.  [default: 0]"
    )
    clumped: float | None = option(
        type=Within(0.1, 10),
        metavar="VARIATION",
        help="Variation of the times between arrivals (Gamma).  [default: Poisson's, which have 1]",
    )
    seed: int = option(default=0, type=Within(0, (1 << 32) - 1, whole=True), help="Random seed.")


@click.command("replay", short_help="Play a pilot over a trace.")
@group_options(ReplayFlags, DayFlags, ClassFlags)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replay(asked: ReplayFlags, day: DayFlags, classes: ClassFlags, as_json: bool) -> None:
    """Play a pilot over a trace, beside an oracle, the best fixed sizes and an autoscaler of whole replicas.

    \b
    afserve pilot replay --trace trace.csv --pool h200=64 --day 24 --ttft 2s --tpot 50ms
    """
    _check_day(day, classes)
    values = played(asked, day, classes)
    click.echo(json.dumps(values, indent=2) if as_json else replay_text(values))


def _check_day(day: DayFlags, classes: ClassFlags) -> None:
    """Raises ConfigError for what says something of no day. Classes are drawn by the seed too."""
    context = click.get_current_context()
    for field in fields(DayFlags):
        typed = context.get_parameter_source(field.name) is click.core.ParameterSource.COMMANDLINE
        drawn = field.name == "seed"
        if day.day is None and typed and not (drawn and classes.classes is not None):
            needed = "--day HOURS or --classes FILE" if drawn else "--day HOURS"
            raise ConfigError(f"--{field.name}: does nothing without {needed}", param=field.name)
    if (
        day.day is not None
        and context.get_parameter_source("times") is click.core.ParameterSource.COMMANDLINE
    ):
        raise ConfigError("--times: does nothing with --day; say --peak", param="times")


def played(
    asked: ReplayFlags,
    day: DayFlags,
    classes: ClassFlags,
    find: Callable[[World, list[Packet], Limits, float], Rivals] = rivals_on,
) -> dict[str, Any]:
    """`find` is who finds the rivals. Raises ConfigError or DoesNotFitError naming the flag."""
    mix = class_shares(classes)
    work = read_trace(str(asked.trace), read_lines(asked.trace, "trace"))
    wanted = TargetTimes(seconds(asked.ttft, "ttft"), seconds(asked.tpot, "tpot"))
    chip, devices = _pool(asked.pool)
    stages = _stages(asked, chip, work)
    limits = _limits(stages, devices)
    made = _made(day, work, Planner(TabledModel(stages), mix.wanted(wanted), limits))
    packets = mix.drawn(_packets(asked, work, made), day.seed)
    world = World(stages, wanted, asked.start, asked.slower, asked.tick, classes=mix.aims)
    try:
        rivals = find(world, packets, limits, asked.replica_start)
        found = compare(world, packets, limits, rules_for(asked.hold), rivals)
    except ValueError as error:
        raise ConfigError(f"--trace {asked.trace}: {error}", param="trace") from error
    spans = burst_spans(made) if made else []
    return {
        **_asked(asked, packets),
        **compared_values(found),
        **beside_bursts(found.pilot, spans, asked.hold),
        **class_values(found, mix),
    }


def _asked(asked: ReplayFlags, packets: list[Packet]) -> dict[str, Any]:
    said = {name: getattr(asked, name) for name in ("pool", "model", "ttft", "tpot", "slower")}
    return {
        "requests": round(sum(one.weight for one in packets)),
        "hours": round(packets[-1].at / 3600, 2),
        **said,
    }


def _pool(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not (name and count.isascii() and count.isdigit() and 0 < len(count) < 6 and int(count) > 2):
        raise ConfigError(f"--pool: {shown(text)} is not NAME=COUNT with three devices or more", param="pool")
    return name, int(count)


def _stages(asked: ReplayFlags, name: str, work: Workload) -> TabledStages:
    shape, chip = load_model(asked.model), load_hardware(name)
    widths = Precision(asked.precision, asked.precision, "bf16")
    setting = Setting(
        shape, load_curves("h200", shape, chip, widths), work, precision=widths, routing=Routing(_SKEW)
    )
    return TabledStages(
        StageTables(setting, chip), pieces_on_gpu(chip, shape.expert_row, asked.precision, FLOOR)
    )


def _limits(stages: TabledStages, devices: int) -> Limits:
    try:
        least = stages.least()
    except ValueError as error:
        raise DoesNotFitError(f"--pool: {error}") from error
    if least.total > devices:
        raise DoesNotFitError(
            f"--pool: the experts need {least.experts} devices, and prompts and decoding one each; give more"
        )
    return Limits(least, PoolSizes(devices, devices, devices), devices)


def _packets(asked: ReplayFlags, work: Workload, made: MadeDay | None) -> list[Packet]:
    prompts, answers = work.prompt.tolist(), work.answer.tolist()
    if made is None:
        return traced(work.arrival.tolist(), prompts, answers, asked.times)
    return made_day(made, prompts, answers)


def _made(day: DayFlags, work: Workload, planner: Planner) -> MadeDay | None:
    if day.day is None:
        return None
    peak = day.peak
    if peak is None:
        alike = traced(work.arrival.tolist(), work.prompt.tolist(), work.answer.tolist())
        whole = demand_of(alike, max(float(work.arrival[-1]), 1.0))
        assert whole is not None, "a trace has a request"
        peak = _PEAK * most_served(planner, whole) / (2.0 if day.bursts else 1.0)
    if not peak:
        raise DoesNotFitError(
            "--pool: no sizes inside it meet --ttft and --tpot; give more devices, or more time"
        )
    return MadeDay(peak, day.trough, day.uneven, day.bursts, day.day, day.seed, day.clumped or 0.0)
