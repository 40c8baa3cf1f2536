"""Which attention node takes a request: the one where it is predicted to be complete first.

What counts is the tokens that a node has to compute until then: those of prompts that wait there, those of this prompt
that its cache lacks, and some for each request that it runs. A prompt's blocks are hashed as a chain, so that equal
beginnings give equal hashes; a known one says which nodes have computed it. Integers in, integers out.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

_REMEMBERED = 1 << 17
_FINE, _COARSE = 16, 16  # blocks that are looked at one by one, and how many at a time behind those
_RUNNING = 64  # tokens: what a running request costs one that is computed beside it
# A node may be this many requests above the least busy one, or this many times as busy.
_SLACK = 16
_FACTOR = 2.0
_WORTH = 256  # tokens that another node must have more, to be asked for them
_NONE: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Route:
    """`node` takes the request and has to compute `missing` tokens of it. `source` is a node that has many more of
    them."""

    node: int
    missing: int
    source: int | None = None


class Affinity:
    """Remembers of the last 131,072 beginnings which nodes computed them."""

    def __init__(self, block_size: int) -> None:
        self._block = block_size
        self._nodes: OrderedDict[int, int] = OrderedDict()  # by hash; bit n stands for node n

    def pick(
        self,
        prompt: Sequence[int],
        load: Mapping[int, int],
        preferred: int | None = None,
        pending: Mapping[int, int] = _NONE,
    ) -> Route:
        """The node for `prompt`. `load` has the number of open requests of each node that may take it, at least one;
        `pending` the tokens of prompts that these have still to compute.

        `preferred` is taken wherever it is not too busy.
        """
        if len(load) == 1:
            return Route(next(iter(load)), len(prompt))
        chain = list(self._chain(prompt))
        known = self._known(chain, load)
        least = min(load.values())
        free = [node for node in load if load[node] <= max(least + _SLACK, least * _FACTOR)]

        def cost(node: int) -> tuple[int, int]:
            missing = len(prompt) - known.get(node, 0)
            return pending.get(node, 0) + missing + _RUNNING * load[node], load[node]

        node = preferred if preferred in free else min(free, key=cost)
        self._remember(chain, node)
        here = known.get(node, 0)
        source = max(known, key=lambda other: known[other], default=node)
        worth = known.get(source, 0) >= here + _WORTH
        return Route(node, len(prompt) - here, source if worth else None)

    def missing(self, prompt: Sequence[int], nodes: Sequence[int]) -> int:
        """Tokens of `prompt` that even the one of `nodes` lacks which has most of it."""
        known = self._known(list(self._chain(prompt)), nodes)
        return len(prompt) - max(known.values(), default=0)

    def _chain(self, prompt: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(hash, tokens) of beginnings, from short to long."""
        value = start = 0
        while True:
            blocks = 1 if start < _FINE * self._block else _COARSE
            end = start + blocks * self._block
            if end > len(prompt):
                return
            value = hash((value, tuple(prompt[start:end])))
            start = end
            yield value, end

    def _known(self, chain: Sequence[tuple[int, int]], load: Collection[int]) -> dict[int, int]:
        """Tokens that each node has computed of this beginning."""
        found: dict[int, int] = {}
        for value, tokens in reversed(chain):
            nodes = self._nodes.get(value, 0)
            if nodes:
                for node in load:
                    if nodes >> node & 1:
                        found.setdefault(node, tokens)
        return found

    def _remember(self, chain: Sequence[tuple[int, int]], node: int) -> None:
        for value, _ in chain:
            self._nodes[value] = self._nodes.get(value, 0) | 1 << node
            self._nodes.move_to_end(value)
        while len(self._nodes) > _REMEMBERED:
            self._nodes.popitem(last=False)
