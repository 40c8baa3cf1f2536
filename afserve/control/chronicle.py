"""What a run is remembered by: rows that were routed, lines for the log, recordings, traces, and what it went through.

None of it is the membership's business, and an exception in any of it costs that alone.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from afserve.adviser import Adviser
from afserve.clock import Clock
from afserve.control.incidents import Incidents
from afserve.control.membership.balancing import Balancing
from afserve.control.membership.events import Incident
from afserve.control.membership.members import Members
from afserve.control.recordings import Recordings
from afserve.control.traces import TraceFiles
from afserve.control.wire.desired import Deployment
from afserve.control.wire.load_values import GatewayLoad
from afserve.control.wire.placement_values import Routed
from afserve.control.wire.values import FromNode, Noted, Ready, Recorded, ToNode, Traced
from afserve.engine.stats import AttentionStats
from afserve.errors import ProtocolError
from afserve.kernels.isa import DIFFERENT_ISAS
from afserve.member import MODEL_ROLES, Life

log = logging.getLogger("afserve.control")


class Chronicle:
    def __init__(
        self,
        deployment: Deployment,
        members: Members,
        balancing: Balancing,
        clock: Clock,
        tell: Callable[[Life, ToNode], None],
        show_incident: Callable[[Incident], None],
    ) -> None:
        self.incidents = Incidents()
        self.recordings = Recordings(tell)
        self.loads: dict[Life, GatewayLoad] = {}  # what each life of a gateway said last
        self._members, self._balancing, self._clock, self._show = members, balancing, clock, show_incident
        self._traces = TraceFiles(Path(deployment.trace_folder)) if deployment.trace_sent else None
        self._counts_advice = Adviser("counting where rows go", ProtocolError)
        self._story_advice = Adviser("telling what happened")
        self._trace_advice = Adviser("keeping traces and recordings")

    def _compare_isa(self, ready: Life, isa: str) -> None:
        """Where nodes of a run compute with different instruction sets, the log says so of each that is not as the
        first one."""
        others = [m for m in self._members if m.isa and m.id != ready]
        if isa and others and others[0].isa != isa:
            log.warning(
                "%s computes with %s, %s with %s. %s",
                ready.node,
                isa,
                others[0].node,
                others[0].isa,
                DIFFERENT_ISAS,
            )

    def keep_said(self, member: Life, value: FromNode) -> bool:
        """Whether what a node said is for the record only. Raises ProtocolError for counts of another model."""
        now = self._clock.now()
        match value:
            case Routed(rows):
                self._counts_advice.ask(now, lambda: self._balancing.count_rows(rows, now), None)
            case Noted(text, warning):
                log.log(logging.WARNING if warning else logging.INFO, "%s: %s", member.node, text)
            case GatewayLoad():
                self.loads[member] = value
            case Recorded():
                self._trace_advice.ask(now, lambda: self.recordings.collect_part(member, value), None)
            case Traced(data):
                self._trace_advice.ask(now, lambda: self._keep_trace(member, data), None)
            case Ready(isa=isa):
                self._story_advice.ask(now, lambda: self._compare_isa(member, isa), None)
                return False
            case _:
                return False
        return True

    def _keep_trace(self, member: Life, data: bytes) -> None:
        found = self._members.find_life(member)
        if self._traces is not None and found is not None:
            self._traces.keep(member, found.host, data, time.monotonic())

    def keep_stats(self, member: Life, stats: AttentionStats) -> None:
        """Rows that were sent again, and how long work stood still."""
        self._story_advice.ask(self._clock.now(), lambda: self.incidents.count_stalls(member, stats), None)

    def keep_incident(self, incident: Incident) -> None:
        now = self._clock.now()
        self._story_advice.ask(now, lambda: self.incidents.note_incident(incident, time.time()), None)
        self._trace_advice.ask(now, lambda: self._show(incident), None)

    async def record(self) -> tuple[bytes, ...]:
        """What some nodes of each role that serve do for a moment from now on, packed."""
        serving = [member for role in MODEL_ROLES for member in self._members.living(role) if member.serving]
        return await self.recordings.record_nodes([member.id for member in serving])
