"""The answer of `afserve fleet` for people and for programs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from afserve.cli.plan.aligned import aligned
from afserve.placement.planner.fleet.bill import JOULES, KindBill, SiteCosts
from afserve.placement.planner.fleet.need import InstanceNeed, peaks
from afserve.placement.planner.infeasible import describe
from afserve.placement.planner.perf.hardware import Hardware

MONTH = 730.0  # hours


@dataclass(frozen=True, slots=True)
class MonthBill:
    month: int
    factor: float
    bills: tuple[KindBill, ...]


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """said: of each class, the verdict on disaggregation. bills: of the period of the loads. months: of later ones,
    each for one such period."""

    needs: tuple[InstanceNeed, ...]
    said: tuple[str, ...]
    bills: tuple[KindBill, ...]
    months: tuple[MonthBill, ...]
    site: SiteCosts
    chips: Mapping[str, Hardware]
    headroom: float
    price_source: str | None

    @property
    def hours(self) -> int:
        return max(len(need.instances) for need in self.needs)

    @property
    def tokens(self) -> float:
        """Generated in the period; shorter loads repeat themselves in it."""
        return sum(need.tokens * self.hours / len(need.instances) for need in self.needs)


def fleet_lines(plan: FleetPlan) -> list[str]:
    """Loads, devices with their price, hours, power and energy, growth, and where the prices are from."""
    usd = sum(bill.usd for bill in plan.bills)
    kwh = sum(bill.kwh for bill in plan.bills)
    lines = [*_loads(plan), "", *_kinds(plan.bills), ""]
    lines.append(
        f"${usd:,.2f} for {plan.hours} hours, ${usd / plan.hours * MONTH:,.0f} a month of {MONTH:g} hours, "
        f"${usd / plan.tokens * 1e6:.3f} per million tokens; all on demand it would be "
        f"${sum(bill.usd_on_demand for bill in plan.bills):,.2f}"
    )
    lines.append(
        f"{sum(bill.watts_at_peak for bill in plan.bills) / 1e3:,.1f} kW at the peak, {kwh:,.0f} kWh, "
        f"{kwh * JOULES / plan.tokens:.3f} J per token; PUE {plan.site.pue:g}, hosts {plan.site.host_watts:g} W each"
    )
    lines += _shared(plan) + _by_hour(plan)
    if plan.months:
        lines += ["", *aligned(list(_growth(plan)), left=(1,))]
    return [*lines, "", *prices_said(plan)]


def _loads(plan: FleetPlan) -> list[str]:
    rows = [
        (
            "class",
            "layout of an instance",
            "engine",
            "requests/s each",
            "peak requests/s",
            "instances",
            "TPOT ms",
        )
    ]
    rows += [
        (
            need.name,
            describe(need.plan),
            need.plan.engine,
            f"{need.capacity:,.2f}",
            f"{need.load.peak:,.2f}",
            f"{need.instances.min():.0f} to {need.instances.max():.0f}",
            f"{need.plan.tpot * 1e3:.1f} +-{need.plan.error:.0%}",
        )
        for need in plan.needs
    ]
    return [
        *aligned(rows, left=(0, 1, 2)),
        f"{plan.headroom:.0%} more than the load is always ready",
        *_said(plan),
    ]


def _said(plan: FleetPlan) -> list[str]:
    """Whether to disaggregate, by all engines, for each class at its peak."""
    return [f"{need.name}: {words}" for need, words in zip(plan.needs, plan.said, strict=True)]


def _kinds(bills: Sequence[KindBill]) -> list[str]:
    rows = [("devices", "peak", "spares", "reserved", "device hours", "USD")]
    rows += [
        (
            bill.kind,
            f"{bill.peak:,}",
            f"{bill.spares:,}",
            f"{bill.reserved:,}",
            f"{bill.device_hours:,.0f}",
            f"{bill.usd:,.2f}",
        )
        for bill in bills
    ]
    return aligned(rows, left=(0,))


def _shared(plan: FleetPlan) -> list[str]:
    """What it saves that the loads have their peaks at different hours."""
    if len(plan.needs) == 1:
        return []
    apart = peaks(plan.needs)
    words = ", ".join(f"{bill.peak:,} {bill.kind} instead of {apart[bill.kind]:,}" for bill in plan.bills)
    return [f"In shared pools the loads take {words} with pools of their own"]


def _by_hour(plan: FleetPlan) -> list[str]:
    """Instances by hour where a day is short enough to be read."""
    if plan.hours > 24 or all(need.instances.min() == need.instances.max() for need in plan.needs):
        return []
    rows = [("hour", *(f"{hour}" for hour in range(plan.hours)))]
    rows += [(need.name, *(f"{count:.0f}" for count in need.instances)) for need in plan.needs]
    return ["", "instances by hour:", *aligned(rows, left=(0,))]


def _growth(plan: FleetPlan) -> list[tuple[str, ...]]:
    """A row for each month: how many devices, and which to buy."""
    rows: list[tuple[str, ...]] = [("month", "devices with spares", "buy", "reserved", "load", "USD a month")]
    before: dict[str, int] = {}
    for month in plan.months:
        have = {bill.kind: bill.peak + bill.spares for bill in month.bills}
        bought = {kind: count - before.get(kind, 0) for kind, count in have.items()}
        before = {kind: max(count, before.get(kind, 0)) for kind, count in have.items()}
        rows.append(
            (
                f"{month.month}",
                _counts(have),
                _counts({kind: count for kind, count in bought.items() if count > 0}) or "-",
                f"{sum(bill.reserved for bill in month.bills):,}",
                f"x {month.factor:.2f}",
                f"{sum(bill.usd for bill in month.bills) / plan.hours * MONTH:,.0f}",
            )
        )
    return rows


def _counts(devices: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in devices.items())


def prices_said(plan: FleetPlan) -> list[str]:
    """Each price with its source."""
    lines = []
    for bill in plan.bills:
        chip = plan.chips[bill.kind]
        kept = (plan.site.reserved or {}).get(bill.kind)
        source = plan.price_source or chip.sources.get("usd_per_hour", "its file names no source")
        reserved = f", ${kept:g} reserved" if kept else ""
        lines.append(
            f"{bill.kind}: ${chip.usd_per_hour:g} per device hour on demand{reserved} ({source}); {chip.watts:g} W"
        )
    return lines


def fleet_values(plan: FleetPlan) -> dict[str, object]:
    """The JSON of --json. USD and kWh are of the period of the loads."""
    kwh = sum(bill.kwh for bill in plan.bills)
    usd = sum(bill.usd for bill in plan.bills)
    return {
        "hours": plan.hours,
        "classes": [
            {
                "name": need.name,
                "plan": describe(need.plan),
                "engine": need.plan.engine,
                "verdict": words,
                "requests_per_s_each": round(need.capacity, 4),
                "tpot_ms": round(need.plan.tpot * 1e3, 3),
                "error": round(need.plan.error, 3),
                "instances": [int(count) for count in need.instances],
            }
            for need, words in zip(plan.needs, plan.said, strict=True)
        ],
        "devices": [_bill_values(bill) for bill in plan.bills],
        "peaks_apart": dict(peaks(plan.needs)),
        "usd": round(usd, 2),
        "usd_all_on_demand": round(sum(bill.usd_on_demand for bill in plan.bills), 2),
        "usd_per_mtok": round(usd / plan.tokens * 1e6, 5),
        "kwh": round(kwh, 3),
        "joules_per_token": round(kwh * JOULES / plan.tokens, 4),
        "months": [
            {
                "month": one.month,
                "load": round(one.factor, 4),
                "devices": [_bill_values(bill) for bill in one.bills],
            }
            for one in plan.months
        ],
        "prices": prices_said(plan),
    }


def _bill_values(bill: KindBill) -> dict[str, object]:
    return {
        "hardware": bill.kind,
        "peak": bill.peak,
        "spares": bill.spares,
        "reserved": bill.reserved,
        "device_hours": round(bill.device_hours, 1),
        "usd": round(bill.usd, 2),
        "kwh": round(bill.kwh, 3),
        "watts_at_peak": round(bill.watts_at_peak, 1),
    }
