"""What a replay found, as values for JSON and as text."""

from typing import Any

from afserve.cli.pilot.shares import ClassShares
from afserve.control.pilot.replay.compare import SIZERS, Comparison
from afserve.control.pilot.replay.run import PlayedDay

_AFTER = 120.0  # seconds behind a burst and what is waited for, within which its last change comes


def compared_values(found: Comparison) -> dict[str, Any]:
    """For JSON."""
    pilot, others = found.pilot, found.rivals
    return {
        **{name: _row(one) for name, one in found.rows},
        "replica": str(others.unit),
        "attainment_of_oracle": round(pilot.met / max(others.oracle.met, 1e-9), 4),
        **{
            f"hours_of_{name}": round(pilot.device_hours / one.device_hours, 3)
            for name, one in found.rows[1:]
        },
        "changes_in_10_minutes": round(pilot.change_count / max(pilot.hours * 6, 1e-9), 2),
        "intervals": {"compared": found.judged, "held": found.held},
    }


def beside_bursts(pilot: PlayedDay, spans: list[tuple[float, float]], hold: float) -> dict[str, Any]:
    """Changes outside of bursts: of one are those from its beginning until `hold` and two minutes behind its end."""
    if not spans:
        return {}
    wide = sorted((begin, min(end + hold + _AFTER, pilot.hours * 3600)) for begin, end in spans)
    seconds, upto = 0.0, 0.0
    for begin, end in wide:
        seconds += max(0.0, end - max(begin, upto))
        upto = max(upto, end)
    beside = sum(not any(begin <= at <= end for begin, end in wide) for at, _ in pilot.changes[1:])
    tens = (pilot.hours * 3600 - seconds) / 600
    return {
        "burst_count": len(spans),
        "changes_beside_bursts_in_10_minutes": round(beside / tens, 2) if tens > 1 else None,
    }


def class_values(found: Comparison, mix: ClassShares) -> dict[str, Any]:
    """Of each class, which share was in time; and the least that the pilot reached of what the oracle did."""
    if not found.pilot.by_class:
        return {}
    parts = {
        aim.name: {"share": round(share, 4)}
        | {name: round(one.by_class[aim.name], 4) for name, one in found.rows}
        for aim, share in zip(mix.aims, mix.shares, strict=True)
        if aim.name in found.pilot.by_class
    }
    least = min(one["pilot"] / max(one["oracle"], 1e-9) for one in parts.values())
    return {"classes": parts, "least_class_of_oracle": round(least, 4)}


def _row(one: PlayedDay) -> dict[str, Any]:
    return {**one.figures(), "changes": one.change_count, "most_devices": one.most}


def replay_text(values: dict[str, Any]) -> str:
    asked, limit = values["requests"], f"at most {values['pool']}"
    lines = [
        f"{asked:,} requests in {values['hours']:g} h, {values['model']} on {limit}, first token within "
        f"{values['ttft']}, {values['tpot']} a token:",
        f"{'':10} {'in time':>8} {'device hours':>13} {'changes':>8} {'most':>6}",
    ]
    for name in SIZERS:
        row = values[name]
        shown_row = f"{name:10} {row['attainment']:8.2%} {row['device_hours']:13,.1f}"
        lines.append(f"{shown_row} {row['changes']:8,} {row['most_devices']:6,}")
    judged = values["intervals"]
    served, hours = values["attainment_of_oracle"], values["hours_of_oracle"]
    lines.append(
        f"the pilot: {served:.3f} of the oracle's attainment with {hours:.2f} times its device hours, "
        f"{values['hours_of_fixed']:.2f} times those of fixed sizes, {values['changes_in_10_minutes']:.2f} changes in "
        f"ten minutes; {judged['held']} of {judged['compared']} 80 % intervals held"
    )
    if "burst_count" in values:
        beside = values["changes_beside_bursts_in_10_minutes"]
        apart = "" if beside is None else f"; {beside} changes in ten minutes beside them"
        lines.append(f"{values['burst_count']} bursts{apart}")
    for name, one in values.get("classes", {}).items():
        inside = ", ".join(f"{who} {one[who]:.2%}" for who in SIZERS)
        lines.append(f"class {name}, {one['share']:.0%} of the requests, in time: {inside}")
    return "\n".join(lines)
