"""The loop of an attention node: requests come from the gateways, events go back, one message per step and gateway.

It blocks where there is nothing to do: on its inbox, and what moves KV blocks, while idle, on the link while replies
are in flight. A request's id tells whose it is. The node keeps a request until its gateway has acknowledged the end of
it, or has been away too long.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from afserve.clock import Clock, MonotonicClock
from afserve.comm.kv.source import KvSource
from afserve.comm.kv.split import SplitMember
from afserve.control.copies import keepers_of
from afserve.control.node.gateways import FromGateway, GatewayStreams
from afserve.control.node.kept import KeptRequests
from afserve.control.node.kept_cache import answer_of
from afserve.control.node.peers import ExpertPeers, Reached
from afserve.control.node.recording import Recorder
from afserve.control.node.report import Report, silent
from afserve.control.node.stream import ControlStream
from afserve.control.wire import placement_values, values
from afserve.control.wire.cache_values import AskCache
from afserve.control.wire.keeping import Claim, Claimed, Given, Halt, Keep
from afserve.control.wire.request_values import (
    Acknowledge,
    Cancel,
    Refused,
    Resume,
    Submit,
    ToAttention,
    Tokens,
)
from afserve.engine.scheduling.request import ANSWER, GenerationRequest, TokenEvent
from afserve.errors import AfserveError, ProtocolError
from afserve.member import attention_node

if TYPE_CHECKING:
    from afserve.engine.attention_node import AttentionNode
    from afserve.engine.kv.moving.moves import KvMoves

_DIALLING = 0.05  # of an idle node that has a gateway to call again
IDLE = 1.0  # the stream wakes an idle node at once; this only bounds how late a broken stream is seen
_TOGETHER = 0.004  # tokens of steps shorter than this go out together: a message costs a tenth of such a step
_MOVING = 0.005  # while KV blocks come or go
_ROUND = 0.004  # between two looks of a busy node at what is not its step: a tenth of a step's Python calls
_PARKED = 0.05  # replies wake a waiting node at once; this bounds how late a new request is seen


class Moved:
    """In the node's inbox: there is something for `KvMoves.turn`."""


