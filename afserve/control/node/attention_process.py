"""An attention node as a process: everything is opened, the loop runs, and everything is closed."""

from dataclasses import replace

from afserve.clock import AwakeClock
from afserve.comm.kv.reach import address_of, listen_at
from afserve.control.node.attention import IDLE, AttentionLoop, Moved
from afserve.control.node.beginning import freeze_heap, identify, meet, spans_of
from afserve.control.node.counts import DrawnCounts
from afserve.control.node.gateways import GatewayStreams
from afserve.control.node.heartbeat import HeartbeatThread
from afserve.control.node.journal import Journal
from afserve.control.node.kept import KeptRequests
from afserve.control.node.peers import ExpertPeers
from afserve.control.node.report import Reporter
from afserve.control.node.stream import ControlStream
from afserve.control.node.telling import CacheTeller, open_publisher
from afserve.control.node.tracing import sent
from afserve.control.wire import values
from afserve.control.wire.request_values import Attend
from afserve.credentials import Credentials
from afserve.engine.stats import AttentionStats
from afserve.member import Role


def serve_attention(stream: ControlStream, assigned: values.Assigned, heartbeat: HeartbeatThread) -> None:
    from afserve.control.node.wiring import build_attention, kv_place
    from afserve.engine.kv.moving.open import open_kv

    progress, tell, listener = (
        stream.progress("attention weights"),
        identify(stream),
        listen_at(stream.own_address()),
    )
    credentials = Credentials(stream.token, stream.certificates, assigned.life.generation)
    rendezvous = meet(stream, address_of(listener, stream.certificates))
    node, first, close = build_attention(assigned, progress, rendezvous, tell, credentials)
    place = kv_place(stream, assigned, credentials, lambda: stream.deliver(Moved()))
    kv = open_kv(node, listener, place)
    nodes = assigned.deployment.count(Role.ATTENTION)

    def stats() -> AttentionStats:
        told = node.stats(kv.stats(), kv.tiers())
        return replace(told, waiting=told.waiting + kv.in_line, experts=node.expert_memory())

    drawn = stats if node.trace is None else DrawnCounts(stats, node.trace)
    report = Reporter(heartbeat, stream, drawn, node.take_routed, attention=nodes)
    freeze_heap()
    spans = spans_of(assigned)
    journal = Journal(str(assigned.node), None if spans is None else spans.put)
    kept = KeptRequests(assigned.deployment.engine.orphan_grace, AwakeClock(most=2 * IDLE), journal)

    def attend(gateway: int) -> Attend:
        return Attend(assigned.life, kept.held(gateway))

    publisher = open_publisher(node.told, assigned)
    gateways = GatewayStreams(
        attend, stream.address, stream.token, stream.deliver, certificates=stream.certificates
    )
    if node.unread and assigned.node.index == 0:  # the others have read the same
        stream.send(values.Noted(node.unread, warning=True))
    stream.send(values.Ready(heartbeat.resident_bytes(), node.expert_error, node.dense_error, node.isa))
    try:
        silence = assigned.deployment.silence
        experts = ExpertPeers(node, first, silence, stream.deliver, stream.send, AwakeClock())
        node.in_phase(assigned.deployment.phase(assigned.node.index))
        loop = AttentionLoop(
            node,
            stream,
            gateways,
            experts,
            kept,
            kv,
            report,
            index=assigned.node.index,
            look=CacheTeller(node.told, gateways, publisher).tell_changes,
            copies=assigned.deployment.engine.kv_copies,
        )
        with node.stepping(), sent(node.trace, stream.send, assigned.deployment):
            loop.run()
    finally:
        gateways.close()
        kv.close()
        if publisher is not None:
            publisher.stop_publishing()
        close()
        if spans is not None:
            spans.close()
