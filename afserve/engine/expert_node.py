"""An expert node: takes dispatches of all attention nodes, computes them per layer, answers each. Stateless between.

Correctness never depends on grouping: rows of one layer that are there together are computed in one call, and a
`SoftBarrier` says how long to hold them for more. Messages of prompts are computed in pieces while others decode:
decode comes first at every piece. They are not held, but those of one layer that wait share a call where calls are what
costs. Where that is the reading of experts, a piece is some experts with all rows of theirs, else some rows with all
their experts. It knows no requests and no network.

Shapes: R rows, H hidden size, K top-k.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from afserve.clock import Clock, MonotonicClock
from afserve.comm.m2n.bank import Bank
from afserve.comm.m2n.port import Arrival, ExpertPort
from afserve.comm.transport import Box
from afserve.engine.meter import ExpertWatch
from afserve.engine.pieces import PieceSize, PromptShare
from afserve.engine.prompt_batch import Prompt, PromptBatch
from afserve.engine.stats import ExpertStats
from afserve.errors import PeerLost
from afserve.member import AttentionPhase, NodeId
from afserve.soft_barrier import SoftBarrier
from afserve.trace import Slice, Trace

# Of a node that does both, a message of more rows is a prompt chunk: it fills a call by itself.
_LONG_ROWS = 128
_AT_ONCE = 0.02  # seconds that messages are answered without a look at anything else
_DECODING = 0.05  # seconds from the last decode message on in which another one is expected

Watch = Callable[[int, Sequence[Arrival], float, float], None]


_Part = tuple[Arrival, Tensor, slice]  # a message, its answer, and which of its rows


class ExpertNode:
    """`epoch` is the placement's that the bank holds now; more may be accepted beside it. `watch` is told of
    every computation: layer, messages, start and end.

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
    ) -> None:
        """`phases` has the attention nodes that do not do both, by index; `step_rows` what a message of a phase has at
        most. `prompt_share` of the time goes to prompts that wait, at least."""
        self.expert_error: float | None = None  # relative, of the bank's weights that were rounded at load
        self._port = port
        self._bank = bank
        self._at_once = port.answering(bank)
        self._clock = MonotonicClock() if clock is None else clock
        self._watch = watch
        self._trace: Trace | None = None
        self._epochs = {epoch}
        self._barrier = SoftBarrier(port.layout.layers, longest_hold)
        self._held: dict[Box, Arrival] = {}
        self._prompts: dict[Box, Prompt] = {}  # the one that has waited longest first
        self._batch: PromptBatch | None = None  # of which some experts are computed
        self._step_rows = step_rows
        self.in_phases(phases or {})
        self._pieces, self._share = PieceSize(), PromptShare(prompt_share)
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
        self._phases = dict(phases)
        for attention, phase in phases.items():
            if self._step_rows is not None:
                self._port.limit(attention, self._step_rows(phase))
        self._prefilling = {node for node, phase in phases.items() if phase is AttentionPhase.PREFILL}

    def poll(self) -> int:
        """Answer what is there and due; never blocks. Returns the number of messages answered and of pieces computed
        of longer ones."""
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
        self._flush()
        arrivals = self._port.poll()
        now = self._clock.now() if arrivals or self._held else 0.0
        for arrival in arrivals:
            self._admit(arrival, now)
        return self._compute_due(now) if self._held else 0

    def wait(self, timeout: float) -> None:
        """Park until something arrives or is due. An attention node that is gone is forgotten.

        What one attention node sends alone is answered meanwhile, where nothing else is to be thought of."""
        if self._prompts:
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
        self._pieces.ran(found.last.rows, found.last_seconds)
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
            self._messages,
            self._rows,
            self._calls,
            self._busy_seconds,
            self._hold_seconds,
            self._prompt_pieces,
            self._prompt_seconds,
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
        self._prompts.pop(box, None)
        if self._batch is not None and self._batch.holds(box):
            self._batch = None
        if self._is_prompt(arrival):
            self._prompts[box] = Prompt(arrival, self._port.reply(arrival))
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
            due = self._barrier.due(layer, {arrival.box.attention for arrival in group}, since, now)
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
        """Of the prompt's message that has waited longest, and of those that share its call; all of them where nobody
        decodes."""
        start = self._clock.now()
        if beside := start - self._decoded < _DECODING:
            self._pieces.beside(self._barrier.usual_gap(self._prefilling))
        if self._batch is None and beside and self._pieces.whole_experts:
            self._batch = self._begun()
        if self._batch is not None:
            self._compute_experts(self._batch, start, beside=beside)
        else:
            self._compute_rows(start, beside=beside)
        if not self._prompts:
            self._share.none_waits()
        return 1

    def _begun(self) -> PromptBatch | None:
        """All messages of the layer, for each read of an expert serves them all. None on a device, which would have to
        be asked for the experts of its rows."""
        group = self._sharing(math.inf)
        if group[0].arrival.x_RH.device.type != "cpu":
            return None
        batch = PromptBatch(group)
        batch.cut(self._pieces.batch(batch.rows, batch.pairs))
        return batch

    def _compute_experts(self, batch: PromptBatch, start: float, *, beside: bool) -> None:
        """Some experts of a batch; the rest of them where nobody decodes any more."""
        slots = len(batch.left)
        if beside:
            seconds = self._pieces.by_expert(batch.rows, batch.pairs)[batch.left.start :]
            slots = self._pieces.experts(seconds, self._barrier.next_in(start, self._prefilling))
        batch.compute(self._bank, slots)
        done = self._clock.now()
        batch.seconds += done - start
        if not batch.left:
            self._batch = None
            batch.finish()
            self._pieces.ran(batch.rows, batch.seconds)
        arrivals = [prompt.arrival for prompt in batch.prompts]
        self._piece(batch.layer, arrivals, 0 if batch.left else batch.rows, start, done)

    def _compute_rows(self, start: float, *, beside: bool) -> None:
        group = self._sharing(self._pieces.enough(beside=beside))
        layer = group[0].arrival.header.layer
        left = sum(prompt.left for prompt in group)
        if beside:
            left = self._pieces.rows(left, self._barrier.next_in(start, self._prefilling))
        parts = []
        for prompt in group:
            first, prompt.done = prompt.done, prompt.done + min(left, prompt.left)
            if prompt.done > first:
                parts.append((prompt.arrival, prompt.reply_RH, slice(first, prompt.done)))
            left -= prompt.done - first
        self._forward(layer, parts)
        done = self._clock.now()
        rows = sum(part.stop - part.start for _, _, part in parts)
        self._pieces.ran(rows, done - start)
        self._piece(layer, [arrival for arrival, _, _ in parts], rows, start, done)

    def _piece(self, layer: int, group: Sequence[Arrival], rows: int, start: float, done: float) -> None:
        """One was computed, and so many rows with it; messages that are whole now are answered."""
        for box in [arrival.box for arrival in group]:
            prompt = self._prompts.get(box)
            if prompt is not None and not prompt.left:
                del self._prompts[box]
                self._answer(prompt.arrival)
        self._prompt_pieces += 1
        self._prompt_seconds += done - start
        self._count(layer, group, rows, start, done, prompt=True)

    def _sharing(self, enough: float) -> list[Prompt]:
        """The prompt's message that has waited longest, and next ones at its layer until they have `enough` rows."""
        oldest = next(iter(self._prompts.values()))
        group, rows = [oldest], oldest.left
        for prompt in self._prompts.values():
            if rows >= enough:
                break
            if prompt is not oldest and prompt.arrival.header.layer == oldest.arrival.header.layer:
                group.append(prompt)
                rows += prompt.left
        return group

    def _compute(self, layer: int, group: Sequence[Arrival]) -> None:
        start = self._clock.now()
        self._forward(layer, [(arrival, self._port.reply(arrival), slice(None)) for arrival in group])
        done = self._clock.now()  # to answer wakes somebody up, who may take this core for a while
        for arrival in group:
            self._answer(arrival)
        rows = sum(arrival.header.rows for arrival in group)
        self._pieces.ran(rows, done - start)
        self._count(layer, group, rows, start, done)

    def _forward(self, layer: int, parts: Sequence[_Part]) -> None:
        """One call for all of them."""
        if len(parts) == 1:
            (only, reply_RH, part) = parts[0]
            self._bank.forward(
                layer, only.x_RH[part], only.slot_RK[part], only.weight_RK[part], reply_RH[part]
            )
            return
        x_RH = torch.cat([arrival.x_RH[part] for arrival, _, part in parts])
        slot_RK = torch.cat([arrival.slot_RK[part] for arrival, _, part in parts])
        weight_RK = torch.cat([arrival.weight_RK[part] for arrival, _, part in parts])
        out_RH = torch.empty(x_RH.shape, dtype=parts[0][1].dtype, device=x_RH.device)
        self._bank.forward(layer, x_RH, slot_RK, weight_RK, out_RH)
        replies = [reply_RH[part] for _, reply_RH, part in parts]
        for reply_RH, part_RH in zip(replies, out_RH.split([len(reply) for reply in replies]), strict=True):
            reply_RH.copy_(part_RH)

    def _answer(self, arrival: Arrival) -> None:
        self._held.pop(arrival.box, None)
        try:
            self._port.send(arrival)
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
        self._barrier.answered(answered, done, done - start)
        if self._watch is not None:
            self._watch(layer, group, start, done)

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
        self._prompts = {box: prompt for box, prompt in self._prompts.items() if box.attention != gone}
        if self._batch is not None and any(p.arrival.box.attention == gone for p in self._batch.prompts):
            self._batch = None
