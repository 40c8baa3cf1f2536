"""The flags of `afserve simulate` that say what is lost and how it is recovered, and what is printed of it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from afserve.cli.options import Within, option
from afserve.errors import ConfigError, shown
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question
from afserve.placement.planner.simulate.endured import MOST, endured, expected
from afserve.placement.planner.simulate.losses import (
    NOTICE,
    RELOAD,
    RESTART,
    DeviceLoss,
    Outage,
    PlanRole,
    RecoveryTimes,
    again_second,
    computed_again,
)

_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST, _YEARS = 1e9, 1e12  # seconds
_MOST, _DRAWN = 1000, 10_000  # losses that are typed; that are drawn


@dataclass(frozen=True, slots=True)
class LossFlags:
    """What is lost, and how the deployment recovers."""

    lose: tuple[str, ...] = option(
        multiple=True,
        metavar="ROLE@TIME",
        help="A device is lost while requests are played, such as experts@30s: of attention, experts or prefill; of a "
        "colocated plan, devices. Repeatable.",
    )
    mtbf: str | None = option(
        metavar="TIME",
        help="Mean time between losses of one device, such as 50000h: what that costs over --days.",
    )
    days: float | None = option(
        type=Within(1e-3, 1e6), help="With --mtbf: days to add up.  [default: those of about 10000 losses]"
    )
    notice: str | None = option(
        metavar="TIME",
        help="Until a loss is known. A silent host is lost after --silence of 1 s (measured 1.11 s), a process that "
        "ends in 30ms.  [default: 1.11s]",
    )
    recovery: str | None = option(
        metavar="TIME",
        help="Until a replacement begins to read its weights; 0.38 s is a process started again.  [default: 0.38s]",
    )
    reload: float | None = option(
        type=Within(1e-3, 1e5), help="GB/s at which each device reads weights.  [default: 2]"
    )
    kv_copies: bool = option(
        default=False,
        is_flag=True,
        help="Running requests' KV has a copy on the next attention rank, as with `up --kv-copies 1`.",
    )
    on_loss: str = option(
        default="recover",
        type=click.Choice(("recover", "end")),
        help="Whether the others go on, or everything ends and starts anew.  [default: recover]",
    )

    @property
    def asked(self) -> bool:
        return bool(self.lose) or self.mtbf is not None


def time_of(text: str, option: str, *, most: float = _LONGEST, least: float = 0.0) -> float:
    """Seconds of '30ms', '2s', '10min', '50000h' or '3d'. Raises ConfigError naming the option."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]{1,3})?)\s*(ms|s|min|h|d)\s*", text[:64])
    try:
        value = float(found.group(1)) * _UNITS[found.group(2)] if found else -1.0
    except ValueError:
        value = -1.0
    if not least <= value <= most:
        raise ConfigError(
            f"--{option}: {shown(text)} is not a time of {least:g} to {most:g} s with its unit; write 30s, 10min or 2h"
        )
    return value


def recovery_of(flags: LossFlags) -> RecoveryTimes:
    """Raises ConfigError where nothing is lost, but something is said of it."""
    said = {
        "--days": flags.days is not None,
        "--notice": flags.notice is not None,
        "--recovery": flags.recovery is not None,
        "--reload": flags.reload is not None,
        "--kv-copies": flags.kv_copies,
        "--on-loss end": flags.on_loss == "end",
    }
    given = next((name for name, there in said.items() if there), None)
    if given and not flags.asked:
        raise ConfigError(f"{given}: nothing is lost; add --lose ROLE@TIME or --mtbf TIME", param="lose")
    if flags.days is not None and flags.mtbf is None:
        raise ConfigError("--days: over how many days losses are added up needs --mtbf")
    if flags.kv_copies and flags.on_loss == "end":
        raise ConfigError("--kv-copies: with --on-loss end nothing goes on, so no copy is used; drop one")
    return RecoveryTimes(
        notice=NOTICE if flags.notice is None else time_of(flags.notice, "notice"),
        restart=RESTART if flags.recovery is None else time_of(flags.recovery, "recovery"),
        reload=RELOAD if flags.reload is None else flags.reload * 1e9,
        kv_copies=flags.kv_copies,
        all_end=flags.on_loss == "end",
    )


def typed_losses(flags: LossFlags, roles: tuple[PlanRole, ...]) -> list[DeviceLoss]:
    """Raises ConfigError naming the flag where the plan has no such role."""
    if len(flags.lose) > _MOST:
        raise ConfigError(f"--lose: {len(flags.lose)} times, and {_MOST} is the most")
    names, found = [role.name for role in roles], []
    for text in flags.lose:
        role, _, at = text.partition("@")
        if role not in names:
            raise ConfigError(
                f"--lose {shown(text)}: write ROLE@TIME; this plan has {' and '.join(names)} to lose, "
                f"such as {names[-1]}@30s"
            )
        found.append(DeviceLoss(role, time_of(at, "lose")))
    return found


