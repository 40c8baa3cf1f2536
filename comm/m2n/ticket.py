"""One dispatch under way, as the link and its micro-batch hold it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from afserve.comm.m2n.routes import LayerRoutes
from afserve.comm.m2n.rows import RowSplit
from afserve.comm.m2n.staging import Copy
from afserve.comm.m2n.waves import DispatchRecovery
from afserve.comm.transport import Box, Header

Given = tuple[Tensor, Tensor, Tensor]  # rows, experts and weights of a dispatch


class Part(NamedTuple):
    """One message of a dispatch."""

    box: Box
    header: Header


@dataclass(slots=True, eq=False)
class Ticket:
    """`missing` are the boxes whose answer is not there yet; at `deadline` what is still missing is given up.

    `rows_given` are the rows, experts and weights where they were sent from, kept until the ticket is combined.
    `leaving` are the same on their way from a device to the host. `recovery` is there once a node was lost that had a
    part in it. `answers` are the sums of those `parts` that were taken, valid until the micro-batch's next dispatch.
    `exchanged` is what a device sent by itself: such a ticket has no parts.
    """

    layer: int
    micro_batch: int
    rows: int
    deadline: float
    routes: LayerRoutes
    epoch: int
    leaving: Copy | None = None
    rows_given: Given | None = None
    split: RowSplit | None = None
    parts: list[Part] = field(default_factory=list)
    missing: list[Box] = field(default_factory=list)
    answers: dict[Box, Tensor] = field(default_factory=dict)
    recovery: DispatchRecovery | None = None
    exchanged: object | None = None

    def epochs(self) -> Iterator[int]:
        """Of its messages that are not answered yet. Rows that have no home are in none, and of no epoch."""
        if self.recovery is not None:
            yield from (message.wave.epoch for message in self.recovery.messages)
        elif self.missing or self.leaving is not None:
            yield self.epoch
