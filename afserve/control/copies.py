"""Which attention nodes keep copies of another one's KV: a rule that gateways and nodes apply to the same list."""

from collections.abc import Iterable

from afserve.comm.kv.split import SplitMember
from afserve.control.wire.values import AttentionPeer


def buddies(nodes: Iterable[AttentionPeer], index: int, count: int) -> list[AttentionPeer]:
    """The next `count` nodes after `index` that take requests, going round: the same ones before and after it is lost,
    unless others came or left."""
    others = sorted(
        (node for node in nodes if node.accepting and node.life.index != index), key=lambda n: n.life
    )
    after = [node for node in others if node.life.index > index]
    return [*after, *others[: len(others) - len(after)]][:count]


def keepers_of(nodes: Iterable[AttentionPeer], index: int, count: int) -> list[SplitMember]:
    """Its `buddies` that can be reached, each as a life at an address."""
    return [
        SplitMember(node.life.generation, node.address)
        for node in buddies(nodes, index, count)
        if node.address
    ]
