"""Tells gateways which beginnings of prompts are in this node's cache: all of them once, then what changed each second.

A gateway that begins, or has lost its stream, knows what to route by within a second. It knows no tokens.
"""

from collections.abc import Iterator, Mapping, Sequence

from afserve.adviser import Adviser
from afserve.clock import Clock, MonotonicClock
from afserve.control.node.gateways import GatewayStreams
from afserve.control.wire.request_values import Prefixes
from afserve.engine.kv.prefix_keys import HeldPrefixes

SECONDS = 1.0  # between two messages with what changed
MOST_KEYS = 1 << 13  # of one message: 64 KiB


class PrefixTeller:
    def __init__(self, held: HeldPrefixes, streams: GatewayStreams, clock: Clock | None = None) -> None:
        self._held, self._streams, self._clock = held, streams, clock or MonotonicClock()
        self._told: Mapping[int, int] = {}  # by gateway, the life of the stream that was told everything
        self._said = self._clock.now()
        self._advice = Adviser("telling gateways what is cached here")

    def look(self) -> None:
        """Once per turn of the node's loop, between two steps. Who is told everything has then heard all that others
        have: what changes later is said of that."""
        now = self._clock.now()
        self._advice.ask(now, lambda: self._look(now), None)

    def _look(self, now: float) -> None:
        lives = self._streams.lives()
        if lives == self._told and now - self._said < SECONDS:
            return
        new = [gateway for gateway, life in lives.items() if self._told.get(gateway) != life]
        if self._held.changed:
            came, went = self._held.take()
            for said in _parts(came, went):
                for gateway in lives.keys() - set(new):
                    self._streams.send(gateway, said)
        self._said = now
        self._told = lives
        self._tell_all(new)

    def _tell_all(self, gateways: Sequence[int]) -> None:
        keys = self._held.all() if gateways else []
        for gateway in gateways:
            self._streams.send(gateway, Prefixes(tuple(keys[:MOST_KEYS]), anew=True))
            for said in _parts(keys[MOST_KEYS:], ()):
                self._streams.send(gateway, said)


def _parts(came: Sequence[int], went: Sequence[int]) -> Iterator[Prefixes]:
    for at in range(0, len(went), MOST_KEYS):
        yield Prefixes((), tuple(went[at : at + MOST_KEYS]))
    for at in range(0, len(came), MOST_KEYS):
        yield Prefixes(tuple(came[at : at + MOST_KEYS]))
