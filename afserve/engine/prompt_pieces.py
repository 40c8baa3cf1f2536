"""What an expert node on a host computes next of prompts that wait: some experts of all rows, or some rows with all
their experts.

A piece is short where others decode, and all that is left where nobody does. `pieces.py` says how large; this one cuts
and computes. It knows no port: who asked for the piece answers what is whole.
"""

import math
from collections.abc import Sequence, Set
from typing import NamedTuple

from afserve.clock import Clock
from afserve.comm.m2n.bank import Bank
from afserve.comm.m2n.port import Arrival
from afserve.engine.one_call import forward
from afserve.engine.pieces import PieceSize
from afserve.engine.prompt_batch import PromptBatch, WaitingPrompts
from afserve.soft_barrier import SoftBarrier

_DECODING = 0.05  # seconds from the last decode message on in which another one is expected


class PromptPiece(NamedTuple):
    """Computed from `start` to `done`; `rows` are those of which nothing is left with it."""

    layer: int
    arrivals: Sequence[Arrival]
    rows: int
    start: float
    done: float


class PromptPieces:
    """`waiting` prompts are cut as `sizes` has learned; `barrier` knows when the next decode message comes."""

    def __init__(self, bank: Bank, clock: Clock, barrier: SoftBarrier) -> None:
        self.waiting, self.sizes = WaitingPrompts(), PieceSize()
        self.prefilling: Set[int] = frozenset()  # attention nodes that send no decode messages
        self._bank, self._clock, self._barrier = bank, clock, barrier

    def compute(self, decoded: float) -> PromptPiece:
        """Of the message that has waited longest, and of those that share its call; all of them where nobody decodes.
        The last decode message came at `decoded`."""
        start = self._clock.now()
        if beside := start - decoded < _DECODING:
            self.sizes.beside(self._barrier.usual_gap(self.prefilling))
        if self.waiting.batch is None and beside and self.sizes.whole_experts:
            self.waiting.batch = self._begun()
        if self.waiting.batch is not None:
            return self._compute_experts(self.waiting.batch, start, beside=beside)
        return self._compute_rows(start, beside=beside)

    def _begun(self) -> PromptBatch | None:
        """All messages of the layer, for each read of an expert serves them all. None on a device, which would have to
        be asked for the experts of its rows."""
        group = self.waiting.sharing(math.inf)
        if group[0].arrival.x_RH.device.type != "cpu":
            return None
        batch = PromptBatch(group)
        batch.cut(self.sizes.batch(batch.rows, batch.pairs))
        return batch

    def _compute_experts(self, batch: PromptBatch, start: float, *, beside: bool) -> PromptPiece:
        """Some experts of a batch; the rest of them where nobody decodes any more."""
        slots = len(batch.left)
        if beside:
            seconds = self.sizes.by_expert(batch.rows, batch.pairs)[batch.left.start :]
            slots = self.sizes.experts(seconds, self._barrier.next_in(start, self.prefilling))
        batch.compute(self._bank, slots)
        done = self._clock.now()
        batch.seconds += done - start
        if not batch.left:
            self.waiting.batch = None
            batch.finish()
            self.sizes.ran(batch.rows, batch.seconds)
        arrivals = [prompt.arrival for prompt in batch.prompts]
        return PromptPiece(batch.layer, arrivals, 0 if batch.left else batch.rows, start, done)

    def _compute_rows(self, start: float, *, beside: bool) -> PromptPiece:
        group = self.waiting.sharing(self.sizes.enough(beside=beside))
        layer = group[0].arrival.header.layer
        left = sum(prompt.left for prompt in group)
        if beside:
            left = self.sizes.rows(left, self._barrier.next_in(start, self.prefilling))
        parts = []
        for prompt in group:
            first, prompt.done = prompt.done, prompt.done + min(left, prompt.left)
            if prompt.done > first:
                parts.append((prompt.arrival, prompt.reply_RH, slice(first, prompt.done)))
            left -= prompt.done - first
        forward(self._bank, layer, parts)
        done = self._clock.now()
        rows = sum(part.stop - part.start for _, _, part in parts)
        self.sizes.ran(rows, done - start)
        return PromptPiece(layer, [arrival for arrival, _, _ in parts], rows, start, done)
