"""Which attention nodes a gateway may use: what the controller says of them, beside the streams that are open.

A node is used while the controller names its life and that life has a stream. A stream that only broke has a grace to
come back in; a life that is named no more is lost at once. It knows no requests; times are passed in.
"""

from typing import Protocol

from afserve.comm.kv.source import KvSource
from afserve.control.copies import buddies
from afserve.control.wire.request_values import ToAttention
from afserve.control.wire.values import AttentionNodes, AttentionPeer
from afserve.errors import RendezvousError
from afserve.member import AttentionPhase, Life

LAST_GRACE = 10.0  # seconds for a broken stream to come back where no other node takes its requests


class Attending(Protocol):
    """One stream of an attention node, as its gateway's end. `number` counts those of one life."""

    life: Life
    number: int

    def send(self, value: ToAttention) -> None: ...


class Attendance:
    """`grace` in seconds is what a broken stream may take to come back."""

    def __init__(self, grace: float) -> None:
        self.refusing = ""
        self._grace = grace
        self._told: dict[int, AttentionPeer] = {}
        self._streams: dict[int, Attending] = {}
        self._latest: dict[
            int, tuple[int, int]
        ] = {}  # generation and number of the last stream that was let in
        self._broken: dict[Life, float] = {}  # when

    def update_peers(self, value: AttentionNodes) -> None:
        self.refusing = value.refusing
        self._told = {peer.life.index: peer for peer in value.nodes}

    def entered(self, stream: Attending) -> None:
        """It takes the place of an earlier stream. Raises RendezvousError where a later life or stream is known."""
        life, peer = stream.life, self._told.get(stream.life.index)
        generation, number = self._latest.get(life.index, (0, -1))
        newest = generation if peer is None else max(generation, peer.life.generation)
        if newest > life.generation:
            raise RendezvousError(
                f"{life} has a newer life ({newest}) than yours ({life.generation}); start it anew"
            )
        if (generation, number) >= (life.generation, stream.number):
            raise RendezvousError(f"{life} has opened a newer stream ({number}) than this ({stream.number})")
        self._latest[life.index] = life.generation, stream.number
        self._streams[life.index] = stream
        self._broken.pop(life, None)

    def note_left(self, stream: Attending, now: float) -> None:
        """Nothing where another stream has taken its place."""
        if self.is_present(stream):
            del self._streams[stream.life.index]
            self._broken[stream.life] = now

    def is_present(self, stream: Attending) -> bool:
        """What an earlier stream of the same node still says is nobody's."""
        return self._streams.get(stream.life.index) is stream

    def stream(self, life: Life) -> Attending | None:
        found = self._streams.get(life.index)
        return found if found is not None and found.life == life else None

    def open_streams(self) -> list[Attending]:
        """All streams that are open."""
        return list(self._streams.values())

    def usable(self) -> list[Life]:
        """Those that may be given requests."""
        lives = (peer.life for peer in self._told.values() if peer.accepting)
        return [life for life in lives if self.stream(life) is not None]

    def decoders(self) -> list[Life]:
        """Those of `usable` that requests go to: prefill nodes only where there are no others."""
        usable = self.usable()
        others = [life for life in usable if self._told[life.index].phase is not AttentionPhase.PREFILL]
        return others or usable

    def prefilling(self, home: Life) -> list[AttentionPeer]:
        """Those of `usable` that compute prompts for this node; none for one that does not only decode."""
        if self._told[home.index].phase is not AttentionPhase.DECODE:
            return []
        found = (self._told[life.index] for life in self.usable())
        return [peer for peer in found if peer.phase is AttentionPhase.PREFILL and peer.address]

    def peer(self, life: Life) -> AttentionPeer | None:
        """What the controller says of this life, if it still names it."""
        peer = self._told.get(life.index)
        return peer if peer is not None and peer.life == life else None

    def kv_at(self, life: Life, request: int = 0) -> KvSource | None:
        """This node's blocks, of that request or of any. Whether to pull or to compute them is the home's choice."""
        peer = self.peer(life)
        return KvSource(life, request, peer.address) if peer and peer.address else None

    def buddies(self, life: Life, copies: int) -> list[AttentionPeer]:
        """Those that keep copies of what this life had."""
        return buddies(self._told.values(), life.index, copies)

    def is_draining(self, life: Life) -> bool:
        peer = self._told.get(life.index)
        return peer is not None and not peer.accepting

    def why_lost(self, life: Life, now: float) -> str:
        """Why what it has must go on elsewhere; empty where it may stay."""
        peer = self._told.get(life.index)
        if peer is None or peer.life != life:
            return "the controller lost it"
        if (stream := self._streams.get(life.index)) is not None:
            return "" if stream.life == life else "it was started anew"
        away = now - self._broken.get(life, now)
        # With no other node its requests could only wait, and lose what has been computed of them.
        grace = self._grace if self.usable() else max(self._grace, LAST_GRACE)
        return f"its stream broke and did not come back for {away:.1f} s" if away >= grace else ""

    @property
    def waited_for(self) -> bool:
        """Whether time alone may lose a node: a stream is away."""
        return bool(self._broken)

    def forget_streams(self, now: float) -> None:
        """Streams that have been away for long are not looked at any more."""
        kept = 2 * max(self._grace, LAST_GRACE)
        self._broken = {life: at for life, at in self._broken.items() if now - at < kept}

    def unattended(self) -> list[int]:
        """Nodes that accept requests and have no stream."""
        usable = {life.index for life in self.usable()}
        return sorted(index for index, peer in self._told.items() if peer.accepting and index not in usable)
