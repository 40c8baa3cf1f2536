"""An expert node: takes dispatches of all attention nodes, computes them per layer, answers each. Stateless between.

Correctness never depends on grouping: rows of one layer that are there together are computed in one call, and a
`SoftBarrier` says how long to hold them for more. Messages of prompts are computed in pieces while others decode
(`prompt_pieces.py`): decode comes first at every piece. A device cuts by itself: prompts have a queue there that
decoding goes before (`device_queues.py`). It knows no requests and no network.

Shapes: R rows, H hidden size, K top-k.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from afserve.clock import Clock, MonotonicClock
from afserve.comm.m2n.bank import Bank
from afserve.comm.m2n.port import Arrival, ExpertPort
from afserve.comm.transport import Box
from afserve.engine.device_queues import DeviceQueues, QueuePair
from afserve.engine.one_call import Part, forward, tensors
from afserve.engine.pieces import PromptShare
from afserve.engine.prompt_batch import BatchedPrompt
from afserve.engine.prompt_pieces import PromptPiece, PromptPieces
from afserve.engine.stats import ExpertStats
from afserve.engine.step.meter import ExpertWatch
from afserve.errors import PeerLost
from afserve.member import AttentionPhase, NodeId
from afserve.soft_barrier import SoftBarrier
from afserve.tracing.trace import Slice, Trace

# Of a node that does both, a message of more rows is a prompt chunk: it fills a call by itself.
_LONG_ROWS = 128
_AT_ONCE = 0.02  # seconds that messages are answered without a look at anything else
_GLANCE = 50e-6  # seconds between two looks at a device's queues

Watch = Callable[[int, Sequence[Arrival], float, float, int | None], None]


class ExpertNode:
    """`epoch` is the placement's that the bank holds now; more may be accepted beside it. `watch` is told of
    every computation: layer, messages, start, end, and rows where it is a piece of prompts.

    `longest_hold` bounds the soft barrier, in seconds; 0 turns it off.
    """

    def __init__(
        self,
        port: ExpertPort,
        bank: Bank,
        *,
        epoch: int = 0,
        longest_hold: float = 0.001,
        watch: Watch | None = None,
        clock: Clock | None = None,
        phases: Mapping[int, AttentionPhase] | None = None,
        step_rows: Callable[[AttentionPhase], int] | None = None,
        prompt_share: float = 1 / 16,
        device: QueuePair | None = None,
        trace: Trace | None = None,
        expert_error: float | None = None,
        isa: str = "",
    ) -> None:
        """`phases` has the attention nodes that do not do both, by index; `step_rows` what a message of a phase has at
        most. `prompt_share` of the time goes to prompts that wait, at least. `device`: what the bank launches on, where
        its calls are not over when they return. `expert_error`: relative, of the bank's weights that were rounded at
        load. `isa`: the instruction set that the bank computes with, on a CPU."""
        self.expert_error, self.isa = expert_error, isa
        self._port, self._bank = port, bank
        self._at_once = port.answering(bank)
        self._clock = MonotonicClock() if clock is None else clock
        self._watch = watch
        self._trace: Trace | None = None
        if trace is not None:
            self.trace = trace
        self._epochs = {epoch}
        self._barrier = SoftBarrier(port.layout.layers, longest_hold)
        self._held: dict[Box, Arrival] = {}
        self._pieces = PromptPieces(bank, self._clock, self._barrier)
        self._prompts = self._pieces.waiting
        self._queues = None if device is None else DeviceQueues(device, self._clock, prompt_share)
        self._step_rows = step_rows
        self._phases: dict[int, AttentionPhase] = {}
        self.in_phases(phases or {})
        self._share = PromptShare(prompt_share)
        self._decoded = float("-inf")  # when the last decode message came
        self._since: dict[int, float] = {}  # layer -> when the first of its held rows came
        self._due = 0.0  # the earliest time at which something held has to be computed
        self._messages = self._rows = self._calls = self._prompt_pieces = 0
        self._prompt_seconds = 0.0
        self._busy_seconds = self._hold_seconds = 0.0

    @property
    def trace(self) -> Trace | None:
        """What is drawn into from now on; None draws nothing."""
        return self._trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._trace = trace
        self._watch = None if trace is None else ExpertWatch(trace)

    def drawn_open(self) -> list[Slice]:
        """Nothing: each computation is drawn at its end, before anything else is done."""
        return []

    def accept(self, epoch: int) -> None:
        """From now on the bank's slots are filled as `epoch` says."""
        self._epochs.add(epoch)

    def retire(self, epoch: int) -> None:
        """Dispatches that were routed under `epoch` are refused from now on."""
        self._epochs.discard(epoch)

    def in_phases(self, phases: Mapping[int, AttentionPhase]) -> None:
        """From now on; as the constructor's. Mailboxes keep memory for what a node sends in its phase."""
        for attention in {*self._phases, *phases}:
            self._take_in(attention, phases.get(attention, AttentionPhase.BOTH))
        self._phases = dict(phases)
        for attention, phase in phases.items():
            if self._step_rows is not None:
                self._port.limit(attention, self._step_rows(phase))
        self._pieces.prefilling = {node for node, phase in phases.items() if phase is AttentionPhase.PREFILL}

    def _take_in(self, attention: int, phase: AttentionPhase) -> None:
        """The queue of a device in which it waits for what the node sends."""
        if self._queues is not None:
            prefills = phase is AttentionPhase.PREFILL
            self._port.take_in(attention, self._queues.device.prompts if prefills else nullcontext)

    def poll(self) -> int:
        """Answer what is there and due; never blocks. Returns the number of messages answered and of pieces computed
        of longer ones."""
        if self._queues is not None:
            return self._poll_device(self._queues)
        if self._prompts and self._share.is_due:
            return self._compute_piece()
        answered = self._poll_short()
        if not self._prompts:
            return answered
        if answered:
            answered += (more := self._poll_short())  # what came meanwhile goes before the next piece
            if more and not self._share.is_due:
                return answered
        return answered + self._compute_piece()

    def _poll_short(self) -> int:
        now = self._take()
        return self._compute_due(now) if self._held else 0

    def _take(self) -> float:
        """What has arrived; the time, where something is there to be computed."""
        self._flush()
        arrivals = self._port.poll()
        now = self._clock.now() if arrivals or self._held else 0.0
        for arrival in arrivals:
            self._admit(arrival, now)
        return now

    def _poll_device(self, queues: DeviceQueues) -> int:
        """Prompts are launched as soon as there is room in their queue, so that decoding is behind no message."""
        queues.look()
        now, launched = self._take(), 0
        if self._held and not queues.is_due:
            launched = self._compute_due(now)
        if self._prompts and not queues.full:
            launched += self._launch(queues, self._prompts.sharing(math.inf))
        return launched

    def _launch(self, queues: DeviceQueues, group: Sequence[BatchedPrompt]) -> int:
        """Messages of one layer, in one call."""
        start, arrivals = self._clock.now(), [prompt.arrival for prompt in group]
        layer, rows = arrivals[0].header.layer, sum(prompt.left for prompt in group)
        parts = [(prompt.arrival, prompt.reply_RH, slice(None)) for prompt in group]
        with queues.prompts([arrival.box for arrival in arrivals], *tensors(parts)):
            forward(self._bank, layer, parts)
            for prompt in group:
                prompt.done += prompt.left
            self._piece(PromptPiece(layer, arrivals, rows, start, self._clock.now()))
        return len(group)

    def wait(self, timeout: float) -> None:
        """Park until something arrives or is due. An attention node that is gone is forgotten.

        What one attention node sends alone is answered meanwhile, where nothing else is to be thought of."""
        if self._queues is not None and (self._queues.busy or self._prompts):
            timeout = min(timeout, _GLANCE)
        elif self._prompts:
            timeout = 0.0
        elif self._held:
            timeout = min(timeout, max(0.0, self._due - self._clock.now()))
        elif self._answers_at_once(timeout):
            return
        try:
            self._port.wait(timeout)
        except PeerLost as lost:
            self._forget(lost)

    def _answers_at_once(self, timeout: float) -> bool:
        """Whether dispatches were answered for a while, one by one as they came. Rows of several attention nodes are
        better computed together, which is what `poll` does."""
        if self._at_once is None or self._watch is not None or self._barrier.nodes > 1:
            return False
        wait = min(timeout, _AT_ONCE)
        found = self._port.answer(self._at_once, self._epochs, self._most_at_once, wait, _AT_ONCE)
        if found is None:
            return False
        now = self._clock.now()
        self._decoded = now
        self._messages += found.messages
        self._calls += found.messages
        self._rows += found.rows
        self._busy_seconds += found.seconds
        self._barrier.passed(found.box, found.box.attention, found.last.layer, now, found.last_seconds)
        self._pieces.sizes.ran(found.last.rows, found.last_seconds)
        return True

    def _most_at_once(self, attention: int) -> int:
        """Rows of a message that is no prompt's."""
        phase = self._phases.get(attention, AttentionPhase.BOTH)
        if phase is AttentionPhase.PREFILL:
            return 0
        return _LONG_ROWS if phase is AttentionPhase.BOTH else self._port.layout.max_rows

    def stats(self) -> ExpertStats:
        """A snapshot, for the thread that calls `poll`; what it returns may go to any other."""
        return ExpertStats(
            self._messages + self._port.exchanged,
            self._rows,
            self._calls + self._port.exchanged,
            self._busy_seconds,
            self._hold_seconds,
            self._prompt_pieces,
            self._prompt_seconds,
            self._bank.stats(),
        )

    def close(self) -> None:
        self._port.close()

    def _admit(self, arrival: Arrival, now: float) -> None:
        box, header = arrival.box, arrival.header
        if header.epoch not in self._epochs:
            known = ", ".join(str(epoch) for epoch in sorted(self._epochs))
            reason = f"{box.attention_node} routed under epoch {header.epoch}, "
            self._port.refuse(box, reason + f"{box.expert_node} holds epoch {known}")
            return
        self._held.pop(box, None)
        self._prompts.drop(box)
        if self._port.opens_step(arrival):
            return
        if self._is_prompt(arrival) or (self._queues is not None and self._queues.holds(box)):
            self._prompts.add(BatchedPrompt(arrival, self._port.reply(arrival)))
        else:
            self._held[box] = arrival
            self._since.setdefault(header.layer, now)
            self._decoded = now
        self._barrier.arrived(box, box.attention, header.layer, now)

    def _is_prompt(self, arrival: Arrival) -> bool:
        phase = self._phases.get(arrival.box.attention, AttentionPhase.BOTH)
        if phase is AttentionPhase.BOTH:
            return arrival.header.rows > _LONG_ROWS
        return phase is AttentionPhase.PREFILL

    def _compute_due(self, now: float) -> int:
        """One call per layer whose time has come."""
        answered, self._due = 0, float("inf")
        for layer, since in list(self._since.items()):
            group = [arrival for arrival in self._held.values() if arrival.header.layer == layer]
            due = self._barrier.call_time(layer, {arrival.box.attention for arrival in group}, since, now)
            if due > now:
                self._due = min(self._due, due)
                continue
            del self._since[layer]
            if group:
                self._hold_seconds += now - since
                self._compute(layer, group)
                answered += len(group)
        return answered

    def _compute_piece(self) -> int:
        self._piece(self._pieces.compute(self._decoded))
        if not self._prompts:
            self._share.none_waits()
        return 1

    def _piece(self, piece: PromptPiece) -> None:
        """Messages that are whole with it are answered."""
        for arrival in self._prompts.ended(arrival.box for arrival in piece.arrivals):
            self._answer(arrival, prompt=True)
        self._prompt_pieces += 1
        self._prompt_seconds += piece.done - piece.start
        self._count(*piece, prompt=True)

    def _compute(self, layer: int, group: Sequence[Arrival]) -> None:
        start, rows = self._clock.now(), sum(arrival.header.rows for arrival in group)
        parts = [(arrival, self._port.reply(arrival, rows), slice(None)) for arrival in group]
        with self._decoding(parts):
            forward(self._bank, layer, parts)
            done = self._clock.now()  # to answer wakes somebody up, who may take this core for a while
            for arrival in group:
                self._answer(arrival)
        self._pieces.sizes.ran(rows, done - start)
        self._count(layer, group, rows, start, done)

    def _decoding(self, parts: Sequence[Part]) -> AbstractContextManager[None]:
        return nullcontext() if self._queues is None else self._queues.decoding(*tensors(parts))

    def _answer(self, arrival: Arrival, *, prompt: bool = False) -> None:
        self._held.pop(arrival.box, None)
        try:
            self._port.send(arrival, late=prompt)
        except PeerLost as lost:
            self._forget(lost)

    def _count(
        self,
        layer: int,
        group: Sequence[Arrival],
        rows: int,
        start: float,
        done: float,
        *,
        prompt: bool = False,
    ) -> None:
        """One call of so many rows; a message counts where it was answered."""
        answered = [arrival.box for arrival in group if arrival.box not in self._prompts]
        self._messages += len(answered)
        self._rows += rows
        self._calls += 1
        self._busy_seconds += done - start
        if self._prompts or prompt:
            self._share.ran(done - start, prompt=prompt)
        self._barrier.note_call(answered, done, done - start)
        if self._watch is not None:
            self._watch(layer, group, start, done, rows if prompt else None)

    def _flush(self) -> None:
        """Answers of a device that are ready to leave."""
        try:
            self._port.flush()
        except PeerLost as lost:
            self._forget(lost)

    def _forget(self, lost: PeerLost) -> None:
        assert isinstance(lost.peer, NodeId), "an expert node has attention nodes as peers only"
        gone = lost.peer.index
        self._barrier.forget(gone)
        self._held = {box: arrival for box, arrival in self._held.items() if box.attention != gone}
        self._prompts.forget(gone)
