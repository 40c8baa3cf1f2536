"""An attention node's expert nodes: those that the controller names are dialled, and those that are stuck reported.

A node that has left, or has another life, is lost to the link at once. One that the link has lost by itself is dialled
again: the network between the two may have been cut for a moment. It knows no rows.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from afserve.clock import Clock, MonotonicClock
from afserve.comm.transport import Dialled
from afserve.control.wire.values import ExpertPeer, Peers, Stuck
from afserve.errors import AfserveError

_AGAIN_SECONDS = 0.25  # between two attempts to reach one

if TYPE_CHECKING:
    from afserve.engine.attention_node import AttentionNode


@dataclass(frozen=True, slots=True)
class Reached:
    """Delivered to the node's inbox by the thread that dialled. `dialled` None: nobody answered."""

    peer: ExpertPeer
    dialled: Dialled | None


def in_a_thread(dial: Callable[[], None]) -> None:
    threading.Thread(target=dial, name="dial", daemon=True).start()


class ExpertPeers:
    """All calls but those of `deliver` come from the node's own thread. `first` are those that it began with.

    `spawn` runs what takes long beside the node.
    """

    def __init__(
        self,
        node: "AttentionNode[Any]",
        first: Peers,
        silence: float,
        deliver: Callable[[Reached], None],
        send: Callable[[Stuck], None],
        clock: Clock | None = None,
        spawn: Callable[[Callable[[], None]], None] = in_a_thread,
    ) -> None:
        self._spawn = spawn
        self._node, self._deliver, self._send = node, deliver, send
        self._clock = clock or MonotonicClock()
        self._silence = silence
        self._known = {peer.life.index: peer for peer in first.experts}
        self._dialling: set[ExpertPeer] = set()
        self._absent: dict[ExpertPeer, float] = {}  # since when there is no connection
        self._missed: set[ExpertPeer] = set()  # of those: who did not take one
        self._due = self._clock.now()

    def update(self, peers: Peers) -> None:
        """From now on these."""
        known, self._known = self._known, {peer.life.index: peer for peer in peers.experts}
        for index, before in known.items():
            if self._known.get(index) != before:
                self._came(before)
                self._node.lose(index, "the controller has lost it")
        self._dial_missing()

    def reached(self, value: Reached) -> None:
        """What became of a dial; of an earlier life nothing."""
        peer = value.peer
        self._dialling.discard(peer)
        wanted = self._known.get(peer.life.index) == peer
        if value.dialled is None:
            if wanted:
                self._missed.add(peer)
        elif wanted and peer.life.index not in self._node.present:
            self._came(peer)
            self._node.attach(value.dialled)
        else:
            value.dialled.close()

    def look(self) -> None:
        """Called once per turn of the loop; most calls only look at the clock."""
        now = self._clock.now()
        if now < self._due:
            return
        self._due = now + min(self._silence / 4, _AGAIN_SECONDS)
        self._dial_missing()
        for index, seconds in self._node.owing().items():
            if seconds >= self._silence and index in self._known:
                self._send(Stuck(self._known[index].life, seconds))
        for peer in self._missed:
            if (seconds := now - self._absent[peer]) >= self._silence:
                self._send(Stuck(peer.life, seconds, unreachable=True))

    def _came(self, peer: ExpertPeer) -> None:
        """Or it is not waited for any more."""
        self._absent.pop(peer, None)
        self._missed.discard(peer)

    def _dial_missing(self) -> None:
        present = self._node.present
        for index, peer in self._known.items():
            if index not in present:
                self._absent.setdefault(peer, self._clock.now())
                if peer not in self._dialling:
                    self._dialling.add(peer)
                    self._spawn(partial(self._dial, peer))

    def _dial(self, peer: ExpertPeer) -> None:
        """Beside the node. Who is not reached is dialled again, and the controller is told for how long."""
        try:
            dialled: Dialled | None = self._node.dial(peer.life.index, peer.address, 2 * self._silence)
        except AfserveError:
            dialled = None
        self._deliver(Reached(peer, dialled))
