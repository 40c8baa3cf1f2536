"""What a node that leaves has in its cache and others have not: it goes to them, as long as there is time.

Blocks that nobody holds any more are offered with the keys of the beginnings that end there, what was asked to be kept
first, then the newest. Another node takes what it has not, where its memory is free, and tells gateways of it. The next
one is asked for what that one has no room for. Whatever does not go is computed again where it is wanted.
"""

from collections.abc import Callable, Sequence
from typing import Any

from afserve.adviser import Adviser
from afserve.clock import Clock
from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.messages import Name
from afserve.comm.kv.split import SplitMember
from afserve.engine.attention_node import AttentionNode

SECONDS = 10.0  # in all
_OFFER_BYTES = 16 << 20


class HandingOn:
    """`tell` takes a line for the run's log."""

    def __init__(
        self,
        node: AttentionNode[Any],
        exchange: Exchange,
        block_bytes: int,
        clock: Clock,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._node, self._exchange, self._clock, self._tell = node, exchange, clock, tell
        self._most = max(1, _OFFER_BYTES // block_bytes)
        self._advice = Adviser("handing on the KV of a node that leaves")
        self._until: float | None = None
        self._over = False
        self._left: list[Name] = []
        self._peers: list[SplitMember] = []
        self._offer: int | None = None
        self._offered = 0
        self._blocks = 0  # that others have taken, or had

    def go_on(self, peers: Sequence[SplitMember]) -> bool:
        """Whether it is still being handed on. The first call begins it, once this node computes nothing more."""
        now = self._clock.now()
        if self._until is None:
            self._until, self._peers = now + SECONDS, list(peers)
            self._left = self._advice.ask(now, self._node.kv.pool.idle_names, []) if peers else []
        if self._offer is None and not self._over:
            self._advice.ask(now, lambda: self._next(now), None)
        return self._offer is not None

    def _next(self, now: float) -> None:
        if self._left and self._peers and self._until is not None and now < self._until:
            names = self._left[: self._most]
            keys = self._node.told.prefixes.keys_of(names)
            self._offer = self._exchange.hand_on(self._peers[0].address, list(zip(names, keys, strict=True)))
            self._offered = len(names)
            return
        self._over = True
        if self._blocks or self._left:
            left = len(self._left)
            self._tell(
                f"{self._blocks:,} blocks of KV are with other nodes as this one leaves, {left:,} are not"
            )

    def settled(self, offer: int, kept: int) -> None:
        """The first `kept` blocks of an offer are there now. Of others' offers nothing is taken."""
        if offer != self._offer:
            return
        self._offer = None
        kept = min(kept, self._offered)
        self._blocks += kept
        del self._left[:kept]
        if kept < self._offered:
            del self._peers[0]
