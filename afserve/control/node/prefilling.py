"""Prompts that this node computes for others: each is a request of its own, lent while its blocks are filled.

The one token that it ends with is thrown away: whoever asked draws that itself, from the row behind the prompt. It
knows no sockets and no gateways.
"""

from dataclasses import dataclass
from typing import Protocol

from afserve.clock import Clock
from afserve.comm.kv.lender import Key
from afserve.comm.kv.messages import Prefill
from afserve.engine.request import GenerationRequest, SamplingParams, Tenant, TokenEvent
from afserve.errors import AfserveError
from afserve.trace import Arrow

_ENDS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class PrefillNode(Protocol):
    """What this needs of `engine.attention_node.AttentionNode`."""

    @property
    def queued_tokens(self) -> int: ...
    @property
    def prompt_rate(self) -> float: ...
    def submit(self, request: GenerationRequest) -> None: ...
    def cancel(self, handle: int) -> None: ...
    def draw(self, row: str, what: str, since: float) -> None: ...
    def draw_arrow(self, row: str, identity: str, step: Arrow) -> None: ...


class PrefillExchange(Protocol):
    """What this needs of `comm.kv.exchange.Exchange`."""

    def take_asked(self) -> list[tuple[Key, Prefill]]: ...
    def take_unwanted(self) -> list[Key]: ...
    def computing(self, queued: int, rate: float) -> None: ...
    def computed(self, key: Key, row: bytes = b"") -> None: ...


@dataclass(frozen=True, slots=True)
class _Asked:
    key: Key
    request: int
    since: float


class Prefilling:
    """Handles of its own are negative, so that none is a gateway's. `prompts` counts those that were computed."""

    def __init__(self, node: PrefillNode, exchange: PrefillExchange, clock: Clock) -> None:
        self._node, self._exchange, self._clock = node, exchange, clock
        self._asked: dict[int, _Asked] = {}  # by handle
        self._last = 0
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
                self._over(handle)
        if asked or unwanted:
            self._exchange.computing(self._node.queued_tokens, self._node.prompt_rate)

    def ended(self, event: TokenEvent) -> None:
        """An event of a negative handle: its prompt is in the cache, or what went wrong with it is known."""
        if event.finish_reason is not None and event.handle in self._asked:
            self.prompts += 1
            self._exchange.computed(self._over(event.handle), event.row)

    def _begin(self, key: Key, prefill: Prefill) -> None:
        self._last -= 1
        self._asked[self._last] = _Asked(key, prefill.request, self._clock.now())
        self._node.draw_arrow("KV blocks", f"prompt {prefill.request}", "s")
        try:
            request = GenerationRequest(
                self._last,
                prefill.tokens,
                _ENDS,
                priority=prefill.priority,
                cache_salt=prefill.salt,
                tenant=Tenant(prefill.tenant, prefill.share),
                wants_row=True,
            )
            self._node.submit(request)
        except AfserveError:  # whoever asked is granted what is here, and computes the rest itself
            self._exchange.computed(self._over(self._last))

    def _over(self, handle: int) -> Key:
        asked = self._asked.pop(handle)
        self._node.draw("KV blocks", f"the prompt of request {asked.request}", asked.since)
        return asked.key
