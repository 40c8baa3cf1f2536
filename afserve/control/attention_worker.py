"""An attention node as a process: requests come from the control stream, events go back, one message per step.

It blocks where there is nothing to do: on the stream while idle, on the link while replies are in flight.
"""

import gc
import time
from collections.abc import Callable
from typing import Protocol

from afserve.control.pulse import Pulse
from afserve.control.stream import ControlStream
from afserve.control.values import (
    Adopt,
    Adopted,
    Assigned,
    Cancel,
    Drain,
    Drained,
    Endpoint,
    Peers,
    Ready,
    Refused,
    Shutdown,
    Submit,
    Tokens,
    ToNode,
)
from afserve.engine.request import GenerationRequest, TokenEvent
from afserve.engine.stats import AttentionStats
from afserve.errors import AfserveError, ProtocolError
from afserve.placement.plan import Placement

PEERS_SECONDS = 330.0  # longer than the controller waits for anyone: it knows who is missing
_IDLE = 1.0  # the stream wakes an idle node at once; this only bounds how late a broken stream is seen
_TOGETHER = (
    0.004  # tokens of steps shorter than this go out in one message: each costs a tenth of such a step
)
_PARKED = 0.05  # replies wake a waiting node at once; this bounds how late a new request is seen


class Node(Protocol):
    """What this loop needs of `engine.attention_node.AttentionNode`."""

    stalled: bool

    @property
    def busy(self) -> bool: ...
    def submit(self, request: GenerationRequest) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def step(self) -> list[TokenEvent]: ...
    def wait(self, timeout: float) -> None: ...
    def stats(self) -> AttentionStats: ...
    def adopt(self, placement: Placement) -> None: ...
    @property
    def settled(self) -> bool: ...


def serve_attention(stream: ControlStream, assigned: Assigned, pulse: Pulse) -> None:
    from afserve.control.wiring import build_attention

    node, close = build_attention(assigned, stream.progress("attention weights"), meet(stream))
    pulse.stats = node.stats
    freeze_heap()
    stream.send(Ready(pulse.resident_bytes()))
    try:
        AttentionLoop(node, stream).run()
    finally:
        close()


def meet(stream: ControlStream) -> Callable[[dict[str, str]], tuple[str, ...]]:
    """Tells what this node will put on the data plane and returns the expert nodes' addresses."""

    def rendezvous(agreed: dict[str, str]) -> tuple[str, ...]:
        stream.send(Endpoint("", agreed))
        peers = stream.expect(Peers, PEERS_SECONDS, "the expert nodes' addresses")
        assert isinstance(peers, Peers)
        return peers.addresses

    return rendezvous


def freeze_heap() -> None:
    """Weights and tables live as long as the process; the collector need not look at them again."""
    gc.collect()
    gc.freeze()


class AttentionLoop:
    """Commands in, one step, events out, until Shutdown. Raises PeerLost when the stream or an expert node goes."""

    def __init__(self, node: Node, stream: ControlStream) -> None:
        self._node = node
        self._stream = stream
        self._running = True
        self._draining = False
        self._adopting: int | None = None
        self._unsent: list[TokenEvent] = []
        self._sent = 0.0

    def run(self) -> None:
        while self._running:
            if not self._node.busy:
                self._flush()
            for command in self._stream.receive(0.0 if self._node.busy else _IDLE):
                self._obey(command)
            if self._adopting is not None and self._node.settled:
                self._stream.send(Adopted(self._adopting))
                self._adopting = None
            if self._node.busy:
                self._step()
            elif self._draining:
                self._draining = False
                self._stream.send(Drained())

    def _step(self) -> None:
        self._unsent += self._node.step()
        if self._node.stalled or time.monotonic() - self._sent >= _TOGETHER:
            self._flush()
        if self._node.stalled:
            self._node.wait(_PARKED)

    def _flush(self) -> None:
        if self._unsent:
            self._stream.send(Tokens(tuple(self._unsent)))
            self._unsent.clear()
            self._sent = time.monotonic()

    def _obey(self, command: ToNode) -> None:
        match command:
            case Submit(request):
                self._submit(request)
            case Cancel(number):
                self._node.cancel(str(number))
            case Adopt(epoch, placement):
                self._node.adopt(Placement.from_json(placement))
                self._adopting = epoch
            case Drain():
                self._draining = True
            case Shutdown():
                self._running = False
            case _:
                raise ProtocolError(f"an attention node does not take {type(command).__name__} now")

    def _submit(self, request: GenerationRequest) -> None:
        try:
            self._node.submit(request)
        except AfserveError as error:
            self._stream.send(Refused(int(request.request_id), error))
