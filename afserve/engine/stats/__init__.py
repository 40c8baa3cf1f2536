"""What a node says about itself in each heartbeat: plain numbers, no torch. Each is declared here, or in the
groups that stand here, and nowhere else.

A snapshot: made by the thread that steps the node, between two steps, and read by any other. Numbers are totals from
the node's start but where "now" is said; seconds are sums but where "at most" is said.
"""

from dataclasses import dataclass
from typing import Any

from afserve.counters import Metric, Over, counter
from afserve.engine.stats.drafts import NO_DRAFTS, DraftStats
from afserve.placement.expert_memory import ExpertMemoryStats

ORDINARY, COPIES, RETAINED = "ordinary", "copies", "retained"  # cached blocks that are evicted
PEER = "peer"  # where KV was found, beside the tiers below a cache
_KV_BYTES = "Bytes of KV blocks that left a node for another one, or came."
_HOST_BYTES = "Bytes of KV blocks copied from host memory, or to it."
_HOST_DROPPED = "Blocks that host memory does not have any more."
_DISK_BYTES = "Bytes of KV blocks read from the disk, or written."
_DISK_DROPPED = "Blocks that the disk does not have, or no more."
_ALL_IN_MEMORY = ExpertMemoryStats()


def _evicted(kind: str) -> Any:
    help = "Cached blocks that made room for others, by what they were."
    return counter(0, help, "kv_evicted_blocks", labels=(("kind", kind),))


@dataclass(frozen=True, slots=True)
class KvStats:
    """KV blocks between attention nodes. A hand-over lasts from the request to the last block."""

    bytes_sent: int = counter(0, _KV_BYTES, "kv_bytes", labels=(("way", "sent"),))
    bytes_received: int = counter(0, _KV_BYTES, "kv_bytes", labels=(("way", "received"),))
    leased: int = counter(0, "Blocks held for a node that pulls them.", "kv_leased_blocks", kind="gauge")
    lapsed: int = counter(0, "Leases of blocks that nobody renewed.", "kv_leases_lapsed")
    pulls: int = counter(0, "Requests whose KV was asked of another node.", "kv_pulls")
    pulls_failed: int = counter(0, "Those of which not everything came in time.", "kv_pulls_failed")
    pull_seconds: float = counter(0.0, "Time that moved requests waited for their KV.", "kv_pull_seconds")
    recomputed_tokens: int = counter(
        0, "Tokens computed again because their KV did not come.", "kv_recomputed_tokens"
    )
    copied_blocks: int = counter(
        0, "Blocks of running requests that another node keeps a copy of.", "kv_copied_blocks"
    )
    copies: int = counter(0, "Cached blocks that are kept for another node.", "kv_copies_held", kind="gauge")
    retained: int = counter(0, "Cached blocks that are to be kept.", "kv_retained_blocks", kind="gauge")
    evicted: int = _evicted(ORDINARY)
    evicted_copies: int = _evicted(COPIES)
    evicted_retained: int = _evicted(RETAINED)
    copy_hits: int = counter(0, "Copied blocks that a request was continued with.", "kv_copy_hits")
    handed: int = counter(0, "Prompts that another node computed for this one.", "prompts_handed_over")
    handed_short: int = counter(
        0, "Those that did not come whole; the rest was computed here.", "prompts_handed_over_short"
    )
    hand_seconds: float = counter(
        0.0, "Time from a request to the last block of its prompt.", "hand_over_seconds"
    )
    straight: int = counter(
        0, "Prompts that a decode node computed because that was sooner.", "prompts_straight"
    )
    prompts: int = counter(0, "Prompts that this node computed for others.", "prompts_for_others")
    peer_tokens: int = counter(0, "Prompt tokens that came from another node's cache.")
    oldest_lease: float = counter(
        0.0,
        "Time that blocks have been held for another node, at most.",
        "kv_oldest_lease_seconds",
        kind="gauge",
    )
    split: int = counter(
        0, "Prompts that this node computed together with other prefill nodes.", "prompts_split"
    )
    split_short: int = counter(
        0, "Those that another node left; the rest was computed here.", "prompts_split_short"
    )
    parts: int = counter(0, "Prompts of other prefill nodes of which a part was computed.", "prompt_parts")
    lent_below: int = counter(
        0, "Times that blocks were brought from host memory or disk for another node.", "kv_lent_from_below"
    )


