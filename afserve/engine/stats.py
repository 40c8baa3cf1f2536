"""What a node says about itself in each heartbeat: plain numbers, no torch.

A snapshot: made by the thread that steps the node, between two steps, and read by any other.
"""

from dataclasses import dataclass, field

from afserve.engine.kv.stats import PEER, KvStats, TierStats


@dataclass(frozen=True, slots=True)
class AttentionStats:
    """Totals count from the node's start. `queued_tokens` of prompts are still to be computed. Seconds: computing, only
    waiting, and rows under way (summed over `dispatches`, which overlap).

    Six are about lost expert nodes: rows sent again, rows given up, and of the dispatches that waited longer
    for it (`stalled`) the seconds until the loss was known, until replicas answered, and until an expert that no node
    held had one again.
    """

    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    dispatches: int = 0
    busy_seconds: float = 0.0
    parked_seconds: float = 0.0
    under_way_seconds: float = 0.0
    resent_rows: int = 0
    given_up_rows: int = 0
    stalled: int = 0
    unnoticed_seconds: float = 0.0
    resend_seconds: float = 0.0
    homeless_seconds: float = 0.0
    kv: KvStats = field(default_factory=KvStats)
    queued_tokens: int = 0
    tiers: TierStats = field(default_factory=TierStats)

    @property
    def hits(self) -> dict[str, int]:
        """Prompt tokens whose KV was found: in the cache (`memory`), at a `peer`, in `host` memory, on `disk`."""
        peer, host, disk = self.kv.peer_tokens, self.tiers.host.hit_tokens, self.tiers.hit_tokens
        return {
            "memory": max(0, self.prefix_hits - peer - host - disk),
            PEER: peer,
            "host": host,
            "disk": disk,
        }


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """Totals from the node's start. Prompts' messages were computed in `prompt_pieces`, which took `prompt_seconds` of
    the busy ones."""

    messages: int = 0
    rows: int = 0
    calls: int = 0
    busy_seconds: float = 0.0
    hold_seconds: float = 0.0
    prompt_pieces: int = 0
    prompt_seconds: float = 0.0
