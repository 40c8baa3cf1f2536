"""What an attention node says of the blocks that its cache keeps because somebody asked for it."""

from typing import TYPE_CHECKING, Any

from afserve.control.wire.cache_values import AskCache, KeptCache

if TYPE_CHECKING:
    from afserve.engine.attention_node import AttentionNode


def answer_of(node: "AttentionNode[Any]", asked: AskCache) -> KeptCache:
    """Also lets them go, where that is asked."""
    pool = node.kv.pool
    owner = None if asked.everybody else asked.owner
    owned = [one for one in pool.retained.owned() if owner is None or one.owner == owner]
    unpinned = pool.unpin(owner) if asked.unpin else 0
    return KeptCache(asked.query, pool.blocks, pool.block_size, node.block_bytes, unpinned, tuple(owned))
