"""What an attention node has counted, as its heartbeat tells it."""

from dataclasses import replace

from afserve.comm.m2n.waves import RecoveryStats
from afserve.engine.scheduling.scheduler import Scheduler
from afserve.engine.stats import COPIES, ORDINARY, RETAINED, AttentionStats, KvStats, NearStats, TierStats
from afserve.engine.stats.drafts import DraftStats
from afserve.engine.step.meter import Meter


def counted(
    s: Scheduler,
    meter: Meter,
    recovery: RecoveryStats,
    near: NearStats,
    moved: KvStats,
    tiers: TierStats,
    *,
    devices: int,
    prompt_tokens: int,
    generated_tokens: int,
    steps: int,
    drafts: DraftStats,
) -> AttentionStats:
    """Of its parts, between two steps. `moved` says what was exchanged with other nodes, `tiers` what is in host memory
    and on the disk."""
    return AttentionStats(
        near=near,
        running=s.running,
        waiting=s.waiting,
        queued_tokens=s.open.queued_tokens,
        devices=devices,
        kv_blocks=s.pool.blocks,
        kv_blocks_used=s.pool.used,
        prefix_queries=s.prefix.queries,
        prefix_hits=s.prefix.hits,
        preemptions=s.preemptions,
        prompt_tokens=prompt_tokens,
        ahead_tokens=s.ahead_tokens,
        generated_tokens=generated_tokens,
        steps=steps,
        dispatches=meter.dispatches,
        busy_seconds=meter.busy,
        pictures=meter.pictures,
        encoding_seconds=meter.encoding,
        parked_seconds=meter.parked,
        under_way_seconds=meter.under_way,
        resent_rows=recovery.resent_rows,
        given_up_rows=recovery.given_up_rows,
        stalled=recovery.stalled_tickets,
        unnoticed_seconds=recovery.stalled.get("unnoticed", 0.0),
        resend_seconds=recovery.stalled.get("resend", 0.0),
        homeless_seconds=recovery.stalled.get("homeless", 0.0),
        kv=replace(
            moved,
            copies=s.pool.copies,
            retained=len(s.pool.retained),
            copy_hits=s.pool.copy_hits,
            evicted=s.pool.evicted[ORDINARY],
            evicted_copies=s.pool.evicted[COPIES],
            evicted_retained=s.pool.evicted[RETAINED],
            peer_tokens=s.prefix.below.peer,
        ),
        tiers=replace(
            tiers, hit_tokens=s.prefix.below.disk, host=replace(tiers.host, hit_tokens=s.prefix.below.host)
        ),
        drafts=drafts,
    )
