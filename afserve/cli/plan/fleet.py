"""`afserve fleet`: what to buy and when, for loads by the hour: devices, instances, prices, energy, spares, growth,
several models and targets in shared pools."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from afserve.cli.options import Within, declare_options, gather_group, option, read_given_toml
from afserve.cli.plan.catalog import read_lines
from afserve.cli.plan.flags import GROUPS, HardwareFlags, ModelFlags
from afserve.cli.plan.fleet_printed import FleetPlan, MonthBill, fleet_lines, fleet_values
from afserve.cli.plan.options import asked_question, seconds
from afserve.errors import ConfigError, DoesNotFitError, shown
from afserve.placement.planner.fleet.bill import KindBill, SiteCosts, bill_of
from afserve.placement.planner.fleet.load import HourlyLoad, constant, months_of, read_growth, read_load
from afserve.placement.planner.fleet.need import InstanceNeed, cheapest, need_of, together
from afserve.placement.planner.infeasible import explain
from afserve.placement.planner.panel import asked_of_all, differences
from afserve.placement.planner.perf.hardware import Hardware
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question
from afserve.placement.planner.question import answer as plans_at
from afserve.placement.planner.sensitivity import verdict

_CLASSES, _TRIED, _QUARTER = 64, 12, 0.25
_HOURS = {"h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True)
class _Model(ModelFlags):
    """As of `afserve plan`, but a class of --classes may have its own."""

    model: str = option("--model", "-m", help="A known model, a config.json or its folder.")


@dataclass(frozen=True, slots=True)
class _Hardware(HardwareFlags):
    pools: tuple[str, ...] = option(
        "--pool",
        multiple=True,
        metavar="NAME[=COUNT][@USD]",
        help="Hardware, with a price on demand per device hour if not the listed one; without a count as many as it "
        "takes. Repeatable.",
    )


@dataclass(frozen=True, slots=True)
class FleetFlags:
    """What the devices stand in, what they cost, and how the load grows."""

    load: Path | None = option(
        type=Path,
        help="CSV with the columns hour and requests_per_s: a day or a week that repeats itself. Else --rate in each "
        "hour.",
    )
    classes: Path | None = option(
        type=Path,
        help="TOML with a table [[class]] for each model or target: name, load or rate, and flags of `afserve plan` "
        "without dashes. What it does not say is taken from the flags here.",
    )
    headroom: float = option(
        default=0.2, type=Within(0, 10), help="Share of the load that is ready on top.  [default: 0.2]"
    )
    reserved: tuple[str, ...] = option(
        multiple=True,
        metavar="NAME@USD",
        help="Price of a device hour that is paid for all hours. Repeatable.",
    )
    price_source: str | None = option(help="Where the prices are from and of which day, for the answer.")
    growth: str | None = option(
        metavar="8%|F1,F2,...", help="More load each month, or factors of the months."
    )
    months: int = option(default=12, type=Within(1, 120, whole=True), help="With --growth.  [default: 12]")
    mtbf: str | None = option(metavar="50000h", help="Mean time between failures of a device: plans spares.")
    repair: str = option(
        default="48h", help="Until a failed device is back, such as 48h or 3d.  [default: 48h]"
    )
    available: float = option(
        default=0.999, type=Within(0.5, 0.999999), help="Chance that the spares are enough.  [default: 0.999]"
    )
    pue: float = option(
        default=1.0, type=Within(1, 5), help="Power of the building over the machines'.  [default: 1]"
    )
    host_watts: float = option(
        default=0.0, type=Within(0, 1e5), help="Of each host beside its devices.  [default: 0]"
    )
    kwh_price: float = option(
        default=0.0, type=Within(0, 100), help="USD per kWh, where energy is not in the prices.  [default: 0]"
    )


@click.command("class", context_settings={"help_option_names": []})
@declare_options(_Model, _Hardware, *GROUPS[2:])
def _one_class(**flags: Any) -> None:
    """Only parses: a class of --classes says its flags as a command line does."""


@click.command("fleet", short_help="What to buy and when, for loads by the hour.")
@declare_options(_Model, _Hardware, *GROUPS[2:], FleetFlags)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def fleet(as_json: bool, **flags: Any) -> None:
    """What to buy and when: devices for each hour of a load, reserved and on demand, with spares, energy and growth; of
    one model, or of several models and targets in shared pools.

    \b
    afserve fleet --model deepseek-v3 --pool h200 --load day.csv --input 2000 --output 500 --tpot 50ms
    """
    asked = gather_group(FleetFlags, flags)
    site = _site(asked)
    classes = list(_classes(asked, flags))
    factors = read_growth(asked.growth, asked.months) if asked.growth is not None else ()
    chips: dict[str, Hardware] = {}
    needs, limits, said = [], {}, []
    for name, load, own in classes:
        try:
            need, question, words = _need(name, load, own, asked.headroom, factors)
        except ConfigError as error:
            if asked.classes is None:
                raise
            raise ConfigError(f"{_where(asked, name)}: {error.message}", param=error.param) from error
        needs.append(need)
        said.append(words)
        for pool in question.pools:
            known = chips.setdefault(pool.chip.name, pool.chip)
            if known.usd_per_hour != pool.chip.usd_per_hour:
                raise ConfigError(f"--pool {pool.chip.name}: class {shown(name)} has another price for it")
            limits[pool.chip.name] = None if pool.endless else pool.count
    _check_reserved(site, chips)
    bills = _bills(needs, chips, site)
    _check_pools(bills, limits)
    growth = [
        MonthBill(
            month, factor, _bills([_grown(need, load, asked.headroom) for need, load in grown], chips, site)
        )
        for month, factor, grown in _months(factors, needs)
    ]
    plan = FleetPlan(
        tuple(needs), tuple(said), bills, tuple(growth), site, chips, asked.headroom, asked.price_source
    )
    click.echo(json.dumps(fleet_values(plan), indent=2) if as_json else "\n".join(fleet_lines(plan)))


def _site(asked: FleetFlags) -> SiteCosts:
    return SiteCosts(
        pue=asked.pue,
        host_watts=asked.host_watts,
        usd_per_kwh=asked.kwh_price,
        available=asked.available,
        mtbf=_hours(asked.mtbf, "mtbf") if asked.mtbf else float("inf"),
        repair=_hours(asked.repair, "repair"),
        reserved=dict(_reserved(text) for text in asked.reserved),
    )


def _hours(text: str, name: str) -> float:
    """Seconds of '48h', '3d' or what `seconds` reads."""
    unit = _HOURS.get(text[-1:])
    try:
        found = float(text[:-1]) * unit if unit else seconds(text, name)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e12:
        raise ConfigError(f"--{name}: {shown(text)} is not a time; write 48h or 3d", param=name)
    return found


def _reserved(text: str) -> tuple[str, float]:
    name, _, price = text.partition("@")
    try:
        usd = float(price)
    except ValueError:
        usd = 0.0
    if not name or not 1e-6 <= usd <= 1e6:
        raise ConfigError(f"--reserved {shown(text)}: write NAME@USD per device hour, such as h200@1.6")
    return name, usd


def _check_reserved(site: SiteCosts, chips: Mapping[str, Hardware]) -> None:
    unknown = next((name for name in site.reserved or {} if name not in chips), None)
    if unknown is not None:
        raise ConfigError(
            f"--reserved {shown(unknown)}: no --pool has that name; offered are {', '.join(chips)}"
        )


def _classes(asked: FleetFlags, flags: dict[str, Any]) -> Iterator[tuple[str, HourlyLoad, dict[str, Any]]]:
    """(name, load, flags of `afserve plan`) of each class; of the flags alone where no file is given."""
    if asked.classes is None:
        yield flags["model"] or "", _load(asked.load, flags["rate"], "--load"), flags
        return
    for place, table in enumerate(_tables(asked.classes)):
        name = str(table.pop("name", f"class {place + 1}"))
        file, rate = table.pop("load", None), table.pop("rate", flags["rate"])
        where = _where(asked, name)
        path = asked.classes.parent / str(file) if file is not None else asked.load
        if not isinstance(rate, int | float) or isinstance(rate, bool):
            raise ConfigError(f"{where}: rate must be a number of requests per second")
        yield name, _load(path, float(rate), where), flags | _typed(where, table)


def _where(asked: FleetFlags, name: str) -> str:
    return f"--classes {asked.classes}: class {shown(name)}"


def _tables(path: Path) -> list[dict[str, Any]]:
    tables = read_given_toml(path, f"--classes {path}").get("class")
    if not isinstance(tables, list) or not 1 <= len(tables) <= _CLASSES:
        raise ConfigError(f"--classes {path}: it must have 1 to {_CLASSES} tables [[class]]")
    return [dict(table) for table in tables]


def _typed(where: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """What a class says of its own, as click reads it."""
    words: list[str] = []
    for key, value in table.items():
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{key}"] if one is True else [f"--{key}", str(one)]
    try:
        context = _one_class.make_context("class", words)
    except click.ClickException as error:
        raise ConfigError(f"{where}: {error.format_message()}") from error
    given = ParameterSource.COMMANDLINE
    return {
        name: value for name, value in context.params.items() if context.get_parameter_source(name) is given
    }


def _load(path: Path | None, rate: float, where: str) -> HourlyLoad:
    if path is not None:
        return read_load(f"{where} {path}", read_lines(path, "load"))
    if rate <= 0:
        raise ConfigError(f"{where}: how many requests come? Give --load FILE with hours, or --rate")
    return constant(rate)


def _need(
    name: str, load: HourlyLoad, flags: dict[str, Any], headroom: float, factors: Sequence[float]
) -> tuple[InstanceNeed, Question, str]:
    """The instances of one class, of the layout that costs least over its hours and months; and the verdict at its
    peak in the first month."""
    for flag, said in (("model", "--model"), ("pools", "--pool")):
        if not flags[flag]:
            raise ConfigError(f"{said} is missing{f' for class {shown(name)}' if name else ''}", param=flag)
    question = asked_question(dict(flags) | {"rate": load.peak * (1 + headroom)})
    question, found, panel = asked_of_all(question)
    best = found.best()
    if best is None:
        raise DoesNotFitError(f"class {shown(name)}: {explain(question)}" if name else explain(question))
    answer = question.setting.workload.mean_answer
    words = verdict(question, found, panel.chance, differences(question, panel, best))
    offers = [*found.plans[:_TRIED], *_other_sizes(question, load, factors)]
    months = [load.times(factor) for factor in factors] or [load]
    return cheapest(name, offers, load, answer, headroom, months), question, words


def _other_sizes(question: Question, load: HourlyLoad, factors: Sequence[float]) -> Iterator[Plan]:
    """Layouts for less than the peak, of which several follow a load and its growth more closely, and for the largest
    month. An instance that is just enough for one peak is twice as much as a little more takes."""
    least = min(rate for rate in load.rates if rate > 0) / load.peak
    for share in sorted({_QUARTER, least, max(factors, default=1.0)} - {1.0}):
        rate = question.tokens_per_second * share
        yield from plans_at(replace(question, tokens_per_second=rate)).plans[:_TRIED]


def _months(
    factors: Sequence[float], needs: list[InstanceNeed]
) -> Iterator[tuple[int, float, list[tuple[InstanceNeed, HourlyLoad]]]]:
    loads = [dict(months_of(need.load, factors)) for need in needs]
    for month, factor in enumerate(factors, start=1):
        yield month, factor, [(need, grown[month]) for need, grown in zip(needs, loads, strict=True)]


def _grown(need: InstanceNeed, load: HourlyLoad, headroom: float) -> InstanceNeed:
    """The same layout for a later month."""
    return need_of(need.name, need.plan, load, need.answer, headroom)


def _bills(needs: list[InstanceNeed], chips: Mapping[str, Hardware], site: SiteCosts) -> tuple[KindBill, ...]:
    return tuple(bill_of(chips[kind], hours, site) for kind, hours in together(needs).items())


def _check_pools(bills: tuple[KindBill, ...], limits: Mapping[str, int | None]) -> None:
    """All classes share the pools."""
    for bill in bills:
        most = limits[bill.kind]
        if most is not None and bill.peak + bill.spares > most:
            raise DoesNotFitError(
                f"--pool {bill.kind}={most}: the loads take {bill.peak:,} at the peak and {bill.spares} spares: "
                f"{bill.peak + bill.spares - most:,} more. Offer more, or {bill.kind} without a count"
            )
