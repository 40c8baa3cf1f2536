"""Plays arrivals on pools that somebody sizes, and counts: who was served in time, device hours, changes.

A device is paid for from the moment that it is asked for; it serves `start` seconds later, and one that goes is paid
for until then too. Devices that read prompts decode at once, and the reverse, where one pool gives what the other
gets. Whoever sizes is asked every few seconds and sees only what has happened.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from afserve.control.pilot.classes import ClassAim
from afserve.control.pilot.observed import Observed
from afserve.control.pilot.replay.counts import Packet
from afserve.control.pilot.replay.events import EventRun
from afserve.control.pilot.replay.flow import FlowRun
from afserve.control.pilot.replay.tabled import TabledStages
from afserve.control.pilot.sizes import PoolSizes, TargetTimes

Sizer = Callable[[Observed], PoolSizes | None]
"""Says which sizes there shall be from now on; None for the present ones."""
_DRAIN = 3600.0  # seconds after the last arrival at most


@dataclass(frozen=True, slots=True)
class World:
    """What is played on. `slower`: all steps are by so much longer than the tables say, which a pilot does not know.
    `start`: seconds from asking for devices until they serve, and from letting them go until they are gone."""

    stages: TabledStages
    wanted: TargetTimes
    start: float = 20.0
    slower: float = 1.0
    tick: float = 1.0
    look: float = 10.0
    classes: tuple[ClassAim, ...] = (ClassAim(""),)


@dataclass(frozen=True, slots=True)
class PlayedDay:
    """`met`: the share of requests in time in both; `by_class` likewise, of each class that came. `changes` have the
    second and the sizes since then."""

    met: float
    first_late: float
    rest_late: float
    device_hours: float
    hours: float
    changes: tuple[tuple[float, PoolSizes], ...]
    by_class: dict[str, float] = field(default_factory=dict)

    @property
    def most(self) -> int:
        return max(sizes.total for _, sizes in self.changes)

    def figures(self) -> dict[str, float]:
        """For JSON."""
        return {
            "attainment": round(self.met, 4),
            "late_first_tokens": round(self.first_late, 4),
            "late_answers": round(self.rest_late, 4),
            "device_hours": round(self.device_hours, 2),
        }

    @property
    def change_count(self) -> int:
        """Changes, the first sizes not counted."""
        return len(self.changes) - 1


def play(world: World, packets: Sequence[Packet], first: PoolSizes, sizer: Sizer) -> PlayedDay:
    run = FlowRun(world.stages, packets, world.wanted, first, world.slower, world.tick, classes=world.classes)
    return play_on(world, run, sizer)


def play_on(world: World, run: FlowRun | EventRun, sizer: Sizer) -> PlayedDay:
    """The rest of what arrives."""
    changes, coming = [(run.now, run.sizes)], None
    paid, until = 0.0, run.packets[-1].at
    while not run.over and run.now < until + _DRAIN:
        billed = run.sizes if coming is None else run.sizes.at_least(coming[1])
        run.advance(run.now + world.look)
        if run.now <= until + world.look:
            paid += billed.total * world.look
        if coming is not None and run.now >= coming[0] - 1e-9:
            run.resize(coming[1])
            coming = None
        asked = sizer(_observed(run, coming is None))
        if asked is not None and coming is None and asked != run.sizes and run.now <= until:
            changes.append((run.now, asked))
            run.resize(run.sizes.turned(asked))
            coming = (run.now + world.start, asked)
            if not world.start:
                run.resize(asked)
                coming = None
    counts = run.counts
    came = max(counts.came, 1e-9)
    return PlayedDay(
        counts.met / came,
        (counts.first_late + counts.came - counts.first) / came,
        (counts.rest_late + counts.came - counts.ended) / came,
        paid / 3600,
        until / 3600,
        tuple(changes),
        {
            aim.name: kind.met / kind.came
            for aim, kind in zip(counts.classes, counts.kinds, strict=True)
            if aim.name and kind.came
        },
    )


def _observed(run: FlowRun | EventRun, settled: bool) -> Observed:
    counts = run.counts
    return Observed(run.now, run.sizes, counts.load(), settled, run.running, run.queued, counts.of_classes())
