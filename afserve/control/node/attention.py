"""An attention node as a process: requests come from the gateways, events go back, one message per step and gateway.

It blocks where there is nothing to do: on its inbox while idle, on the link while replies are in flight. A request's id
tells whose it is. The node keeps a request until its gateway has acknowledged the end of it.
"""

import gc
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from afserve.control.node.gateways import FromGateway, GatewayStreams
from afserve.control.node.heartbeat import HeartbeatThread
from afserve.control.node.report import Report, Reporter, silent
from afserve.control.node.stream import ControlStream
from afserve.control.wire.values import (
    Acknowledge,
    Adopt,
    Adopted,
    Assigned,
    Attend,
    Cancel,
    Drain,
    Drained,
    Endpoint,
    Gateways,
    Identity,
    Peers,
    Ready,
    Refused,
    Shutdown,
    Submit,
    ToAttention,
    Tokens,
    ToNode,
    gateway_of,
)
from afserve.engine.request import GenerationRequest, TokenEvent
from afserve.errors import AfserveError, ProtocolError
from afserve.placement.placement import Placement

PEERS_SECONDS = 330.0  # longer than the controller waits for anyone: it knows who is missing
_IDLE = 1.0  # the stream wakes an idle node at once; this only bounds how late a broken stream is seen
_TOGETHER = (
    0.004  # tokens of steps shorter than this go out in one message: each costs a tenth of such a step
)
_PARKED = 0.05  # replies wake a waiting node at once; this bounds how late a new request is seen


class AttentionEngine(Protocol):
    """What this loop needs of `engine.attention_node.AttentionNode`."""

    stalled: bool

    @property
    def busy(self) -> bool: ...
    def submit(self, request: GenerationRequest) -> None: ...
    def cancel(self, handle: int) -> None: ...
    def step(self) -> list[TokenEvent]: ...
    def wait(self, timeout: float) -> None: ...
    def adopt(self, placement: Placement) -> None: ...
    @property
    def settled(self) -> bool: ...


def serve_attention(stream: ControlStream, assigned: Assigned, heartbeat: HeartbeatThread) -> None:
    from afserve.control.node.wiring import build_attention

    progress, tell = stream.progress("attention weights"), identify(stream)
    node, close = build_attention(assigned, progress, meet(stream), tell)
    report = Reporter(heartbeat, stream, node.stats, node.take_routed)
    freeze_heap()
    attend = Attend(assigned.node.index, assigned.generation)
    gateways = GatewayStreams(attend, stream.address, stream.token, stream.deliver)
    stream.send(Ready(heartbeat.resident_bytes()))
    try:
        AttentionLoop(node, stream, gateways, report).run()
    finally:
        gateways.close()
        close()


def identify(stream: ControlStream) -> Callable[[Mapping[str, str]], None]:
    """Tells what this node's host has of the checkpoint."""
    return lambda things: stream.send(Identity(things))


def meet(stream: ControlStream) -> Callable[[dict[str, str]], Mapping[int, str]]:
    """Tells what this node will put on the data plane and returns the expert nodes' addresses, by index."""

    def rendezvous(agreed: dict[str, str]) -> Mapping[int, str]:
        stream.send(Endpoint("", agreed))
        peers = stream.expect(Peers, PEERS_SECONDS, "the expert nodes' addresses")
        assert isinstance(peers, Peers)
        return dict(peers.experts)

    return rendezvous


def freeze_heap() -> None:
    """Weights and tables live as long as the process; the collector need not look at them again."""
    gc.collect()
    gc.freeze()


class AttentionLoop:
    """Commands in, one step, events out, until Shutdown. Raises PeerLost when the stream or an expert node goes."""

    def __init__(
        self, node: AttentionEngine, stream: ControlStream, gateways: GatewayStreams, report: Report = silent
    ) -> None:
        self._node = node
        self._stream = stream
        self._gateways = gateways
        self._report = report
        self._open: set[int] = set()  # requests whose end no gateway has acknowledged
        self._running = True
        self._was_busy = False
        self._draining = False
        self._adopting: int | None = None
        self._unsent: list[TokenEvent] = []
        self._sent = 0.0

    def run(self) -> None:
        while self._running:
            busy = self._node.busy
            if not busy:
                self._flush()
            if busy is self._was_busy:
                self._report()
            else:
                self._was_busy = busy
                self._report(soon=True)  # /metrics shows at once that requests run, or that none does
            self._gateways.redial()
            for command in self._stream.receive(0.0 if self._node.busy else _IDLE):
                self._obey(command)
            if self._adopting is not None and self._node.settled:
                self._stream.send(Adopted(self._adopting))
                self._adopting = None
            if self._node.busy:
                self._step()
            elif self._draining and not self._open:
                self._draining = False
                self._report(at_once=True)
                self._stream.send(Drained())

    def _step(self) -> None:
        self._unsent += self._node.step()
        if self._node.stalled or time.monotonic() - self._sent >= _TOGETHER:
            self._flush()
        if self._node.stalled:
            self._node.wait(_PARKED)

    def _flush(self) -> None:
        if self._unsent:
            for gateway, events in _by_gateway(self._unsent).items():
                self._gateways.send(gateway, Tokens(tuple(events)))
            self._unsent.clear()
            self._sent = time.monotonic()

    def _obey(self, command: ToNode | FromGateway) -> None:
        match command:
            case FromGateway():
                if self._gateways.is_of_now(command):
                    self._serve(command.gateway, command.value)
            case Gateways():
                for gateway in self._gateways.update(command):
                    self._forget(gateway)
            case Adopt(placement):
                self._node.adopt(placement)
                self._adopting = placement.epoch
            case Drain():
                self._draining = True
            case Shutdown():
                self._running = False
            case _:
                raise ProtocolError(f"an attention node does not take {type(command).__name__} now")

    def _serve(self, gateway: int, value: ToAttention | None) -> None:
        match value:
            case Submit(request):
                self._submit(gateway, request)
            case Cancel(number):
                self._open.discard(number)
                self._node.cancel(number)
            case Acknowledge(numbers):
                self._open.difference_update(numbers)
            case None:
                self._gateways.lost(gateway)
                self._forget(gateway)

    def _forget(self, gateway: int) -> None:
        """A gateway has gone, and its clients with it."""
        for number in [number for number in self._open if gateway_of(number) == gateway]:
            self._open.discard(number)
            self._node.cancel(number)

    def _submit(self, gateway: int, request: GenerationRequest) -> None:
        number = request.handle
        if number in self._open:
            return  # said twice
        self._open.add(number)
        try:
            self._node.submit(request)
        except AfserveError as error:
            self._gateways.send(gateway, Refused(number, error))


def _by_gateway(events: list[TokenEvent]) -> dict[int, list[TokenEvent]]:
    found: dict[int, list[TokenEvent]] = {}
    for event in events:
        found.setdefault(gateway_of(event.handle), []).append(event)
    return found
