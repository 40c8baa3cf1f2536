"""What a node says about itself in each heartbeat: plain numbers, no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionStats:
    """Totals count from the node's start; `expert_rows[l][e]` are routed rows per MoE layer and expert.

    `prefill_rows` are those of them that came with prompt chunks; the others are decode. Seconds: computing, only
    waiting, and rows under way (summed over `dispatches`, which overlap).
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
    expert_rows: tuple[tuple[int, ...], ...] = ()
    prefill_rows: tuple[tuple[int, ...], ...] = ()
    dispatches: int = 0
    busy_seconds: float = 0.0
    parked_seconds: float = 0.0
    under_way_seconds: float = 0.0

    @property
    def kv_use(self) -> float:
        """Share of KV blocks that running requests hold, 0 to 1."""
        return self.kv_blocks_used / self.kv_blocks if self.kv_blocks else 0.0


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """Totals from the node's start. `slot_rows[l][s]` are rows computed per MoE layer and slot."""

    messages: int = 0
    rows: int = 0
    calls: int = 0
    busy_seconds: float = 0.0
    hold_seconds: float = 0.0
    slot_rows: tuple[tuple[int, ...], ...] = ()
