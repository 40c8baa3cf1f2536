"""What an attention node holds instead of experts: mailboxes (`link.py`), or a bank of its own process (`bank.py`).

Shapes: T rows of a micro-batch, H hidden size, K top-k.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from afserve.comm.m2n.bank import LocalTicket
from afserve.comm.m2n.called import CalledRows
from afserve.comm.m2n.exchanges import ExchangingLink
from afserve.comm.m2n.ticket import Ticket
from afserve.comm.m2n.unrecorded import Fold
from afserve.comm.m2n.waves import RecoveryStats
from afserve.comm.transport import Dialled
from afserve.kernels.packed import PackedExperts
from afserve.placement.placement import Placement

SentTicket = Ticket | LocalTicket
_AnyTicket = TypeVar("_AnyTicket", bound=SentTicket)


class Link(Protocol[_AnyTicket]):
    """What an attention node holds instead of experts.

    Nothing here raises PeerLost. A ticket that a lost expert node owes an answer stays unready until other nodes have
    given it, or until a deadline: then rows without an answer have a sum of NaN, and `take_given_up` says why.
    """

    @property
    def called(self) -> CalledRows:
        """Rows of others that were in the experts' calls."""

    def dispatch(
        self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, *, layer: int, micro_batch: int
    ) -> _AnyTicket:
        """Send rows on their way; `expert_TK` are logical experts (int32 or int64, -1 = none), weights float32."""

    def ready(self, ticket: _AnyTicket) -> bool: ...

    def combine(self, ticket: _AnyTicket) -> Tensor:
        """y_TH, float32, of a ticket that is ready; its own until the micro-batch's next dispatch."""

    def folding(self, ticket: _AnyTicket) -> Fold | None:
        """What takes the place of `combine` and `Ops.add_sums` once the ticket is ready, with what a shared expert adds
        before; None where there is no such launch."""

    def held(self, micro_batch: int, *, done: bool = False) -> bool:
        """All layers of a step of it were combined. Whether these sums count; else the step has to be run again, once,
        and its sums count then. It waits for a device, unless that has `done` all that was launched for the step."""

    def prepare(self, micro_batch: int) -> object | None:
        """A step begins whose launches are recorded, or were: where they go, the same object as long as what was
        recorded may be replayed. None where a host has a part in every layer. The step may also be dispatched layer by
        layer. `held` ends it."""

    def replayed(self, micro_batch: int) -> None:
        """All layers of the prepared step were launched, in the device's current queue."""

    def wait(self, tickets: Sequence[_AnyTicket], timeout: float) -> None:
        """Park until a ticket may be ready, at most `timeout` seconds."""

    def take_given_up(self, micro_batch: int) -> dict[int, str]:
        """Why rows have no sum, by their number in the dispatch, since the last call."""

    def adopt(self, placement: Placement) -> None: ...

    def limit(self, rows: int) -> None:
        """Later messages have at most so many rows; what larger ones took in memory need not be kept."""

    def lose(self, expert: int, why: str) -> None:
        """An expert node is not to be waited for any more; nothing if it is lost already."""

    def dial(self, expert: int, address: str, timeout: float) -> Dialled:
        """From any thread: a connection to an expert node, for `attach`. Raises RendezvousError."""

    def attach(self, dialled: Dialled) -> None: ...

    def detach(self, expert: int) -> None: ...

    @property
    def present(self) -> frozenset[int]:
        """The expert nodes that are attached."""

    def oldest_epoch(self) -> int | None:
        """Of the messages that are under way or have still to be sent; None while there are none."""

    def owing(self) -> dict[int, float]:
        """Seconds since the oldest message was sent that an expert node has not answered, by its index."""

    def recovery(self) -> RecoveryStats: ...

    @property
    def packed(self) -> Sequence[PackedExperts] | None:
        """The experts of each MoE layer, expert e in slot e, where they are in this process and kernels may be given
        them in place of `dispatch` and `combine`."""

    @property
    def exchanging(self) -> ExchangingLink[_AnyTicket] | None:
        """The same link, where it can offer exchanges to expert nodes."""

    def close(self) -> None: ...
