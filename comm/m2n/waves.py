"""How one dispatch goes on when expert nodes are lost: its choices are sent again, elsewhere, as further waves.

A wave is a set of choices (one of a row's top-k each) that were routed by one table. A choice is in exactly one of
three places: in a message that is under way, in the sum, or homeless, which is to say that no node that is there holds
its expert. What stays homeless or unanswered too long is given up: the sum of its row is NaN. Nothing here sends or
waits.

Shapes: T rows of the dispatch, H hidden size, K top-k.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from afserve.comm.m2n.routes import LayerRoutes
from afserve.comm.m2n.rows import RowSplit
from afserve.comm.transport import Box, Header

NO_EXPERT = -1
NEVER = float("inf")

Reason = Callable[[int], str]


@dataclass(frozen=True, slots=True, eq=False)
class Wave:
    """expert_TK is NO_EXPERT where a choice is not of this wave."""

    expert_TK: Tensor
    routes: LayerRoutes
    epoch: int
    split: RowSplit


@dataclass(slots=True, eq=False)
class Message:
    """What one node is sent of a wave, decided at `since`. It has no header while an earlier message has the box."""

    wave: Wave
    box: Box
    rows: int
    since: float
    sent: float = NEVER
    header: Header | None = None


@dataclass(slots=True, eq=False)
class DispatchRecovery:
    """What is known of one dispatch from the first loss on; y_TH is the sum so far.

    It was sent at `since`, the loss was known at `noticed`. `given_up` are rows of which no sum will come, and why.
    """

    x_TH: Tensor
    expert_TK: Tensor
    weight_TK: Tensor
    y_TH: Tensor
    since: float
    noticed: float
    messages: list[Message]
    homeless_TK: Tensor | None = None
    homeless_experts: tuple[int, ...] = ()
    was_homeless: bool = False
    given_up: dict[int, str] = field(default_factory=dict)

    @property
    def recovered(self) -> bool:
        return not self.messages and self.homeless_TK is None

    def answered_messages(self, missing: Collection[Box]) -> list[Message]:
        return [m for m in self.messages if m.header is not None and m.box not in missing]

    def add(self, message: Message, part_RH: Tensor) -> None:
        """The answer is in the sum; its box is free."""
        message.wave.split.add(message.box.expert, part_RH, self.y_TH)
        self.messages.remove(message)

    def displace(self, expert: int) -> Tensor | None:
        """Take back what the node owes; the choices concerned, shaped like expert_TK, or None if it owes nothing."""
        owed = [m for m in self.messages if m.box.expert == expert]
        if not owed:
            return None
        self.messages = [m for m in self.messages if m.box.expert != expert]
        back_TK = torch.full_like(self.expert_TK, NO_EXPERT)
        for message in owed:
            back_TK = torch.where(self._of(message), message.wave.expert_TK, back_TK)
        return back_TK

    def keep_homeless(self, expert_TK: Tensor) -> None:
        """Choices without a home; NO_EXPERT where a choice has one."""
        kept = self.homeless_TK
        self._set_homeless(
            expert_TK if kept is None else torch.where(expert_TK == NO_EXPERT, kept, expert_TK)
        )
        self.was_homeless = True

    def take_homeless(self) -> Tensor | None:
        taken = self.homeless_TK
        self._set_homeless(None)
        return taken

    def sendable(self) -> Iterator[Message]:
        """Messages whose box is free; each is to get its header before the next is asked for."""
        for message in self.messages:
            if message.header is None and not any(
                other.box == message.box and other.header is not None for other in self.messages
            ):
                yield message

    def give_up_message(self, message: Message, why: Reason) -> None:
        """`why` says it for an expert."""
        self.messages.remove(message)
        self._give_up(torch.where(self._of(message), message.wave.expert_TK, NO_EXPERT), why)

    def give_up_homeless(self, experts: Collection[int], why: Reason) -> None:
        assert self.homeless_TK is not None, "nothing is homeless"
        which_TK = torch.isin(self.homeless_TK, torch.tensor(sorted(experts), device=self.homeless_TK.device))
        self._give_up(torch.where(which_TK, self.homeless_TK, NO_EXPERT), why)
        self._set_homeless(torch.where(which_TK, NO_EXPERT, self.homeless_TK))

    def _set_homeless(self, expert_TK: Tensor | None) -> None:
        found = () if expert_TK is None else expert_TK.unique().tolist()
        self.homeless_experts = tuple(expert for expert in found if expert != NO_EXPERT)
        self.homeless_TK = expert_TK if self.homeless_experts else None

    def _of(self, message: Message) -> Tensor:
        wave = message.wave
        return wave.routes.owners(self.x_TH, wave.expert_TK) == message.box.expert

    def _give_up(self, expert_TK: Tensor, why: Reason) -> None:
        expert_T = expert_TK.amax(1)
        self.y_TH[expert_T != NO_EXPERT] = torch.nan
        for row, expert in enumerate(expert_T.tolist()):
            if expert != NO_EXPERT:
                self.given_up.setdefault(row, why(expert))


def nodes_of(routes: LayerRoutes, x_TH: Tensor, expert_TK: Tensor) -> frozenset[int]:
    """Those that hold any of the choices."""
    return frozenset(node for node in routes.owners(x_TH, expert_TK).unique().tolist() if node >= 0)


@dataclass(frozen=True, slots=True)
class RecoveryStats:
    """Totals of one link. Seconds by cause, summed over tickets: `unnoticed` from the dispatch until the loss was
    known, `resend` from then until replicas had answered, `homeless` instead where an expert was on no node meanwhile.
    """

    waves: int = 0
    resent_rows: int = 0
    given_up_rows: int = 0
    stalled: Mapping[str, float] = field(default_factory=dict)
    stalled_tickets: int = 0
