"""A node's part in moving KV blocks: pulls what it needs, lends what others ask for, keeps copies for others.

`turn` is called by the thread that steps the node, between two steps, and copies no longer than it is told to. Sockets
are read and written beside it (`socket_wires`). It knows no requests but their numbers.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from afserve.clock import Clock
from afserve.comm.kv.lender import Key, Lender
from afserve.comm.kv.messages import (
    Abort,
    Ack,
    Among,
    Coming,
    CopiesKept,
    EndTransfer,
    Grant,
    HandOn,
    Name,
    Offer,
    Piece,
    Prefill,
    Renew,
    Row,
    Want,
)
from afserve.comm.kv.puller import Instead, Load, Prompt, Pulled, Puller
from afserve.comm.kv.sharing import SharedPrompt, Sharing
from afserve.comm.kv.split import Split, SplitMember
from afserve.comm.kv.store import BlockStore
from afserve.comm.kv.wires import Closed, Event, PeerMessage, Wires

LINGERS = 0.002  # seconds without anything new, then it sleeps: to be woken may take as long
OFFER_SECONDS = 2.0  # until an offer that nobody answered is over, and for the pull that answers it


@dataclass(frozen=True, slots=True)
class ExchangeStats:
    """Totals, beside `leases` and `leased`, which are leases and blocks of them held now, and `oldest`, the age of the
    oldest one in seconds."""

    bytes_sent: int = 0
    bytes_received: int = 0
    leases: int = 0
    leased: int = 0
    lapsed: int = 0
    corrupt: int = 0
    oldest: float = 0.0


class Exchange:
    """`generation` is this life of the node. Ends of pulls are in `ended` and answers to offers, (offer, blocks kept),
    in `settled`, for whoever takes them out."""

    def __init__(self, store: BlockStore, wires: Wires, clock: Clock, generation: int = 0) -> None:
        self._wires, self._clock, self._generation = wires, clock, generation
        self._lender = Lender(store, wires, generation)
        self._puller = Puller(store, wires.send)
        self.sharing = Sharing(wires.send, self._peer, generation, store.block_bytes)
        self._peers: dict[str, int] = {}
        self._events: deque[Event] = deque()
        self._offers: dict[int, tuple[int, float]] = {}  # peer, until
        self._keeping: dict[int, tuple[int, int]] = {}  # own transfer -> whose offer, its number
        self._inherited: dict[
            int, Sequence[tuple[Name, int]]
        ] = {}  # own transfer -> blocks of one that leaves
        self.on_inherited: Callable[[Sequence[tuple[Name, int]]], None] = lambda blocks: None
        self._offered = 0
        self.ended: list[Pulled] = []
        self.settled: list[tuple[int, int]] = []

    # ---- what the node wants

    def pull(
        self,
        address: str,
        names: Sequence[Name],
        limit: float,
        *,
        request: int,
        generation: int,
        prompt: Prompt | None = None,
        members: tuple[SplitMember, ...] = (),
        instead: Instead | None = None,
    ) -> int:
        """Get a chain of blocks from the node at `address`, in that life of it, where `request` has left them, or where
        `prompt` is computed for them, by all `members` together if there are any; the transfer's number. It ends within
        `limit` seconds, and sooner where `instead` is faster."""
        peer = self._peer(address)
        now = self._clock.now()
        asked = prompt and replace(prompt, members=members, life=self._generation)
        return self._puller.start(
            peer, names, now, limit, request=request, generation=generation, prompt=asked, instead=instead
        )

    def load(self, address: str) -> Load | None:
        """What the node at `address` said last of the prompts that it computes; None while it has not."""
        return self._puller.loads.get(self._peers.get(address, 0))

    def cancel(self, transfer: int) -> None:
        self._puller.cancel(transfer, self._clock.now())

    def part(self, request: int, names: Sequence[Name]) -> None:
        """This request leaves for another node: hold its blocks until that one asks for them, or does not."""
        self._lender.part(request, names, self._clock.now())

    def offer(self, address: str, names: Sequence[Name]) -> int:
        """Ask the node at `address` to keep copies of a part of a chain; the offer's number. It always settles."""
        peer = self._new_offer(address)
        self._wires.send(peer, Offer(self._offered, self._generation, tuple(names)))
        return self._offered

    def hand_on(self, address: str, blocks: Sequence[tuple[Name, int]]) -> int:
        """As `offer`, of a node that leaves, with the keys of beginnings; into free memory only. Who takes them says so
        by `on_inherited`."""
        peer = self._new_offer(address)
        self._wires.send(peer, HandOn(self._offered, self._generation, tuple(blocks)))
        return self._offered

    def _new_offer(self, address: str) -> int:
        self._offered += 1
        peer = self._peer(address)
        self._offers[self._offered] = peer, self._clock.now() + OFFER_SECONDS
        return peer

    # ---- prompts that this node computes for others

    def take_asked(self) -> list[tuple[Key, Prefill]]:
        """Prompts to compute from now on; `computed` is said of each once, unless it was unwanted before."""
        asked, self._lender.asked = self._lender.asked, []
        return asked

    def take_unwanted(self) -> list[Key]:
        """Prompts that nobody waits for any more."""
        unwanted, self._lender.unwanted = self._lender.unwanted, []
        return unwanted

    def look_below(self) -> None:
        """From now on whoever wants blocks that are not here may get them from below the cache: see `take_lacking`."""
        self._lender.looks_below = True

    def take_lacking(self) -> list[tuple[Key, tuple[Name, ...]]]:
        """Chains that are wanted and not whole in the cache; `brought` is said while they come, `computed` once."""
        lacking, self._lender.lacking = self._lender.lacking, []
        return lacking

    def brought(self) -> None:
        """Blocks may have come into the cache: they are sent."""
        self._lender.grow()

    def computing(self, queued: int, rate: float) -> None:
        """Blocks may have been filled: they are sent. `queued` tokens at `rate` per second are before whoever asks."""
        self._lender.queued, self._lender.rate = queued, rate
        self._lender.grow()

    def fetch(self, key: Key, names: Sequence[Name], limit: float, generation: int) -> int:
        """Get a beginning that whoever asked for this prompt has, in that life of it; the transfer's number, as of
        `pull`."""
        return self._puller.start(key[0], names, self._clock.now(), limit, generation=generation)

    def found(self, key: Key) -> None:
        """What is here of this prompt was not computed for it."""
        self._lender.found(key)

    def computed(self, key: Key, row: bytes = b"") -> None:
        """`row` is behind its last token, where it was computed to the end."""
        self._lender.computed(key, row)

    def helped(self, key: Key) -> tuple[SplitMember, ...]:
        """Who is to compute this prompt together; nobody where this node does alone."""
        return self.sharing.helped(key)

    def propose(self, split: Split, members: tuple[SplitMember, ...], prefill: Prefill) -> SharedPrompt:
        return self.sharing.propose(split, members, prefill, self._clock.now())

    # ---- turns

    @property
    def lending(self) -> bool:
        """Whether blocks are held for somebody."""
        return self._lender.busy

    @property
    def eager(self) -> bool:
        """Whether `turn` has something to do at once."""
        return bool(self._events) or self._wires.kept or self._lender.has_to_send

    @property
    def busy(self) -> bool:
        """Whether time alone may end anything: then `turn` is to be called several times a second."""
        waits = self._lender.busy or self._puller.busy or self._offers or self.sharing.busy
        return bool(waits or self._events or self._puller.ended)

    def turn(self, seconds: float, *, lingers: bool = False) -> None:
        """Take what has arrived and send what is due: at least one piece of each, then until so much time is over. Who
        `lingers` has nothing else to do, and waits here for the next ones while blocks move."""
        until = self._clock.now() + seconds
        moved = self._take_some(until, keep=lingers)
        if lingers:
            self._linger(until)
        if not (moved or self.busy):
            return
        if not self._events:  # what has arrived and was not looked at yet is not late
            self._tick(self._clock.now())
        self._settle()

    def _linger(self, until: float) -> None:
        """This thread itself sees what comes. Until nothing more does, or time is over: then it is eager."""
        gives_up = self._clock.now() + LINGERS
        while self._wires.kept and self._moves and not self._puller.ended:
            if (now := self._clock.now()) >= until:
                return
            if self._take_some(until, keep=True):
                gives_up = now + LINGERS
            elif now >= gives_up:
                break
            else:
                self._wires.give_way()
        self._wires.leave()

    @property
    def _moves(self) -> bool:
        return self._lender.busy or self._puller.busy

    def _take_some(self, until: float, *, keep: bool) -> bool:
        """Whether anything had arrived, or was sent."""
        self._events += self._wires.receive(keep)
        moved = bool(self._events) or self._wires.moving
        now = self._clock.now()
        while self._events:
            event = self._events.popleft()
            self._take(event, now)
            if isinstance(event, PeerMessage):
                self._wires.used(event)
            if (now := self._clock.now()) >= until:
                break
        while self._lender.send(large=keep):
            moved = True
            if self._clock.now() >= until:
                break
        return moved

    def _tick(self, now: float) -> None:
        self._lender.tick(now)
        self._puller.tick(now)
        self.sharing.tick(now)
        for offer in [offer for offer, (_, until) in self._offers.items() if now >= until]:
            self._offer_over(offer, 0)

    def _take(self, event: Event, now: float) -> None:
        if isinstance(event, Closed):
            self._closed(event.peer, event.why, now)
            return
        peer = event.peer
        match event.message:
            case Prefill() | Want() | Ack() | Renew() | Abort() as said:
                self._lender.heard(peer, said, now)
            case Grant() | Piece() | EndTransfer() | Coming() | Row() as said:
                self._puller.heard(peer, said, now)
            case Among() as said:
                self.sharing.heard(peer, said, now)
            case Offer(number, generation, names):
                transfer = self._puller.start(
                    peer, names, now, OFFER_SECONDS, generation=generation, copies=True
                )
                self._keeping[transfer] = peer, number
            case HandOn(number, generation, blocks):
                chain = [name for name, _ in blocks]
                transfer = self._puller.start(
                    peer, chain, now, OFFER_SECONDS, generation=generation, copies=True, spare=True
                )
                self._keeping[transfer], self._inherited[transfer] = (peer, number), blocks
            case CopiesKept(number, count):
                if self._offers.get(number, (None,))[0] == peer:
                    self._offer_over(number, count)

    def _closed(self, peer: int, why: str, now: float) -> None:
        self._peers = {address: known for address, known in self._peers.items() if known != peer}
        self._lender.lost(peer)
        self._puller.lost(peer, now, why)
        self.sharing.lost(peer, why)
        for offer in [offer for offer, (to, _) in self._offers.items() if to == peer]:
            self._offer_over(offer, 0)

    def _settle(self) -> None:
        """Pulls have ended: those for others are told to them."""
        for pulled in self._puller.ended:
            if (kept_for := self._keeping.pop(pulled.transfer, None)) is None:
                self.ended.append(pulled)
            else:
                kept = pulled.here + pulled.received
                self._wires.send(kept_for[0], CopiesKept(kept_for[1], kept))
                self.on_inherited(self._inherited.pop(pulled.transfer, ())[:kept])
        self._puller.ended.clear()

    def _offer_over(self, offer: int, count: int) -> None:
        del self._offers[offer]
        self.settled.append((offer, count))

    def _peer(self, address: str) -> int:
        if address not in self._peers:
            self._peers[address] = self._wires.dial(address)
        return self._peers[address]

    def stats(self) -> ExchangeStats:
        lender, puller = self._lender.stats(self._clock.now()), self._puller
        return ExchangeStats(
            lender.bytes_sent + self.sharing.bytes_sent,
            puller.bytes_received + self.sharing.bytes_received,
            lender.leases,
            lender.leased,
            lender.lapsed,
            puller.corrupt,
            lender.oldest,
        )

    def close(self) -> None:
        """Let all blocks go and end all connections."""
        self._lender.close()
        self._puller.close(self._clock.now())
        self.sharing.end()
        self._wires.close()