@dataclass(frozen=True, slots=True)
class HostStats:
    """KV blocks in this node's host memory; without a capacity it has no such tier."""

    blocks: int = counter(0, "Blocks in host memory.", "kv_host_blocks", kind="gauge", where="capacity")
    capacity: int = counter(
        0, "Blocks that may be there at most.", "kv_host_capacity_blocks", kind="gauge", where="capacity"
    )
    hit_tokens: int = counter(0, "Prompt tokens whose KV was found there.")
    bytes_read: int = counter(0, _HOST_BYTES, "kv_host_bytes", labels=(("way", "read"),), where="capacity")
    bytes_written: int = counter(
        0, _HOST_BYTES, "kv_host_bytes", labels=(("way", "written"),), where="capacity"
    )
    left: int = counter(  # they made room for others
        0, _HOST_DROPPED, "kv_host_dropped_blocks", labels=(("reason", "left"),), where="capacity"
    )
    damaged: int = counter(
        0, _HOST_DROPPED, "kv_host_dropped_blocks", labels=(("reason", "damaged"),), where="capacity"
    )


def _chosen(where: str) -> Any:
    help = "Rows that an indexer chose, by whether they were near or fetched from the host."
    return counter(0, help, "kv_chosen_rows", labels=(("where", where),), where="exist")


@dataclass(frozen=True, slots=True)
class NearStats:
    """Of layers whose rows lie in the host (--kv-near-rows); 0 where all are in the cache."""

    found: int = _chosen("near")
    fetched: int = _chosen("host")

    @property
    def exist(self) -> bool:
        return self.fetched > 0


def _dropped(reason: str) -> Any:
    labels = (("reason", reason),)
    return counter(0, _DISK_DROPPED, "kv_disk_dropped_blocks", labels=labels, where="capacity")


@dataclass(frozen=True, slots=True)
class TierStats:
    """KV blocks on this node's disk, and in its `host` memory; without a capacity it has no disk. Restores are from
    either."""

    blocks: int = counter(0, "Blocks on the disk.", "kv_disk_blocks", kind="gauge", where="capacity")
    capacity: int = counter(
        0, "Blocks that may be there at most.", "kv_disk_capacity_blocks", kind="gauge", where="capacity"
    )
    hit_tokens: int = counter(0, "Prompt tokens whose KV was found on the disk.")
    bytes_read: int = counter(0, _DISK_BYTES, "kv_disk_bytes", labels=(("way", "read"),), where="capacity")
    bytes_written: int = counter(
        0, _DISK_BYTES, "kv_disk_bytes", labels=(("way", "written"),), where="capacity"
    )
    restores: int = counter(
        0, "Requests whose beginning was read from host memory or the disk.", "kv_restores", where="exist"
    )
    restores_short: int = counter(0, "Those that came in part.", "kv_restores_short", where="exist")
    restore_seconds: float = counter(
        0.0, "Time that requests waited for that.", "kv_restore_seconds", where="exist"
    )
    damaged: int = _dropped("damaged")
    unreadable: int = _dropped("unreadable")
    overwritten: int = _dropped("overwritten")  # by others
    late: int = _dropped("late")  # they left memory before they were written
    refused: int = _dropped("refused")  # they could not be written
    host: HostStats = HostStats()

    @property
    def exist(self) -> bool:
        return bool(self.capacity or self.host.capacity)


