"""Which attention node takes a request: the one where it is predicted to be complete first.

What counts is the tokens that a node has to compute until then: those of prompts that wait there, those of this prompt
that its cache lacks, and some for each request that it runs. Tokens for which its cache has no room until others end
count as if they were computed. Equal beginnings of prompts have equal keys. Which nodes have one is known from what
they say of their caches, and until they do from what they were given. Integers in, integers out.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from afserve.engine.kv.prefix_keys import keys_of

_REMEMBERED = 1 << 17
_RUNNING = 64  # tokens: what a running request costs one that is computed beside it
# A node may be this many requests above the least busy one, or this many times as busy.
_SLACK = 16
_FACTOR = 2.0
_WORTH = 256  # tokens that another node must have more, to be asked for them
_NONE: Mapping[int, int] = MappingProxyType({})
Chain = Sequence[tuple[int, int]]  # (key, tokens) of a prompt's beginnings, from short to long
Room = Callable[[int, Chain], int]


@dataclass(frozen=True, slots=True)
class Route:
    """`node` takes the request and has to compute `missing` tokens of it. `source` is a node that has many more of
    them. `chain` is empty where nobody asked for it."""

    node: int
    missing: int
    source: int | None = None
    chain: Chain = field(default=(), compare=False, repr=False)


class OpenPrompts:
    """The prompts that one node's cache holds for requests that are not over. `tokens` is what they take: a beginning
    that several have is there once, as far as it has a key."""

    def __init__(self) -> None:
        self.tokens = 0
        self._holders: Counter[int] = Counter()  # by key

    def add(self, chain: Chain, length: int) -> None:
        """A prompt of `length` tokens."""
        begin = 0
        for key, end in chain:
            self.tokens += 0 if self._holders[key] else end - begin
            self._holders[key] += 1
            begin = end
        self.tokens += length - begin

    def remove(self, chain: Chain, length: int) -> None:
        """What `add` was told before."""
        begin = 0
        for key, end in chain:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self.tokens -= end - begin
            begin = end
        self.tokens -= length - begin

    def shared(self, chain: Chain) -> int:
        """Tokens of this prompt that others hold."""
        return next((tokens for key, tokens in reversed(chain) if key in self._holders), 0)


class Affinity:
    """Remembers of the last 131,072 beginnings which nodes have them."""

    def __init__(self, block_size: int) -> None:
        self._block = block_size
        self._nodes: OrderedDict[int, int] = OrderedDict()  # by key; bit n stands for node n

    def told(self, node: int, came: Iterable[int], went: Iterable[int], *, anew: bool) -> None:
        """By a node, of its cache; with `anew` it has nothing but this."""
        bit = 1 << node
        for key in [key for key, nodes in self._nodes.items() if nodes & bit] if anew else went:
            self._forget(key, bit)
        for key in came:
            self._nodes[key] = self._nodes.get(key, 0) | bit
            self._nodes.move_to_end(key)
        self._trim()

    def _forget(self, key: int, bit: int) -> None:
        left = self._nodes.get(key, 0) & ~bit
        if left:
            self._nodes[key] = left
        else:
            self._nodes.pop(key, None)

    def pick(
        self,
        prompt: Sequence[int],
        load: Mapping[int, int],
        preferred: int | None = None,
        pending: Mapping[int, int] = _NONE,
        salt: str = "",
        room: Room | None = None,
    ) -> Route:
        """The node for `prompt`. `load` has the number of open requests of each node that may take it, at least one;
        `pending` the tokens of prompts that these have still to compute. `room` says how many tokens of this prompt a
        node's cache can have beside theirs, less than 0 where they want more already; for any number without it.

        `preferred` is taken wherever it is not too busy. Caches are shared by prompts of one `salt` only.
        """
        if len(load) == 1:
            return Route(next(iter(load)), len(prompt))
        chain = list(keys_of(prompt, self._block, salt))
        known = self._known(chain, load)
        least = min(load.values())
        free = [node for node in load if load[node] <= max(least + _SLACK, least * _FACTOR)]

        def cost(node: int) -> tuple[int, int]:
            missing = len(prompt) - known.get(node, 0)
            beyond = 0 if room is None else min(len(prompt), max(0, len(prompt) - room(node, chain)))
            return pending.get(node, 0) + missing + beyond + _RUNNING * load[node], load[node]

        node = preferred if preferred in free else min(free, key=cost)
        self._remember(chain, node)
        here = known.get(node, 0)
        source = max(known, key=lambda other: known[other], default=node)
        worth = known.get(source, 0) >= here + _WORTH
        return Route(node, len(prompt) - here, source if worth else None, chain)

    def missing(self, prompt: Sequence[int], nodes: Sequence[int], salt: str = "") -> int:
        """Tokens of `prompt` that even the one of `nodes` lacks which has most of it."""
        known = self._known(list(keys_of(prompt, self._block, salt)), nodes)
        return len(prompt) - max(known.values(), default=0)

    def _known(self, chain: Chain, load: Collection[int]) -> dict[int, int]:
        """Tokens that each node has of this beginning."""
        found: dict[int, int] = {}
        for value, tokens in reversed(chain):
            nodes = self._nodes.get(value, 0)
            if nodes:
                for node in load:
                    if nodes >> node & 1:
                        found.setdefault(node, tokens)
        return found

    def _remember(self, chain: Chain, node: int) -> None:
        for value, _ in chain:
            self._nodes[value] = self._nodes.get(value, 0) | 1 << node
            self._nodes.move_to_end(value)
        self._trim()

    def _trim(self) -> None:
        while len(self._nodes) > _REMEMBERED:
            self._nodes.popitem(last=False)
