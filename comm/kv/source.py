"""Where a request's KV blocks are, as whoever computes it is told: a value that crosses rooms."""

from dataclasses import dataclass

from afserve.comm.kv.split import SplitMember
from afserve.member import AttentionLife


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where the KV of a request is: an attention node, which knows it as `request` (0: it keeps copies), or which
    `prefills` it first. Where its first token is wanted `within` so many seconds, `helpers` may take parts."""

    life: AttentionLife
    request: int
    address: str
    prefills: bool = False
    within: float | None = None
    helpers: tuple[SplitMember, ...] = ()
