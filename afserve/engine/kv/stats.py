"""What a node says of its KV blocks: between nodes, in host memory, on disk. Plain numbers, no torch."""

from dataclasses import dataclass

PEER = "peer"  # where KV was found, beside the tiers below a cache


@dataclass(frozen=True, slots=True)
class KvStats:
    """KV blocks between attention nodes. `leased` blocks are held now for others, the first of them for `oldest_lease`
    seconds, `copies` are kept now for others; all else are totals.

    `pulls` of a moved request's blocks took `pull_seconds` in sum; what `pulls_failed` of them lacked was computed
    again, `recomputed_tokens`. Prompts that another node computed were `handed` over, `handed_short` of them not whole;
    from the request to the last block that took `hand_seconds` in sum. `straight` ones were computed here because that
    was predicted to be faster, and `prompts` were computed here for others. `split` ones of these were computed with
    other prefill nodes, `split_short` of them to the end by this one alone; of other nodes' prompts it had `parts`.
    `lapsed` leases were not released by who
    had them. `peer_tokens` of prompts were in another node's cache and came from there. `copied_blocks` went to
    buddies, `copy_hits` of such were used here.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    leased: int = 0
    lapsed: int = 0
    pulls: int = 0
    pulls_failed: int = 0
    pull_seconds: float = 0.0
    recomputed_tokens: int = 0
    copied_blocks: int = 0
    copies: int = 0
    copy_hits: int = 0
    handed: int = 0
    handed_short: int = 0
    hand_seconds: float = 0.0
    straight: int = 0
    prompts: int = 0
    peer_tokens: int = 0
    oldest_lease: float = 0.0
    split: int = 0
    split_short: int = 0
    parts: int = 0


@dataclass(frozen=True, slots=True)
class HostStats:
    """KV blocks in this node's host memory. `blocks` of at most `capacity` are there now; all else are totals.

    `hit_tokens` of prompts were found there. `bytes_read` came back into the cache. `left` blocks made room for others;
    `damaged` ones were dropped.
    """

    blocks: int = 0
    capacity: int = 0
    hit_tokens: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    left: int = 0
    damaged: int = 0


@dataclass(frozen=True, slots=True)
class TierStats:
    """KV blocks on this node's disk, and in its `host` memory. `blocks` of at most `capacity` are on the disk now; all
    else are totals.

    `hit_tokens` of prompts were found on the disk. `restores`, from either, took `restore_seconds` in sum, and
    `restores_short` of them did not bring everything. Blocks were dropped because they were `damaged` or `unreadable`,
    `overwritten` by others, left memory before they were written (`late`), or could not be written (`refused`).
    """

    blocks: int = 0
    capacity: int = 0
    hit_tokens: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    restores: int = 0
    restores_short: int = 0
    restore_seconds: float = 0.0
    damaged: int = 0
    unreadable: int = 0
    overwritten: int = 0
    late: int = 0
    refused: int = 0
    host: HostStats = HostStats()
