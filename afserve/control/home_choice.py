"""Which attention node a request is given to, and where that one finds what others have computed of it.

What only advises may fail: then it is the node with the fewest requests, and nobody else's KV blocks. It opens nothing
and tells nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from afserve.adviser import Adviser
from afserve.comm.kv.source import KvSource
from afserve.control.affinity import Affinity, Chain, Route
from afserve.control.attendance import Attendance
from afserve.control.prompts import Prompts
from afserve.control.requests import Request, Requests
from afserve.control.wire.request_values import Prefixes
from afserve.member import Life


@dataclass(frozen=True, slots=True)
class ChosenHome:
    """`home` has to compute `missing` tokens of the prompt; `source` has others. `chain` is what `Route` has."""

    home: Life
    source: KvSource | None
    missing: int
    chain: Chain = ()


class HomeChoice:
    """`block_size` in tokens. `copies` nodes have copies of another one's KV. A node's cache has room for
    `cache_tokens`; 0 where that is not known."""

    def __init__(
        self, requests: Requests, attendance: Attendance, block_size: int, copies: int, cache_tokens: int = 0
    ) -> None:
        self._requests, self._attendance, self._copies = requests, attendance, copies
        self._cache_tokens = cache_tokens
        self._affinity = Affinity(block_size)
        self.prompts = Prompts(block_size)
        self._route_advice = Adviser("finding the attention node that has a prompt's beginning")
        self._prompt_advice = Adviser("finding a prefill node")

    def missing(self, prompts: Sequence[Sequence[int]], salt: str) -> int:
        """Tokens of prompts that even the node lacks which has most of each."""
        nodes = [life.index for life in self._attendance.decoders()]
        return sum(self._affinity.missing(prompt, nodes, salt) for prompt in prompts)

    def heard(self, node: int, said: Prefixes, now: float) -> None:
        """What beginnings a node has."""
        with self._route_advice.guarded(now):
            for affinity in (self._affinity, self.prompts.affinity):
                affinity.told(node, said.came, said.went, anew=said.anew)

    def choose(self, request: Request, usable: Sequence[Life], now: float) -> ChosenHome:
        """One of `usable`, at least one."""
        source = self._left_behind(request)
        copied = source.life.index if source is not None and not source.request else None
        route = self._route(request, usable, copied, now)
        home = next(life for life in usable if life.index == route.node)
        if source is not None and source.life == home:
            source = None
        elif source is None and route.source is not None:
            source = self._attendance.kv_at(next(life for life in usable if life.index == route.source))
        if source is None or not request.generated:
            prefilling, waited = self._attendance.prefilling(home), now - request.since
            asked = partial(self.prompts.source, request, prefilling, waited)
            source = self._prompt_advice.ask(now, asked, None) or source
        return ChosenHome(home, source, route.missing, route.chain)

    def _route(self, request: Request, usable: Sequence[Life], copied: int | None, now: float) -> Route:
        """The node with the fewest requests, where nobody can say which one has most of the prompt."""
        load = {life.index: self._requests.load(life) for life in usable}
        pending = {life.index: self._requests.pending(life) for life in usable}
        lives = {life.index: life for life in usable}

        def room(node: int, chain: Chain) -> int:
            return self._cache_tokens - self._requests.prompt_tokens(lives[node], beside=chain)

        prompt, salt = request.asked.prompt_ids, request.asked.cache_salt
        plain = Route(min(load, key=lambda node: load[node]), len(prompt))
        pick = partial(
            self._affinity.pick, prompt, load, copied, pending, salt, room if self._cache_tokens else None
        )
        return self._route_advice.ask(now, pick, plain)

    def _left_behind(self, request: Request) -> KvSource | None:
        """Where what was computed of a request is: at the node that it leaves, or where copies of that are."""
        last = request.last
        if last is None:
            return None
        if self._attendance.peer(last) is not None and self._attendance.stream(last) is not None:
            return self._attendance.kv_at(last, request.number)
        copies = self._attendance.buddies(last, self._copies)
        return KvSource(copies[0].life, 0, copies[0].address) if copies else None