@dataclass(frozen=True, slots=True)
class AttentionStats:
    """Seconds under way are summed over dispatches, which overlap. Those of a stall are summed over the dispatches that
    waited longer for a lost expert node (`stalled`)."""

    running: int = counter(
        0,
        "Sequences being generated.",
        "num_requests_running",
        kind="gauge",
        over=Over.MODEL,
        also=(Metric("phase_requests_running", "Sequences on the nodes of a phase.", "gauge", Over.PHASE),),
    )
    waiting: int = counter(
        0,
        "Sequences waiting for a place.",
        "num_requests_waiting",
        kind="gauge",
        over=Over.MODEL,
        also=(
            Metric(
                "phase_requests_waiting",
                "Sequences that wait for a place on the nodes of a phase.",
                "gauge",
                Over.PHASE,
            ),
        ),
    )
    devices: int = counter(1, "Devices that attention is computed on.", "attention_devices", kind="gauge")
    kv_blocks: int = counter(0, "KV blocks in the cache.")
    kv_blocks_used: int = counter(0, "Those in use now.")
    prefix_queries: int = counter(
        0, "Prompt tokens looked up in the prefix cache.", "prefix_cache_queries", over=Over.MODEL
    )
    prefix_hits: int = counter(0, "Prompt tokens found there.", "prefix_cache_hits", over=Over.MODEL)
    preemptions: int = counter(
        0, "Sequences put back for lack of KV blocks.", "num_preemptions", over=Over.MODEL
    )
    prompt_tokens: int = counter(0, "Prompt tokens computed.")
    ahead_tokens: int = counter(
        0,
        "Prompt tokens computed while nobody asked, for turns to come.",
        "warm_ahead_tokens",
        over=Over.MODEL,
    )
    generated_tokens: int = counter(0, "Tokens generated.")
    steps: int = counter(0, "Steps of micro-batches.")
    dispatches: int = counter(0, "Layers of micro-batches sent to expert nodes.", "attention_node_dispatches")
    busy_seconds: float = counter(0.0, "Time spent computing.", "attention_node_busy_seconds")
    pictures: int = counter(0, "Pictures, or tiles of them, that were encoded.", "pictures")
    encoding_seconds: float = counter(
        0.0, "Of the time spent computing: encoding pictures.", "picture_encoding_seconds"
    )
    parked_seconds: float = counter(0.0, "Time spent waiting for answers.", "attention_node_parked_seconds")
    under_way_seconds: float = counter(
        0.0, "Time from dispatch to answer, summed over dispatches.", "attention_node_under_way_seconds"
    )
    resent_rows: int = counter(0, "Rows sent again because an expert node was lost.")
    given_up_rows: int = counter(0, "Rows given up because of that.")
    stalled: int = counter(0, "Dispatches that waited longer because of that.")
    unnoticed_seconds: float = counter(0.0, "Of their wait: until the loss was known.")
    resend_seconds: float = counter(0.0, "Of their wait: until replicas answered.")
    homeless_seconds: float = counter(0.0, "Of their wait: until an expert that no node held had one again.")
    kv: KvStats = KvStats()
    queued_tokens: int = counter(
        0,
        "Prompt tokens still to be computed on the nodes of a phase.",
        "phase_queued_tokens",
        kind="gauge",
        over=Over.PHASE,
    )
    near: NearStats = NearStats()
    tiers: TierStats = TierStats()
    drafts: DraftStats = NO_DRAFTS
    experts: ExpertMemoryStats = _ALL_IN_MEMORY

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
    """A prompt's messages may be computed in pieces."""

    messages: int = counter(0, "Dispatches answered.", "expert_node_messages")
    rows: int = counter(0, "Rows computed.", "expert_node_rows")
    calls: int = counter(0, "Grouped computations.", "expert_node_calls")
    busy_seconds: float = counter(0.0, "Time spent computing.", "expert_node_busy_seconds")
    hold_seconds: float = counter(0.0, "Time rows were held to be grouped.", "expert_node_hold_seconds")
    prompt_pieces: int = counter(0, "Pieces of prompts' messages.", "expert_node_prompt_pieces")
    prompt_seconds: float = counter(0.0, "Time spent on these.", "expert_node_prompt_seconds")
    experts: ExpertMemoryStats = _ALL_IN_MEMORY


Stats = AttentionStats | ExpertStats
KINDS: dict[str, type[Stats]] = {"attention": AttentionStats, "expert": ExpertStats}
"""What a node of the model says, by its role; a gateway says none."""


def smoothed(known: float, newest: float, weight: float) -> float:
    """A moving average in which the newest value has that weight; the first one is the average (0: there was none)."""
    return newest if not known else known + weight * (newest - known)
