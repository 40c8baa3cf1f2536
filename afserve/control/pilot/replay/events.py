"""Requests one by one on three pools that change size, by the planner's event simulator: minutes of a deployment.

`flow` plays days of the same, in packets. It decides nothing about sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from afserve.control.pilot.classes import ClassAim
from afserve.control.pilot.replay.counts import Packet, PacketCounts
from afserve.control.pilot.replay.tabled import TabledStages
from afserve.control.pilot.sizes import PoolSizes, TargetTimes
from afserve.placement.planner.simulate.phases import PhaseLayout, PhasesRun
from afserve.placement.planner.simulate.station import NEVER, SimulatedRequest


@dataclass
class EventRun:
    """As `FlowRun`; each packet is one request, of no class."""

    stages: TabledStages
    packets: Sequence[Packet]
    wanted: TargetTimes
    sizes: PoolSizes
    now: float = 0.0
    counts: PacketCounts = field(init=False)

    def __post_init__(self) -> None:
        self.counts = PacketCounts(self.wanted, (ClassAim(""),))
        reads, decodes = self.stages.pools(self.sizes)
        layout = PhaseLayout(self.stages.chunk, reads=(reads,), decodes=(decodes,), pieces=self.stages.pieces)
        asked = [SimulatedRequest(one.at, one.prompt, one.answer) for one in self.packets]
        self._run = PhasesRun(layout, asked)
        self._noted = 0  # that came
        self._unread: list[int] = []  # that have no first token

    def resize(self, sizes: PoolSizes) -> None:
        self.sizes = sizes
        self._run.resize(*self.stages.pools(sizes))

    @property
    def over(self) -> bool:
        return self._run.over

    @property
    def running(self) -> float:
        return self._run.decoding

    @property
    def queued(self) -> float:
        """Prompt tokens that are not read."""
        return self._run.queued

    def advance(self, until: float) -> None:
        ended = list(self._run.play(until))
        self.now = until
        self._note_came()
        self._note_firsts()
        for number in ended:
            times = self._run.times[number]
            self.counts.note_ended(self.packets[number], times.first, times.ended)
        self.counts.prefill_busy = self._run.reading_seconds

    def _note_came(self) -> None:
        fresh = range(self._noted, self._run.came)
        for number in fresh:
            self.counts.note_came(self.packets[number])
        self._unread += fresh
        self._noted = self._run.came

    def _note_firsts(self) -> None:
        left = []
        for number in self._unread:
            first = self._run.times[number].first
            if first == NEVER:
                left.append(number)
            else:
                self.counts.note_first(self.packets[number], first)
        self._unread = left
