"""Prompts that this node computes for others: each is a request of its own, lent while its blocks are filled.

First comes what need not be computed: a beginning that whoever asked has, such as an answer that was decoded there, and
what is in tiers below this node's cache. The one token that a prompt ends with is thrown away: whoever asked draws that
itself, from the row behind the prompt. A prompt may be computed by several nodes together: then this node leads, or has
a part of one (`parts.py`). It knows no sockets and no gateways.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from afserve.clock import Clock
from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.lender import Key
from afserve.comm.kv.messages import Prefill
from afserve.comm.kv.puller import Pulled
from afserve.comm.kv.sharing import SharedPrompt
from afserve.comm.kv.split import SplitMember
from afserve.engine.attention_node import AttentionNode
from afserve.engine.kv.moving.jobs import Job, Jobs
from afserve.engine.kv.moving.parts import Begun, Parts
from afserve.engine.kv.moving.restoring import Restores
from afserve.engine.scheduling.request import GenerationRequest, Purpose, SamplingParams, Tenant, TokenEvent
from afserve.errors import AfserveError
from afserve.tracing.trace import KV_BLOCKS

_ENDS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
FETCHED_TOKENS = 256  # at least: whoever has them looks at what it is asked between two of its steps only
Limit = Callable[[int], float]
"""Seconds that so many blocks may take to come; 0 where they are computed sooner."""


@dataclass(frozen=True, slots=True)
class _Asked:
    key: Key
    prefill: Prefill
    members: tuple[SplitMember, ...]
    since: float


class Prefilling:
    """Numbers of its own go down from -1: gateways give out no such ones. `prompts` counts those that were computed."""

    def __init__(
        self,
        node: AttentionNode[Any],
        exchange: Exchange,
        clock: Clock,
        block_size: int,
        limit: Limit,
        below: Restores,
    ) -> None:
        """What is not here is looked for `below` the cache."""
        self._node, self._exchange, self._clock = node, exchange, clock
        self._block_size, self._limit, self._below = block_size, limit, below
        self._asked: dict[int, _Asked] = {}  # by handle
        self._fetching = Jobs[Job](exchange.cancel)
        self._last = 0
        self.parts = Parts(node, exchange, clock, block_size, self._request)
        self.prompts = 0

    def lend(self) -> None:
        """Between two steps, before the exchange's turn: what was filled may leave in it."""
        if self._asked:
            self._exchange.computing(self._node.queued_tokens, self._node.prompt_rate)

    def take(self) -> None:
        """After the exchange's turn: what was asked in it begins at once."""
        asked, unwanted = self._exchange.take_asked(), self._exchange.take_unwanted()
        for key, prefill in asked:
            self._begin(key, prefill)
        for key in unwanted:
            for handle in [handle for handle, one in self._asked.items() if one.key == key]:
                self._node.cancel(handle)
                self.parts.cancel(handle)
                self._fetching.forget_request(handle)
                self._below.cancel(handle)
                self._over(handle)
        begun = self.parts.take()
        for request, shared in begun:
            self._submit(request, shared)
        if asked or unwanted or begun:
            self._exchange.computing(self._node.queued_tokens, self._node.prompt_rate)

    def fetched(self, pulled: Pulled) -> bool:
        """Whether these blocks are for a prompt that this node computes, or for a part of one."""
        if fetched := self._fetching.take_waiting(pulled.transfer):
            if not self._below.restore(fetched[0].request):
                self.go_on(fetched[0].request)
            return True
        begun: Begun | None = self.parts.fetched(pulled)
        if begun is not None:
            self._submit(*begun)
        return begun is not None

    def ended(self, event: TokenEvent) -> None:
        """An event of a request of its own: the prompt is in the cache, or what went wrong with it is known."""
        if event.finish_reason is None:
            return
        self.parts.ended(event.handle, event.error)
        if event.handle in self._asked:
            self.prompts += 1
            self._exchange.computed(self._over(event.handle), event.row)

    def _begin(self, key: Key, prefill: Prefill) -> None:
        members = self._exchange.helped(key)
        try:
            request = self._request(prefill)
        except AfserveError:
            self._exchange.computed(key)
            return
        asked = self._asked[request.handle] = _Asked(key, prefill, members, self._clock.now())
        self._node.draw_arrow(KV_BLOCKS, f"prompt {prefill.request}", "s")
        if not (self._fetch(request, asked) or self._below.restore(request)):
            self._start(request, asked)

    def _fetch(self, request: GenerationRequest, asked: _Asked) -> bool:
        """Whether it waits for a beginning that whoever asked has."""
        names = self._node.usable_names(request)[: asked.prefill.here]
        lacking = len(names) - self._node.known(names)
        limit = self._limit(lacking) if lacking * self._block_size >= FETCHED_TOKENS else 0.0
        if limit:
            transfer = self._exchange.fetch(asked.key, names, limit, asked.prefill.life)
            self._fetching.wait_for(Job(request, self._clock.now(), limit), transfer)
        return limit > 0

    def go_on(self, request: GenerationRequest) -> None:
        """It waits for nothing any more: what has come of it is here. May be said of one that is over."""
        if (asked := self._asked.get(request.handle)) is not None:
            self._exchange.found(asked.key)
            self._start(request, asked)

    def _start(self, request: GenerationRequest, asked: _Asked) -> None:
        if not (asked.members and self.parts.propose(request, asked.prefill, asked.members)):
            self._submit(request, None)

    def _request(self, prefill: Prefill, purpose: Purpose = Purpose.PROMPT) -> GenerationRequest:
        self._last -= 1
        return GenerationRequest(
            self._last,
            prefill.tokens,
            _ENDS,
            priority=prefill.priority,
            cache_salt=prefill.salt,
            tenant=Tenant(prefill.tenant, prefill.share),
            purpose=purpose,
            tiles=prefill.tiles,
        )

    def _submit(self, request: GenerationRequest, shared: SharedPrompt | None) -> None:
        """Where it is refused, whoever asked is granted what is here, and computes the rest itself."""
        try:
            self._node.submit(request, shared)
        except AfserveError as error:
            self.parts.ended(request.handle, error.message)
            if request.handle in self._asked:
                self._exchange.computed(self._over(request.handle))

    def _over(self, handle: int) -> Key:
        asked = self._asked.pop(handle)
        self._node.draw(
            KV_BLOCKS, f"the prompt of request {asked.prefill.request}", self._clock.now() - asked.since
        )
        return asked.key
