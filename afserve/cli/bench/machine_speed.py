"""How much a machine itself changed while it was measured: its speed, and core time that others had."""

from pathlib import Path

_CHANGED, _STOLEN = 0.10, 0.02
"""Of its speed, and of its cores' time: beyond these the user is told."""


def changed(ratio: float) -> str:
    """What to say of a machine whose stages took `ratio` times as long at the end as at the beginning."""
    if abs(ratio - 1) <= _CHANGED:
        return ""
    return (
        f"the machine changed: stages took {ratio - 1:+.0%} at the end. Plans are of its mean; measure again when "
        "it is steady, or plan with both files\n"
    )


def core_seconds() -> tuple[float, float]:
    """(all, stolen): ticks of all cores since the start, and those of them that a hypervisor gave to others; 0 where
    the system does not tell."""
    try:
        ticks = [float(tick) for tick in Path("/proc/stat").read_text(encoding="ascii").split()[1:9]]
    except (OSError, ValueError):
        return 0.0, 0.0
    return sum(ticks), ticks[7]


def stolen(before: tuple[float, float], after: tuple[float, float]) -> str:
    """What to say of core time that others had."""
    every, others = after[0] - before[0], after[1] - before[1]
    if every <= 0 or others / every <= _STOLEN:
        return ""
    return (
        f"the host gave {others / every:.0%} of the cores' time to others meanwhile: runs will vary as much\n"
    )
