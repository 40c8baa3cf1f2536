"""The interface of an expert bank, as the data plane sees it, and a link that calls a bank in the same process.

An expert bank computes experts: rows, slots and weights in, weighted sums out. `LocalBankLink` is the colocated mode.
It has the methods of a link to expert nodes and no mailboxes.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from afserve import member
from afserve.comm.m2n.called import CalledRows
from afserve.comm.m2n.ticket import Part
from afserve.comm.m2n.unrecorded import Unrecorded
from afserve.comm.m2n.waves import RecoveryStats
from afserve.comm.transport import Dialled
from afserve.errors import RendezvousError
from afserve.kernels.packed import PackedExperts
from afserve.kernels.stack import LayeredExperts
from afserve.placement.expert_memory import ExpertMemoryStats
from afserve.placement.placement import Placement


class Bank(Protocol):
    """The experts of all MoE layers that one process holds, by layer and slot. What a subclass does not say it does not
    offer."""

    def forward(
        self, layer: int, x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, out_RH: Tensor, add: bool = False
    ) -> None:
        """out_RH = sum over k of weight_RK * FFN_slot(x_RH); slots below 0 are skipped; out_RH may be any dtype.

        add: the sum starts from out_RH."""

    @property
    def packed(self) -> Sequence[PackedExperts] | None:
        """The slots of each MoE layer where `forward` is nothing but `Ops.expert_ffn` of them, so that whoever holds
        the bank may call kernels without asking it."""
        return None

    def answering(self, rows: torch.dtype, sums: torch.dtype) -> LayeredExperts | None:
        """What does as `forward` for rows and sums of these dtypes without Python (`comm.transport.AnsweringLoop`);
        None where nothing does."""
        return None

    def stats(self) -> ExpertMemoryStats:
        """Of a bank that has not all experts in memory; a snapshot, for the thread that calls `forward`."""
        return ExpertMemoryStats()

    def close(self) -> None:
        """Ends its threads, if it has any."""
        return


class NoBank(Bank):
    """Of a model whose layers have no experts."""

    def forward(
        self, layer: int, x_RH: Tensor, slot_RK: Tensor, weight_RK: Tensor, out_RH: Tensor, add: bool = False
    ) -> None:
        raise AssertionError("a layer without experts asked for some")

    @property
    def packed(self) -> Sequence[PackedExperts]:
        return ()


class LocalTicket(NamedTuple):
    """No message was sent, so there are no `parts`."""

    layer: int
    micro_batch: int
    y_TH: Tensor
    parts: tuple[Part, ...] = ()


class NoExpertNodes(Unrecorded):
    """What a link says that has no expert nodes: nobody can be lost, and nobody comes."""

    @property
    def called(self) -> CalledRows:
        """Other micro-batches of this process have calls of their own."""
        return CalledRows()

    @property
    def exchanging(self) -> None:
        return None

    @property
    def packed(self) -> Sequence[PackedExperts] | None:
        """Only a link that has them knows."""
        return None

    def lose(self, expert: int, why: str) -> None:
        """There is none."""

    def limit(self, rows: int) -> None:
        """There are no mailboxes."""

    def dial(self, expert: int, address: str, timeout: float) -> Dialled:
        raise RendezvousError(f"{member.expert_node(expert)}: the experts are in this process; nobody joins")

    def attach(self, dialled: Dialled) -> None:
        dialled.close()

    def detach(self, expert: int) -> None:
        """There is none."""

    @property
    def present(self) -> frozenset[int]:
        return frozenset()

    def oldest_epoch(self) -> None:
        return None

    def owing(self) -> dict[int, float]:
        return {}

    def recovery(self) -> RecoveryStats:
        return RecoveryStats()

    def take_given_up(self, micro_batch: int) -> dict[int, str]:
        return {}


class LocalBankLink(NoExpertNodes):
    """A bank that holds expert e of every layer in slot e. The work is done in `dispatch`; what `combine` returns is
    valid until the same micro-batch's next dispatch."""

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self._sums: dict[int, Tensor] = {}

    @property
    def packed(self) -> Sequence[PackedExperts] | None:
        """The bank's, unless it has to be asked."""
        return self._bank.packed

    def dispatch(
        self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, *, layer: int, micro_batch: int
    ) -> LocalTicket:
        y_TH = self._sums.get(micro_batch)
        if y_TH is None or y_TH.shape != x_TH.shape:
            y_TH = self._sums[micro_batch] = torch.empty(x_TH.shape, dtype=torch.float32, device=x_TH.device)
        self._bank.forward(layer, x_TH, expert_TK, weight_TK, y_TH)
        return LocalTicket(layer, micro_batch, y_TH)

    def prepare(self, micro_batch: int) -> object | None:
        """Sums of a recorded step are in memory that was recorded with it."""
        self._sums.pop(micro_batch, None)
        return self

    def ready(self, ticket: LocalTicket) -> bool:
        return True

    def combine(self, ticket: LocalTicket) -> Tensor:
        return ticket.y_TH

    def wait(self, tickets: Sequence[LocalTicket], timeout: float) -> None:
        """Nothing is ever under way."""

    def adopt(self, placement: Placement) -> None:
        """Every expert is here, whatever the placement says."""

    def close(self) -> None:
        self._bank.close()