class AttentionLoop:
    """Commands in, one step, events out, until Shutdown. Raises PeerLost when the controller's stream ends."""

    def __init__(
        self,
        node: "AttentionNode[Any]",
        stream: ControlStream,
        gateways: GatewayStreams,
        experts: ExpertPeers,
        kept: KeptRequests,
        kv: "KvMoves",
        report: Report = silent,
        clock: Clock | None = None,
        index: int = 0,
        look: Callable[[], None] = lambda: None,
        copies: int = 0,
    ) -> None:
        """`index` is this node's; `look` is called with each look at the rest. So many `copies` of its KV are kept."""
        self._look = look
        self._kv, self._index, self._copies = kv, index, copies
        self._node = node
        self._stream = stream
        self._gateways = gateways
        self._experts = experts
        self._report = report
        self._clock = clock or MonotonicClock()
        self._kept = kept
        self._recorder = Recorder(node, str(attention_node(index)), stream.send)
        self._running = True
        self._was_busy = False
        self._draining = self._leaves = False
        self._others: list[SplitMember] = []  # attention nodes that serve
        self._adopting: int | None = None
        self._later: deque[tuple[GenerationRequest, KvSource | None]] = deque()  # nobody waits for these
        self._unsent: list[TokenEvent] = []
        self._sent = self._looked = float("-inf")

    def run(self) -> None:
        while self._running:
            self.turn()

    def turn(self) -> None:
        """KV that is ready to leave comes first, for somebody waits for it; then what has arrived, and one step."""
        copied = self._kv.eager
        if copied:
            self._look_after_requests()
        round_due = self._round_due
        if round_due:
            self._look_around()
        commands = self._stream.receive(self._patience())
        for command in commands:
            self._obey(command)
        if commands or (not copied and (round_due or self._kv.busy)):
            self._look_after_requests()
        self._node.note_line(self._kv.in_line, moving=self._kv.busy)
        if self._later:
            self._begin_ahead()
        self._tell_controller()
        if self._node.busy:
            self._flush() if self._node.rests else self._step()

    @property
    def _round_due(self) -> bool:
        """Between steps a busy node looks at the rest every few milliseconds."""
        steps_on = self._node.busy and self._was_busy
        return not steps_on or self._clock.now() - self._looked >= _ROUND

    def _look_around(self) -> None:
        """At what is neither a step nor a request."""
        self._looked = self._clock.now()
        self._report_turn(self._node.busy)
        self._gateways.redial()
        self._experts.look()
        self._recorder.look()
        self._look()

    def _tell_controller(self) -> None:
        """What it waits for."""
        if self._adopting is not None and self._node.settled:
            self._stream.send(placement_values.Adopted(self._adopting))
            self._adopting = None
        if self._draining and not (self._node.busy or self._kept.wanted or self._kv.holding):
            if self._leaves and self._kv.hands_on(self._others):
                return
            self._draining = False
            self._report(at_once=True)
            self._stream.send(values.Drained())

    def _look_after_requests(self) -> None:
        """Those whose gateway is gone, and those whose KV has come."""
        for number in self._kept.orphans():
            self._drop(number)
        for request in self._kv.turn():
            self._begin(request)

    def _report_turn(self, busy: bool) -> None:
        if not busy:
            self._flush()
        if busy is self._was_busy:
            self._report()
        else:
            self._was_busy = busy
            # /metrics shows at once that requests run, or that none does; what they routed is known by then.
            self._report(soon=True, at_once=not busy)

    def _patience(self) -> float:
        """Seconds to wait for a command: a node that has nothing else to do does."""
        rests = self._node.rests
        if self._kv.eager or (self._node.busy and not self._node.held and not rests):
            return 0.0
        if self._kv.busy or self._recorder.active:
            return _MOVING
        if rests:
            return min(rests, IDLE)
        if self._later:
            return 0.0
        return _DIALLING if self._gateways.waiting else IDLE

    def _step(self) -> None:
        """After a wait it goes on at once: the rest of a turn is looked at while rows are with the experts."""
        self._advance()
        if self._node.stalled:
            self._node.wait(_MOVING if self._kv.busy else _PARKED)
            self._advance()
            if self._copies_next:
                self._advance()

    @property
    def _copies_next(self) -> bool:
        """A step has ended, and its blocks are copied for others: the first rows of the next step leave before."""
        return self._kv.busy and not (self._node.under_way or self._kv.eager)

    def _advance(self) -> None:
        for event in self._node.step():
            if event.purpose is not ANSWER:
                self._kv.computed(event)
            elif self._kept.add(event):
                self._unsent.append(event)
        if self._node.stalled or self._clock.now() - self._sent >= _TOGETHER:
            self._flush()

    def _flush(self) -> None:
        if self._unsent:
            for gateway, events in self._by_gateway(self._unsent).items():
                for message in Tokens.split(events):
                    self._gateways.send(gateway, message)
            self._unsent.clear()
            self._sent = self._clock.now()

    def _obey(self, command: values.ToNode | FromGateway | Reached) -> None:
        match command:
            case FromGateway():
                if self._gateways.is_of_now(command):
                    self._serve(command.gateway, command.value)
            case values.Gateways():
                for gateway in self._gateways.update(command):
                    self._left(gateway)
            case values.Peers():
                self._experts.update(command)
            case Reached():
                self._experts.reached(command)
            case placement_values.Adopt(placement):
                self._node.adopt(placement)
                self._adopting = placement.epoch
            case values.Record():
                self._recorder.begin(command)
            case values.Drain(ends):
                self._draining, self._leaves = True, not ends
            case values.AttentionNodes(nodes):
                self._others = keepers_of(nodes, self._index, len(nodes))
                self._kv.copy_to(keepers_of(nodes, self._index, self._copies))
                for node in nodes:
                    if node.life.index == self._index:
                        self._node.in_phase(node.phase)
            case Moved():
                return  # it has only woken the node
            case values.Shutdown():
                self._running = False
            case _:
                raise ProtocolError(f"an attention node does not take {type(command).__name__} now")

    def _serve(self, gateway: int, value: ToAttention | None) -> None:
        if value is None:
            self._gateways.lost(gateway)
            self._left(gateway)
            return
        self._kept.is_back(gateway)
        match value:
            case Submit(request, kv_from, keep):
                self._submit(gateway, request, kv_from, keep)
            case Cancel(number, parts) if self._kept.is_of(number, gateway):
                if parts:
                    self._kv.part(number)
                self._drop(number)
            case Acknowledge(numbers):
                for number in numbers:
                    if self._kept.is_of(number, gateway):
                        self._kept.close(number)
            case Halt(number) if self._kept.is_of(number, gateway):
                self._kept.halt(number)
                self._kv.cancel(number)
                self._node.cancel(number)
            case Claim():
                self._claimed(gateway, value)
            case AskCache():
                self._gateways.send(gateway, answer_of(self._node, value))
            case Resume(number, start):
                self._resume(gateway, number, start)

    def _left(self, gateway: int) -> None:
        """Its requests go on: it may be back soon, and is then told what it has missed."""
        self._kept.left(gateway)
        self._unsent = [e for e in self._unsent if not self._kept.is_of(e.handle, gateway)]

    def _drop(self, number: int) -> None:
        self._kept.close(number)
        self._kv.cancel(number)
        self._node.cancel(number)

    def _resume(self, gateway: int, number: int, start: int) -> None:
        missed = self._kept.resume(number, start)
        if missed is not None:
            self._gateways.send(gateway, missed if isinstance(missed, Refused) else Tokens((missed,)))

    def _claimed(self, gateway: int, claim: Claim) -> None:
        """What is taken is told from its beginning, so nothing of it is on its way any more."""
        answers = self._kept.find(claim.id)
        self._gateways.send(gateway, Claimed(claim.query, tuple(answers)))
        if not claim.take:
            return
        taken = {answer.request for answer in answers}
        self._unsent = [event for event in self._unsent if event.handle not in taken]
        for owner, numbers in self._kept.take(taken, gateway).items():
            self._gateways.send(owner, Given(tuple(numbers)))

    def _submit(
        self, gateway: int, request: GenerationRequest, kv_from: KvSource | None, keep: Keep | None
    ) -> None:
        if request.handle in self._kept:
            return  # said twice
        self._kept.open(request, gateway, keep)
        if request.ahead:
            self._later.append((request, kv_from))
        else:
            self._start(request, kv_from)

    def _begin_ahead(self) -> None:
        """The first that is still wanted, where nothing else is to do: only then its blocks are brought here. What a
        prefill node computes waits there."""
        request, kv_from = self._later[0]
        elsewhere = kv_from is not None and kv_from.prefills
        if self._kv.busy or (self._node.busy and not elsewhere):
            return
        self._later.popleft()
        if request.handle in self._kept:
            self._start(request, kv_from)

    def _start(self, request: GenerationRequest, kv_from: KvSource | None) -> None:
        pulls = kv_from is not None and self._kv.pull(request, kv_from)
        if not (pulls or self._kv.restore(request)):
            self._begin(request)

    def _begin(self, request: GenerationRequest) -> None:
        number = request.handle
        try:
            self._node.submit(request)
        except AfserveError as error:
            self._kept.refuse(number, error)
            self._gateways.send(self._kept.gateway_of(number), Refused(number, error))

    def _by_gateway(self, events: list[TokenEvent]) -> dict[int, list[TokenEvent]]:
        found: dict[int, list[TokenEvent]] = {}
        for event in events:
            found.setdefault(self._kept.gateway_of(event.handle), []).append(event)
        return found
