"""Prompts that this node computes for others: each is a request of its own, lent while its blocks are filled.

The one token that it ends with is thrown away: whoever asked draws that itself, from the row behind the prompt. A
prompt may be computed by several nodes together: then this node leads, or has a part of one (`parts.py`). It knows no
sockets and no gateways.
"""

from dataclasses import dataclass
from typing import Protocol

from afserve.clock import Clock
from afserve.comm.kv.lender import Key
from afserve.comm.kv.messages import Prefill
from afserve.comm.kv.puller import Pulled
from afserve.comm.kv.sharing import SharedPrompt
from afserve.comm.kv.split import Member
from afserve.control.node.parts import Begun, PartExchange, PartNode, Parts
from afserve.engine.request import GenerationRequest, SamplingParams, Tenant, TokenEvent
from afserve.errors import AfserveError
from afserve.trace import KV_BLOCKS, Arrow

_ENDS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class PrefillNode(PartNode, Protocol):
    """What this needs of `engine.attention_node.AttentionNode`."""

    @property
    def queued_tokens(self) -> int: ...
    @property
    def prompt_rate(self) -> float: ...
    def submit(self, request: GenerationRequest, shared: SharedPrompt | None = None) -> None: ...
    def draw_arrow(self, row: str, identity: str, step: Arrow) -> None: ...


class PrefillExchange(PartExchange, Protocol):
    """What this needs of `comm.kv.exchange.Exchange`."""

    def take_asked(self) -> list[tuple[Key, Prefill]]: ...
    def take_unwanted(self) -> list[Key]: ...
    def computing(self, queued: int, rate: float) -> None: ...
    def computed(self, key: Key, row: bytes = b"") -> None: ...
    def helped(self, key: Key) -> tuple[Member, ...]: ...


@dataclass(frozen=True, slots=True)
class _Asked:
    key: Key
    request: int
    since: float


class Prefilling:
    """Handles of its own are negative, so that none is a gateway's. `prompts` counts those that were computed."""

    def __init__(self, node: PrefillNode, exchange: PrefillExchange, clock: Clock, block_size: int) -> None:
        self._node, self._exchange, self._clock = node, exchange, clock
        self._asked: dict[int, _Asked] = {}  # by handle
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
                self._over(handle)
        begun = self.parts.take()
        for request, shared in begun:
            self._submit(request, shared)
        if asked or unwanted or begun:
            self._exchange.computing(self._node.queued_tokens, self._node.prompt_rate)

    def fetched(self, pulled: Pulled) -> bool:
        """Whether these blocks are for a part of a prompt that this node has."""
        begun: Begun | None = self.parts.fetched(pulled)
        if begun is not None:
            self._submit(*begun)
        return begun is not None

    def ended(self, event: TokenEvent) -> None:
        """An event of a negative handle: its prompt is in the cache, or what went wrong with it is known."""
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
        self._asked[request.handle] = _Asked(key, prefill.request, self._clock.now())
        self._node.draw_arrow(KV_BLOCKS, f"prompt {prefill.request}", "s")
        if not (members and self.parts.propose(request, prefill, members)):
            self._submit(request, None)

    def _request(self, prefill: Prefill) -> GenerationRequest:
        self._last -= 1
        return GenerationRequest(
            self._last,
            prefill.tokens,
            _ENDS,
            priority=prefill.priority,
            cache_salt=prefill.salt,
            tenant=Tenant(prefill.tenant, prefill.share),
            wants_row=True,
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
        self._node.draw(KV_BLOCKS, f"the prompt of request {asked.request}", self._clock.now() - asked.since)
        return asked.key
