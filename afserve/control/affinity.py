"""Which attention node takes a request: the one that has seen its beginning, unless that one is too busy.

A prompt's full blocks are hashed as a chain, so that equal beginnings give equal hashes; the longest chain
known points at the node whose prefix cache most likely holds it. Integers in, an integer out.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

_REMEMBERED = 1 << 16
_DEPTH = 64
# A node may be this many requests above the least busy one, and this many times as busy, before affinity yields.
_SLACK = 4
_FACTOR = 1.5


class Affinity:
    """Remembers, for the last 65,536 block chains, which node computed them."""

    def __init__(self, block_size: int) -> None:
        self._block = block_size
        self._home: OrderedDict[int, int] = OrderedDict()

    def pick(self, prompt: Sequence[int], load: Mapping[int, int], preferred: int | None = None) -> int:
        """The node for `prompt`; `load` has the number of open requests of each node that may take it, at least one.

        `preferred` is asked before the one that has seen its beginning.
        """
        if len(load) == 1:
            return next(iter(load))
        chain = list(self._chain(prompt))
        least = min(load, key=lambda node: load[node])
        node = preferred if preferred in load else self._known(chain)
        if node is None or node not in load or load[node] > max(load[least] + _SLACK, load[least] * _FACTOR):
            node = least
        self._remember(chain, node)
        return node

    def _chain(self, prompt: Sequence[int]) -> Iterator[int]:
        value = 0
        for start in range(0, min(len(prompt), _DEPTH * self._block) - self._block + 1, self._block):
            value = hash((value, tuple(prompt[start : start + self._block])))
            yield value

    def _known(self, chain: Sequence[int]) -> int | None:
        return next((self._home[value] for value in reversed(chain) if value in self._home), None)

    def _remember(self, chain: Sequence[int], node: int) -> None:
        for value in chain:
            self._home[value] = node
            self._home.move_to_end(value)
        while len(self._home) > _REMEMBERED:
            self._home.popitem(last=False)
