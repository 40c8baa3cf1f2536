"""An expert node as a process: rows come and go over the data plane; the control stream says when to fill and stop.

Slots of a coming placement are filled by a thread of the engine's; this loop only starts it and reports its end.
"""

from contextlib import suppress
from typing import TYPE_CHECKING

from afserve.control.node.beginning import freeze_heap, identify, spans_of
from afserve.control.node.heartbeat import HeartbeatThread
from afserve.control.node.recording import Recorder
from afserve.control.node.report import Report, Reporter, silent
from afserve.control.node.stream import ControlStream
from afserve.control.node.tracing import sent
from afserve.control.node.work_spans import WorkSpans
from afserve.control.wire import placement_values, values
from afserve.credentials import Credentials
from afserve.engine.filler import Filler
from afserve.errors import PeerLost, ProtocolError
from afserve.member import expert_node
from afserve.placement.migrate import SlotUse
from afserve.placement.placement import Placement

if TYPE_CHECKING:
    from afserve.engine.expert_node import ExpertNode

_PARKED = 0.25  # rows wake a waiting node at once; this bounds how late a command is seen
_PARKED_BUSY = 0.005  # while slots are filled, or it records


def serve_expert(stream: ControlStream, assigned: values.Assigned, heartbeat: HeartbeatThread) -> None:
    from afserve.control.node.wiring import build_expert

    def announce(address: str, agreed: dict[str, str]) -> None:
        stream.send(values.Endpoint(address, agreed))

    progress, tell = stream.progress("expert weights"), identify(stream)
    credentials = Credentials(stream.token, stream.certificates, assigned.life.generation)
    node, filler, close = build_expert(assigned, progress, announce, tell, stream.own_address(), credentials)
    spans = spans_of(assigned)
    work = spans and WorkSpans(str(assigned.node), node.stats, spans.put, assigned.deployment.fingerprint)
    report = Reporter(heartbeat, stream, work.stats if work else node.stats)
    freeze_heap()
    stream.send(values.Ready(heartbeat.resident_bytes(), node.expert_error, isa=node.isa))
    placement = assigned.deployment.placement
    try:
        with sent(node.trace, stream.send, assigned.deployment):
            ExpertLoop(node, filler, placement, assigned.node.index, stream, report).run()
    finally:
        if work and spans:
            work.close()
            spans.close()
        filler.close()
        close()


class ExpertLoop:
    """Answers rows and fills slots until Shutdown. `placement` is what the bank was built with."""

    def __init__(
        self,
        node: "ExpertNode",
        filler: Filler,
        placement: Placement,
        index: int,
        stream: ControlStream,
        report: Report = silent,
    ) -> None:
        self._node = node
        self._recorder = Recorder(node, str(expert_node(index)), stream.send)
        self._filler = filler
        self._slots = SlotUse(index, placement)
        self._stream = stream
        self._report = report
        self._filling: set[int] = set()
        self._running = True

    def run(self) -> None:
        while self._running:
            self.turn()

    def turn(self) -> None:
        """What has arrived, and one poll. A lost attention node is the controller's business: the others are served."""
        self._report()
        self._recorder.look()
        for command in self._stream.receive(0.0):
            self._obey(command)
        if not self._running:
            return
        if self._filling:
            self._report_filled()
        with suppress(PeerLost):
            if not self._node.poll():
                self._node.wait(_PARKED_BUSY if self._filling or self._recorder.active else _PARKED)
                self._node.poll()  # what came is computed before anything else is looked at

    def _obey(self, command: values.ToNode) -> None:
        match command:
            case values.Shutdown():
                self._running = False
            case values.Record():
                self._recorder.begin(command)
            case values.Drain():
                self._stream.send(values.Drained())
            case values.AttentionNodes(nodes):
                self._node.in_phases({node.life.index: node.phase for node in nodes})
            case placement_values.FillSlots(placement, urgent):
                self._fill(placement, urgent)
            case placement_values.Retire(epoch):
                self._filling.discard(epoch)
                self._slots.forget(self._filler.abandon(epoch))
                self._slots.retire(epoch)
                self._node.retire(epoch)
            case _:
                raise ProtocolError(f"an expert node does not take {type(command).__name__}")

    def _fill(self, placement: Placement, urgent: bool) -> None:
        self._report_filled()  # what could not be read is not held
        self._filling.add(placement.epoch)
        self._filler.submit(placement.epoch, self._slots.fills(placement), urgent=urgent)

    def _report_filled(self) -> None:
        """But for those that were given up meanwhile. What cannot be read costs nothing else: the node serves on."""
        for loaded in self._filler.finished():
            self._slots.forget(loaded.unread)
            if loaded.epoch not in self._filling:
                continue
            self._filling.discard(loaded.epoch)
            if loaded.unread:
                self._slots.retire(loaded.epoch)
                experts = tuple((fill.layer, fill.expert) for fill in loaded.unread)
                self._stream.send(placement_values.Unfilled(loaded.epoch, experts, loaded.why))
                continue
            self._node.accept(loaded.epoch)
            self._stream.send(
                placement_values.Filled(loaded.epoch, loaded.experts, loaded.bytes, loaded.seconds)
            )