def span_of(flags: LossFlags, roles: tuple[PlanRole, ...]) -> tuple[float, float]:
    """(seconds between losses of one device, days). Raises ConfigError where that means too many to draw."""
    mtbf = time_of(flags.mtbf or "", "mtbf", most=_YEARS, least=1.0)
    days = _DRAWN / expected(roles, mtbf, 1.0) if flags.days is None else flags.days
    losses = expected(roles, mtbf, days)
    if losses > MOST:
        raise ConfigError(
            f"--mtbf {flags.mtbf}: {losses:,.0f} losses in {days:g} days, and {MOST:,} is the most; give fewer --days"
        )
    return mtbf, days


def long_run(
    question: Question,
    plan: Plan,
    roles: tuple[PlanRole, ...],
    flags: LossFlags,
    recovery: RecoveryTimes,
    seed: int,
) -> dict[str, Any]:
    """What losses cost over the days, for JSON."""
    mtbf, days = span_of(flags, roles)
    context = question.setting.workload.context_mean
    rank = plan.batch * plan.micro_batches * computed_again(context, recovery)
    others = 1 if recovery.all_end else max(plan.ranks - 1, 1)
    again = rank * again_second(question, plan) / others / plan.decoders
    found = endured(roles, mtbf, days, again, seed)
    return {
        "mtbf_s": mtbf,
        "days": days,
        "losses": found.losses,
        "kept": round(found.kept, 9),
        "tokens_lost_per_day": round((1 - found.kept) * plan.tok_s * 86400),
        "still_s_per_day": round(found.still, 3),
        "fewer_s_per_day": round(found.fewer, 3),
    }


def said_of(outages: Sequence[Outage]) -> list[dict[str, Any]]:
    """Each loss, for JSON."""
    return [
        {
            "role": one.role.name,
            "at_s": round(one.at, 3),
            "devices": one.role.size,
            "of_instances": one.role.instances,
            "all_wait_s": round(one.stalled - one.at, 3),
            "speed": round(one.role.speed[1], 4),
            "back_s": round(one.back - one.at, 3),
        }
        for one in outages
    ]


def loss_text(values: dict[str, Any]) -> list[str]:
    """Lines of what was lost, of `values` as they are printed in JSON."""
    lines = [_loss_line(one) for one in values.get("losses", ())]
    if "undisturbed" in values:
        calm, stalls = values["undisturbed"], values["moved"]["next_token_s"]
        moved = f"{values['moved']['requests']:,} requests lost their rank"
        if stalls is not None:
            moved += f" and had their next token after p50 {stalls['p50']:,.2f}, p99 {stalls['p99']:,.2f} s"
        if values["moved"]["requests"]:
            lines.append(f"{moved}; {values['moved']['tokens_again']:,.0f} tokens were computed again")
        lines.append(
            f"without losses: TTFT p99 {calm['ttft_ms']['p99']:,.1f} ms, TPOT p99 {calm['tpot_ms']['p99']:,.1f} ms, "
            f"{calm['goodput_requests_per_s']:,.2f} requests/s inside the targets"
        )
    if "long_run" in values:
        lines.append(_long_line(values["long_run"]))
    return lines


def _long_line(run: dict[str, Any]) -> str:
    each = ", ".join(f"{count / run['days']:,.3g} of {name}" for name, count in run["losses"].items())
    share, lost = (1 - run["kept"]) * 1e6, f"{run['tokens_lost_per_day']:,} tokens a day are lost"
    still, fewer = _long(run["still_s_per_day"]), _long(run["fewer_s_per_day"])
    return (
        f"with a device lost every {_long(run['mtbf_s'] / 3600)} h ({each} a day): {lost}, {_long(share)} in a "
        f"million; a day has {still} s in which nothing is served, and {fewer} s with fewer devices"
    )


def _long(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def _loss_line(one: dict[str, Any]) -> str:
    many = f" ({one['devices']} devices)" if one["devices"] > 1 else ""
    who = f"those of its instance of {one['of_instances']}" if one["of_instances"] > 1 else "all"
    waits = f"{who} wait {one['all_wait_s']:,.2f} s" if one["all_wait_s"] else "nobody else waits"
    what = "prompts are read" if one["role"] == "prefill" else "steps are"
    slower = f", then {what} {1 / one['speed'] - 1:.1%} slower" if 0 < one["speed"] < 1 else ""
    return f"{one['role']}{many} lost at {one['at_s']:,.1f} s: {waits}{slower}; it is back after {one['back_s']:,.1f} s"
