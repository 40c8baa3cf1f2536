"""Rows of prompts that wait, and those of one layer that are computed some experts at a time: each is read once.

An expert node may compute other things in between. Sums stay in float32 until the last expert, and parts are added in
the order of slots, as one call for all experts adds them: the same bits. It knows no clock and no port.

Shapes: R rows, H hidden size, K top-k.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from afserve.comm.m2n.bank import Bank
from afserve.comm.m2n.port import Arrival
from afserve.comm.transport import Box


@dataclass(slots=True)
class BatchedPrompt:
    """A message of a prompt, of which the first `done` rows are computed."""

    arrival: Arrival
    reply_RH: Tensor
    done: int = 0

    @property
    def left(self) -> int:
        return self.arrival.header.rows - self.done


class PromptBatch:
    """The rows that are left of `prompts`, which are of one layer and on the host."""

    def __init__(self, prompts: Sequence[BatchedPrompt]) -> None:
        self.prompts = list(prompts)
        self.rows = sum(prompt.left for prompt in prompts)
        self.layer = prompts[0].arrival.header.layer
        arrivals = [(prompt.arrival, prompt.done) for prompt in prompts]
        self._x_RH = _joined([arrival.x_RH[done:] for arrival, done in arrivals])
        self._slot_RK = _joined([arrival.slot_RK[done:] for arrival, done in arrivals])
        self._weight_RK = _joined([arrival.weight_RK[done:] for arrival, done in arrivals])
        self._sum_RH = torch.empty(0)
        self._first = 0  # slot that is not computed yet
        self.seconds = 0.0  # of all calls so far
        self._count()

    def _count(self) -> None:
        self.pairs = torch.bincount(self._slot_RK.flatten() + 1)[1:].tolist()  # of rows, by slot

    def cut(self, rows: int) -> None:
        """Keep the first ones only, before anything is computed."""
        assert self._first == 0, "a batch is cut before it begins"
        if rows >= self.rows:
            return
        self._x_RH, self._slot_RK, self._weight_RK = (
            x[:rows] for x in (self._x_RH, self._slot_RK, self._weight_RK)
        )
        self.rows = rows
        self._count()

    def holds(self, box: Box) -> bool:
        return any(prompt.arrival.box == box for prompt in self.prompts)

    @property
    def left(self) -> range:
        """Slots that are not computed yet."""
        return range(self._first, len(self.pairs))

    def compute(self, bank: Bank, slots: int) -> None:
        """So many of the next slots, in one call."""
        first, end = self._first, self._first + slots
        if first == 0:
            self._sum_RH = torch.empty(self._x_RH.shape, dtype=torch.float32)
        slot_RK = self._slot_RK
        if len(self.left) > slots or first:
            slot_RK = slot_RK.where((slot_RK >= first) & (slot_RK < end), -1)
        bank.forward(self.layer, self._x_RH, slot_RK, self._weight_RK, self._sum_RH, add=first > 0)
        self._first = end

    def finish(self) -> None:
        """Put the sums into the answers and count the rows as done."""
        assert not self.left, "slots are left"
        at = 0
        for prompt in self.prompts:
            taken = min(prompt.left, self.rows - at)
            prompt.reply_RH[prompt.done : prompt.done + taken].copy_(self._sum_RH[at : at + taken])
            prompt.done += taken
            at += taken


class WaitingPrompts:
    """Messages of prompts that are not answered yet, the one that has waited longest first; `batch`: those of which
    some experts are computed."""

    def __init__(self) -> None:
        self._by_box: dict[Box, BatchedPrompt] = {}
        self.batch: PromptBatch | None = None

    def __len__(self) -> int:
        return len(self._by_box)

    def __contains__(self, box: object) -> bool:
        return box in self._by_box

    def add(self, prompt: BatchedPrompt) -> None:
        self._by_box[prompt.arrival.box] = prompt

    def drop(self, box: Box) -> None:
        """Its attention node has asked for something else, if it had asked for anything."""
        self._by_box.pop(box, None)
        if self.batch is not None and self.batch.holds(box):
            self.batch = None

    def forget(self, attention: int) -> None:
        """Nobody waits for what this attention node has asked for."""
        for box in [box for box in self._by_box if box.attention == attention]:
            self.drop(box)

    def sharing(self, enough: float) -> list[BatchedPrompt]:
        """The one that has waited longest, and next ones at its layer until they have `enough` rows."""
        oldest = next(iter(self._by_box.values()))
        group, rows = [oldest], oldest.left
        for prompt in self._by_box.values():
            if rows >= enough:
                break
            if prompt is not oldest and prompt.arrival.header.layer == oldest.arrival.header.layer:
                group.append(prompt)
                rows += prompt.left
        return group

    def ended(self, boxes: Iterable[Box]) -> list[Arrival]:
        """Those of `boxes` that are computed whole; they wait no more."""
        whole = [box for box in boxes if box in self._by_box and not self._by_box[box].left]
        return [self._by_box.pop(box).arrival for box in whole]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
