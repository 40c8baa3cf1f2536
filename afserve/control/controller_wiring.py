"""Whom the controller calls, and whom it asks: one value that is made before anything starts and never changes."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from afserve.control.identifying import Read
from afserve.control.membership.events import Incident
from afserve.control.membership.joining import Assign, same_everywhere
from afserve.control.membership.roster import Member
from afserve.control.membership.silence import HostLoad
from afserve.control.wire.values import AttentionNodes, Query, QueryAnswer
from afserve.errors import AfserveError, ConfigError
from afserve.member import AttentionPhase, NodeId, Role
from afserve.models.identity import Progress

Wanted = Callable[[Mapping[Role, int], Mapping[int, AttentionPhase]], None]


def nobody(*_: object) -> None:
    """Is told."""


async def no_answer(query: Query) -> QueryAnswer:
    return QueryAnswer(query.number, error=ConfigError(f"{query.what}: nobody here answers gateways"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """All are called in the controller's event loop, but `show_own_progress`, which the thread calls that reads.

    `start_node` starts a process for a place; before it `clear_place` ends what is left of the node that it follows.
    `assign` says what one node is to run, `host_load` what is known of this process and its host, TICK seconds apart.
    `read_own` begins to read this host's copy of the checkpoint; None compares the nodes with one another only.
    """

    start_node: Callable[[NodeId], None] = nobody
    clear_place: Callable[[NodeId, NodeId], None] = nobody
    assign: Assign = same_everywhere
    host_load: Callable[[], HostLoad] = HostLoad
    read_own: Read | None = None
    answer_query: Callable[[Query], Awaitable[QueryAnswer]] = no_answer
    tell_failure: Callable[[AfserveError], None] = nobody
    tell_attention: Callable[[AttentionNodes], None] = nobody
    keep_wanted: Wanted = nobody
    show_incident: Callable[[Incident], None] = nobody
    show_progress: Callable[[Member], None] = nobody
    show_own_progress: Progress = nobody
