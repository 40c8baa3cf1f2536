"""What an attention node says of the blocks that its cache keeps because somebody asked for it."""

from typing import TYPE_CHECKING, Any

from afserve.control.wire.cache_values import AskCache, KeptCache
from afserve.engine.scheduling.request import GenerationRequest

if TYPE_CHECKING:
    from afserve.engine.attention_node import AttentionNode
    from afserve.engine.kv.blocks import Hash


def answer_of(node: "AttentionNode[Any]", asked: AskCache) -> KeptCache:
    """Also lets them go, where that is asked."""
    pool = node.kv.pool
    owner = None if asked.everybody else asked.owner
    owned = [one for one in pool.retained.owned() if owner is None or one.owner == owner]
    names = _names(node, asked) if asked.prompt else None
    unpinned = pool.unpin(owner, names) if asked.unpin else 0
    return KeptCache(asked.query, pool.blocks, pool.block_size, node.block_bytes, unpinned, tuple(owned))


def _names(node: "AttentionNode[Any]", asked: AskCache) -> "list[Hash]":
    """Of all whole blocks of its prompt; the answer to it may have filled the last one."""
    request = GenerationRequest(0, (*asked.prompt, 0), cache_salt=asked.salt)
    return node.usable_names(request)
