"""Copies what running requests have in the KV cache to other attention nodes, in the background (`--kv-copies`).

A buddy is offered a few blocks at a time, and nothing more until it has answered: where it is slow, or full, copies lag
behind and decoding does not notice. Only blocks that are full are copied, each request's in order.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from afserve.adviser import Adviser
from afserve.clock import Clock
from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.messages import Name
from afserve.comm.kv.split import SplitMember
from afserve.engine.attention_node import AttentionNode

_EVERY = 0.25  # seconds between two looks at what is new, while little is: each offer wakes four threads
_BACK_OFF = 1.0  # after a buddy that did not keep what it was offered
_OFFER_BYTES = 4 << 20


@dataclass(slots=True)
class _Buddy:
    """One life of a node that keeps copies. `copied` counts each request's first blocks that it has."""

    peer: SplitMember
    copied: dict[int, int] = field(default_factory=dict)
    offer: int | None = None
    offered: tuple[int, int, int] = (0, 0, 0)  # request, first block, blocks
    again: float = 0.0


class Copier:
    """`blocks` that are copied in all."""

    def __init__(self, node: AttentionNode[Any], exchange: Exchange, block_bytes: int, clock: Clock) -> None:
        self._node, self._exchange, self._clock = node, exchange, clock
        self._most = max(1, _OFFER_BYTES // block_bytes)
        self._buddies: list[_Buddy] = []
        self._due = 0.0
        self.blocks = 0
        self._advice = Adviser("copying KV to other nodes")

    def copy_to(self, peers: Iterable[SplitMember]) -> None:
        """These keep this node's copies from now on. One that is new knows nothing yet."""
        before = {buddy.peer: buddy for buddy in self._buddies}
        self._buddies = [before.get(peer) or _Buddy(peer) for peer in peers]

    def turn(self) -> None:
        """Called once per turn of the loop; most calls only look at the clock."""
        now = self._clock.now()
        if now >= self._due and self._buddies:
            self._advice.ask(now, lambda: self._copy(now), None)

    def _copy(self, now: float) -> None:
        free = [buddy for buddy in self._buddies if buddy.offer is None and now >= buddy.again]
        if not free:
            return
        self._due = now + _EVERY
        written = self._node.written_names()
        for buddy in free:
            buddy.copied = {request: count for request, count in buddy.copied.items() if request in written}
            self._offer(buddy, written)

    def _offer(self, buddy: _Buddy, written: dict[int, list[Name]]) -> None:
        """What lags behind most."""
        lag = {request: len(names) - buddy.copied.get(request, 0) for request, names in written.items()}
        request = max(lag, key=lambda one: lag[one], default=None)
        if request is None or lag[request] <= 0:
            return
        first = buddy.copied.get(request, 0)
        names = written[request][first : first + self._most]
        if len(names) == self._most:
            self._due = self._clock.now()  # much is new: again as soon as it is settled
        buddy.offered = request, first, len(names)
        buddy.offer = self._exchange.offer(buddy.peer.address, names)

    def settled(self, offer: int, kept: int) -> None:
        """The first `kept` blocks of an offer are at the buddy now."""
        with self._advice.guarded(self._clock.now()):
            self._settle(offer, kept)

    def _settle(self, offer: int, kept: int) -> None:
        buddy = next((buddy for buddy in self._buddies if buddy.offer == offer), None)
        if buddy is None:
            return  # it is a buddy no more
        request, first, count = buddy.offered
        buddy.offer = None
        buddy.copied[request] = first + min(kept, count)
        self.blocks += min(kept, count)
        if kept < count:
            buddy.again = self._clock.now() + _BACK_OFF
