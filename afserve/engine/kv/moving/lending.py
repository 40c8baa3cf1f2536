"""Blocks below this node's cache that another node wants: brought into the cache, and lent as they come.

As much comes as would be worth it for a request of this node, by its own measured rates; whoever asked takes what has
come by its own deadline, and computes the rest. It knows no requests.
"""

from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.lender import Key
from afserve.comm.kv.messages import Name
from afserve.engine.kv.moving.restoring import Restores


class LentBelow:
    """`chains` counts those of which something was brought for others."""

    def __init__(self, exchange: Exchange, below: Restores) -> None:
        self._exchange, self._below = exchange, below
        self._coming: dict[Key, tuple[Name, ...]] = {}
        self.chains = 0
        if below.exist:
            exchange.look_below()

    def turn(self) -> None:
        """After the exchange's turn and before the tiers', which let go of what nobody holds."""
        for key, names in self._exchange.take_lacking():
            if self._below.bring(names):
                self._coming[key] = names
                self.chains += 1
            else:
                self._exchange.computed(key)
        if not self._coming:
            return
        self._exchange.brought()
        for key, names in list(self._coming.items()):
            if not self._below.brings(names):
                del self._coming[key]
                self._exchange.computed(key)
