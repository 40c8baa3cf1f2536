"""An expert node: takes dispatches of all attention nodes, computes them per layer, answers each. Stateless between.

Correctness never depends on grouping: rows of one layer that are there together are computed in one call, and a
`SoftBarrier` says how long to hold them for more. It knows no requests and no network.

Shapes: R rows, H hidden size, K top-k.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from afserve.clock import Clock, MonotonicClock
from afserve.comm.m2n.bank import Bank
from afserve.comm.m2n.port import Arrival, ExpertPort
from afserve.comm.transport import Box
from afserve.engine.soft_barrier import SoftBarrier
from afserve.engine.stats import ExpertStats
from afserve.errors import PeerLost
from afserve.member import NodeId

# A message of more rows is a prompt chunk: it fills a call by itself, and nobody's decode should wait in its call.
_LONG_ROWS = 128

Watch = Callable[[int, Sequence[Arrival], float, float], None]


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
    ) -> None:
        self.expert_error: float | None = None  # relative, of the bank's weights that were rounded at load
        self._port = port
        self._bank = bank
        self._clock = MonotonicClock() if clock is None else clock
        self._watch = watch
        self._epochs = {epoch}
        self._barrier = SoftBarrier(port.layout.layers, longest_hold)
        self._held: dict[Box, Arrival] = {}
        self._since: dict[int, float] = {}  # layer -> when the first of its held rows came
        self._due = 0.0  # the earliest time at which something held has to be computed
        self._messages = self._rows = self._calls = 0
        self._busy_seconds = self._hold_seconds = 0.0

    def accept(self, epoch: int) -> None:
        """From now on the bank's slots are filled as `epoch` says."""
        self._epochs.add(epoch)

    def retire(self, epoch: int) -> None:
        """Dispatches that were routed under `epoch` are refused from now on."""
        self._epochs.discard(epoch)

    def poll(self) -> int:
        """Answer what is there and due; never blocks. Returns the number of messages answered."""
        self._flush()
        arrivals = self._port.poll()
        now = self._clock.now() if arrivals or self._held else 0.0
        for arrival in arrivals:
            self._admit(arrival, now)
        return self._compute_due(now) if self._held else 0

    def wait(self, timeout: float) -> None:
        """Park until something arrives or is due. An attention node that is gone is forgotten."""
        if self._held:
            timeout = min(timeout, max(0.0, self._due - self._clock.now()))
        try:
            self._port.wait(timeout)
        except PeerLost as lost:
            self._forget(lost)

    def stats(self) -> ExpertStats:
        """A snapshot, for the thread that calls `poll`; what it returns may go to any other."""
        return ExpertStats(self._messages, self._rows, self._calls, self._busy_seconds, self._hold_seconds)

    def close(self) -> None:
        self._port.close()

    def _admit(self, arrival: Arrival, now: float) -> None:
        box, header = arrival.box, arrival.header
        if header.epoch not in self._epochs:
            known = ", ".join(str(epoch) for epoch in sorted(self._epochs))
            reason = f"{box.attention_node} routed under epoch {header.epoch}, "
            self._port.refuse(box, reason + f"{box.expert_node} holds epoch {known}")
            return
        self._held[box] = arrival
        self._since.setdefault(header.layer, now)
        self._barrier.arrived(box, box.attention, header.layer, now)

    def _compute_due(self, now: float) -> int:
        """One call per layer whose time has come, then one long message."""
        answered, self._due = 0, float("inf")
        long: list[Arrival] = []
        for layer, since in list(self._since.items()):
            group = [arrival for arrival in self._held.values() if arrival.header.layer == layer]
            due = self._barrier.due(layer, {arrival.box.attention for arrival in group}, since, now)
            if due > now:
                self._due = min(self._due, due)
                continue
            short = [arrival for arrival in group if arrival.header.rows <= _LONG_ROWS]
            long += [arrival for arrival in group if arrival.header.rows > _LONG_ROWS]
            if len(short) == len(group):
                del self._since[layer]
            if short:
                self._hold_seconds += now - since
                self._compute(layer, short)
                answered += len(short)
        return answered + self._compute_long(long, now)

    def _compute_long(self, long: Sequence[Arrival], now: float) -> int:
        """The one that waits longest; short messages that come meanwhile go before the next."""
        here = [arrival for arrival in long if self._held.get(arrival.box) is arrival]
        if not here:
            return 0
        first = min(here, key=lambda arrival: self._since[arrival.header.layer])
        layer = first.header.layer
        self._compute(layer, [first])
        if not any(arrival.header.layer == layer for arrival in self._held.values()):
            del self._since[layer]
        if len(here) > 1:
            self._due = now
        return 1

    def _compute(self, layer: int, group: Sequence[Arrival]) -> None:
        start = self._clock.now()
        replies = [self._port.reply(arrival) for arrival in group]
        if len(group) == 1:
            only = group[0]
            self._bank.forward(layer, only.x_RH, only.slot_RK, only.weight_RK, replies[0])
        else:
            self._merged(layer, group, replies)
        done = self._clock.now()  # to answer wakes somebody up, who may take this core for a while
        for arrival in group:
            self._answer(arrival)
        self._count(layer, group, start, done)

    def _merged(self, layer: int, group: Sequence[Arrival], replies: Sequence[Tensor]) -> None:
        x_RH = torch.cat([arrival.x_RH for arrival in group])
        slot_RK = torch.cat([arrival.slot_RK for arrival in group])
        weight_RK = torch.cat([arrival.weight_RK for arrival in group])
        out_RH = torch.empty(x_RH.shape, dtype=replies[0].dtype, device=x_RH.device)
        self._bank.forward(layer, x_RH, slot_RK, weight_RK, out_RH)
        for reply_RH, part_RH in zip(replies, out_RH.split([len(reply) for reply in replies]), strict=True):
            reply_RH.copy_(part_RH)

    def _answer(self, arrival: Arrival) -> None:
        self._held.pop(arrival.box, None)
        try:
            self._port.send(arrival)
        except PeerLost as lost:
            self._forget(lost)

    def _count(self, layer: int, group: Sequence[Arrival], start: float, done: float) -> None:
        self._messages += len(group)
        self._rows += sum(arrival.header.rows for arrival in group)
        self._calls += 1
        self._busy_seconds += done - start
        self._barrier.answered([arrival.box for arrival in group], done, done - start)
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
