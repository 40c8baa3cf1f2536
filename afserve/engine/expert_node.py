"""An expert node: takes dispatches of all attention nodes, computes them per layer, answers each. Stateless between.

Correctness never depends on grouping. For speed a layer's rows are held for the other attention nodes in flight, up to
a short adaptive deadline (`SoftBarrier`), and computed in one call. It knows no requests and no network.

Shapes: R rows, H hidden size, K top-k.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from afserve.clock import Clock, MonotonicClock
from afserve.comm.bank import Bank
from afserve.comm.port import Arrival, ExpertPort
from afserve.comm.transport import Box
from afserve.engine.stats import ExpertStats


class ExpertNode:
    """`epoch` is the placement's that the bank holds now; more may be accepted beside it."""

    def __init__(self, port: ExpertPort, bank: Bank, *, epoch: int = 0, clock: Clock | None = None) -> None:
        self._port = port
        self._bank = bank
        self._clock = MonotonicClock() if clock is None else clock
        self._epochs = {epoch}
        self._held: dict[Box, Arrival] = {}
        self._messages = self._rows = self._calls = 0
        self._busy_seconds = self._hold_seconds = 0.0

    def accept(self, epoch: int) -> None:
        """From now on the bank's slots are filled as `epoch` says."""
        self._epochs.add(epoch)

    def retire(self, epoch: int) -> None:
        """Dispatches that were routed under `epoch` are refused from now on."""
        self._epochs.discard(epoch)

    def poll(self) -> int:
        """Answer what is there; never blocks. Returns the number of messages answered."""
        for arrival in self._port.poll():
            self._admit(arrival)
        answered = 0
        for group in self._due():
            self._compute(group)
            answered += len(group)
        return answered

    def wait(self, timeout: float) -> None:
        """Park until something arrives. Raises PeerLost, once, for an attention node that is gone."""
        self._port.wait(timeout)

    def stats(self) -> ExpertStats:
        return ExpertStats(self._messages, self._rows, self._calls, self._busy_seconds, self._hold_seconds)

    def close(self) -> None:
        self._port.close()

    def _admit(self, arrival: Arrival) -> None:
        if arrival.header.epoch not in self._epochs:
            known = ", ".join(str(epoch) for epoch in sorted(self._epochs))
            reason = (
                f"attention-{arrival.box.attention} routed under epoch {arrival.header.epoch}, "
                f"expert-{arrival.box.expert} holds epoch {known}"
            )
            self._port.refuse(arrival.box, reason)
            return
        self._held[arrival.box] = arrival

    def _due(self) -> list[list[Arrival]]:
        layers: dict[int, list[Arrival]] = {}
        for arrival in self._held.values():
            layers.setdefault(arrival.header.layer, []).append(arrival)
        return list(layers.values())

    def _compute(self, group: Sequence[Arrival]) -> None:
        start = self._clock.now()
        replies = [self._port.reply(arrival) for arrival in group]
        layer = group[0].header.layer
        if len(group) == 1:
            only = group[0]
            self._bank.forward(layer, only.x_RH, only.slot_RK, only.weight_RK, replies[0])
        else:
            self._merged(layer, group, replies)
        for arrival in group:
            self._port.send(arrival)
            del self._held[arrival.box]
        self._count(group, start)

    def _merged(self, layer: int, group: Sequence[Arrival], replies: Sequence[Tensor]) -> None:
        x_RH = torch.cat([arrival.x_RH for arrival in group])
        slot_RK = torch.cat([arrival.slot_RK for arrival in group])
        weight_RK = torch.cat([arrival.weight_RK for arrival in group])
        out_RH = torch.empty(x_RH.shape, dtype=replies[0].dtype)
        self._bank.forward(layer, x_RH, slot_RK, weight_RK, out_RH)
        for reply_RH, part_RH in zip(replies, out_RH.split([len(reply) for reply in replies]), strict=True):
            reply_RH.copy_(part_RH)

    def _count(self, group: Sequence[Arrival], start: float) -> None:
        self._messages += len(group)
        self._rows += sum(arrival.header.rows for arrival in group)
        self._calls += 1
        self._busy_seconds += self._clock.now() - start
