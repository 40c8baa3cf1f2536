"""Who else is at work on this machine: what makes a measurement not worth believing.

It reads /proc. What a system does not tell counts as nothing.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from afserve.control.pressure import cpu_pressure

PROC = Path("/proc")
_LOAD, _PRESSURE, _OTHERS, _STOLEN = 0.5, 0.10, 0.10, 0.02
"""Beyond these there is something to say: load by core, share of ten seconds, shares of the cores' time."""


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Ticks since the start of the machine: of all cores, of those that worked, of those that a hypervisor gave to
    others; and those that this process has worked."""

    every: float = 0.0
    busy: float = 0.0
    stolen: float = 0.0
    own: float = 0.0

    @classmethod
    def now(cls, proc: Path = PROC) -> "CoreTime":
        try:
            ticks = [float(tick) for tick in (proc / "stat").read_text(encoding="ascii").split()[1:9]]
        except (OSError, ValueError):
            return cls()
        idle, stolen = ticks[3] + ticks[4], ticks[7]
        own = sum(os.times()[:4]) * os.sysconf("SC_CLK_TCK")
        return cls(sum(ticks), sum(ticks) - idle - stolen, stolen, own)

    def stolen_since(self, begin: "CoreTime") -> float:
        """The share of the cores' time that a hypervisor gave to others."""
        return _share(self.stolen - begin.stolen, self.every - begin.every)

    def others_since(self, begin: "CoreTime") -> float:
        """The share that other processes of this machine had."""
        return _share(self.busy - begin.busy - (self.own - begin.own), self.every - begin.every)


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


@dataclass(frozen=True, slots=True)
class OtherLoad:
    """`load` and `pressure` are of before: runnable processes in the mean of a minute, and the share of ten seconds in
    which something waited for a core. `others` and `stolen` are shares of the cores' time meanwhile."""

    cores: int
    load: float
    pressure: float
    others: float = 0.0
    stolen: float = 0.0

    def said(self) -> list[str]:
        """What to tell; nothing where the machine was quiet."""
        found = []
        if self.load > _LOAD * self.cores or self.pressure > _PRESSURE:
            found.append(
                f"busy before: load {self.load:.1f} on {self.cores} cores, pressure {self.pressure:.0%}"
            )
        if self.others > _OTHERS:
            found.append(f"other processes had {self.others:.0%} of the cores' time")
        if self.stolen > _STOLEN:
            found.append(f"the host gave {self.stolen:.0%} of the cores' time to others")
        return found


def others_before(cores: int, proc: Path = PROC) -> OtherLoad:
    pressure = cpu_pressure(proc / "pressure" / "cpu")
    return OtherLoad(cores, os.getloadavg()[0], pressure or 0.0)
