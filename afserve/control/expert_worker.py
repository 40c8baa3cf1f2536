"""An expert node as a process: rows come and go over the data plane, the control stream only says when to stop."""

from typing import Protocol

from afserve.control.attention_worker import freeze_heap
from afserve.control.pulse import Pulse
from afserve.control.stream import ControlStream
from afserve.control.values import Assigned, Drain, Drained, Endpoint, Ready, Shutdown
from afserve.engine.stats import ExpertStats
from afserve.errors import PeerLost, ProtocolError

_PARKED = 0.25  # rows wake a waiting node at once; this bounds how late a command is seen


class Node(Protocol):
    """What this loop needs of `engine.expert_node.ExpertNode`."""

    def poll(self) -> int: ...
    def wait(self, timeout: float) -> object: ...
    def stats(self) -> ExpertStats: ...


def serve_expert(stream: ControlStream, assigned: Assigned, pulse: Pulse) -> None:
    from afserve.control.wiring import build_expert

    def announce(address: str, agreed: dict[str, str]) -> None:
        stream.send(Endpoint(address, agreed))

    node, close = build_expert(assigned, stream.progress("expert weights"), announce)
    pulse.stats = node.stats
    freeze_heap()
    stream.send(Ready(pulse.resident_bytes()))
    try:
        serve_until_shutdown(node, stream)
    finally:
        close()


def serve_until_shutdown(node: Node, stream: ControlStream) -> None:
    """A lost attention node is the controller's business: the others are still served."""
    while not _told_to_stop(stream):
        try:
            if not node.poll():
                node.wait(_PARKED)
        except PeerLost:
            continue


def _told_to_stop(stream: ControlStream) -> bool:
    for command in stream.receive(0.0):
        match command:
            case Shutdown():
                return True
            case Drain():
                stream.send(Drained())
            case _:
                raise ProtocolError(f"an expert node does not take {type(command).__name__}")
    return False
