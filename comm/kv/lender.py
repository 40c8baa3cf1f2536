"""The end that has the blocks: it holds what it lends until that was acknowledged, or until nobody renews the lease.

A lease is released piece by piece as acknowledgements come. One of a prompt that is still being computed grows: its
blocks are sent as they are filled, and it is granted at the end; so does one of blocks that come from below the cache.
What a request leaves behind is held for a while before anybody has asked for it. Values in, messages out over `wires`;
it knows no sockets, and times are passed in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from afserve.comm.kv.messages import (
    Abort,
    Ack,
    Coming,
    EndTransfer,
    Grant,
    Name,
    Piece,
    Prefill,
    Renew,
    Row,
    Want,
    blocks_of_piece,
    named,
    seeded_checksum,
)
from afserve.comm.kv.store import BlockStore
from afserve.comm.kv.wires import Wires

LEASE_SECONDS = 3.0  # without a word of the puller
PART_SECONDS = 3.0  # from a request leaving until the node that goes on with it must have asked
WINDOW_BYTES = 16 << 20  # sent of a lease and not acknowledged
_LEAST_BYTES = 1 << 19  # of the first piece, so that the other end begins early; the next is twice as large
_DOUBLED = 8  # times at most
_MUCH_BYTES = 2 << 20  # of one lease: to go on at another core costs as much as to copy some 1 MiB
MOST_LEASES = 256
_GROWS_BY = 256  # blocks looked for at a time
Key = tuple[int, int]  # a peer, and its number of the transfer


@dataclass(slots=True)
class _Lease:
    """`held` are the blocks by position that are not acknowledged; those from `next` to `end` are still to be sent.

    One that `grows` may get more than these; the first `known` were there when it was asked for."""

    names: tuple[Name, ...]
    held: dict[int, int]
    until: float
    end: int
    grows: bool = False
    known: int = 0
    since: float = 0.0
    next: int = 0
    pieces: int = 0

    @property
    def under_way(self) -> int:
        return len(self.held) - (self.end - self.next)


@dataclass(slots=True)
class LenderStats:
    """Totals, beside `leases` and `leased`, which are blocks held now, and `oldest`, seconds since the first of these
    leases began."""

    leases: int = 0
    leased: int = 0
    bytes_sent: int = 0
    lapsed: int = 0
    oldest: float = 0.0


@dataclass(slots=True)
class _Parted:
    blocks: list[int]
    until: float


@dataclass(slots=True)
class Lender:
    """`generation` is this life of the node: who asks another one is told so. Peers are numbers of the connections of
    `wires`, over which it says what it says.

    `asked` are prompts to compute and `unwanted` those that nobody waits for any more, for whoever takes them out.
    `queued` tokens and `rate` are what those who wait for a prompt are told. Where this node `looks_below` its cache,
    what is wanted and not there is `lacking`, for whoever brings it there.
    """

    store: BlockStore
    wires: Wires
    generation: int = 0
    bytes_sent: int = 0
    lapsed: int = 0
    queued: int = 0
    rate: float = 0.0
    asked: list[tuple[Key, Prefill]] = field(default_factory=list)
    unwanted: list[Key] = field(default_factory=list)
    looks_below: bool = False
    lacking: list[tuple[Key, tuple[Name, ...]]] = field(default_factory=list)
    _leases: dict[Key, _Lease] = field(default_factory=dict)
    _parted: dict[int, _Parted] = field(default_factory=dict)
    _computing: dict[Key, Name] = field(default_factory=dict)  # what their tokens are `named`

    @property
    def busy(self) -> bool:
        """Whether any block is held for somebody, or will be."""
        return bool(self._leases or self._parted or self._computing)

    @property
    def has_to_send(self) -> bool:
        return any(self._room(key, lease) for key, lease in self._leases.items())

    def stats(self, now: float) -> LenderStats:
        leased = sum(len(lease.held) for lease in self._leases.values())
        leased += sum(len(parted.blocks) for parted in self._parted.values())
        begun = [lease.since for lease in self._leases.values()]
        begun += [parted.until - PART_SECONDS for parted in self._parted.values()]
        oldest = max((now - since for since in begun), default=0.0)
        leases = len(self._leases) + len(self._parted)
        return LenderStats(leases, leased, self.bytes_sent, self.lapsed, oldest)

    def part(self, request: int, names: Sequence[Name], now: float) -> None:
        """This request leaves for another node, which will ask for its blocks by the request's number here."""
        if request not in self._parted and (blocks := self.store.find(names)):
            self._parted[request] = _Parted(blocks, now + PART_SECONDS)

    def heard(self, peer: int, message: Prefill | Want | Ack | Renew | Abort, now: float) -> None:
        key = (peer, message.transfer)
        if isinstance(message, Prefill):
            self._prefill(key, message)
            return
        if isinstance(message, Want):
            self._want(key, message, now)
            return
        if isinstance(message, Abort):
            self._drop(key)
        lease = self._leases.get(key)
        if lease is None:
            return  # it is over: said late, or twice
        lease.until = now + LEASE_SECONDS
        if isinstance(message, Ack):
            self._acknowledged(key, lease, message)
        elif isinstance(message, Abort):
            self._close(key)
        elif lease.grows:
            self.wires.send(peer, Coming(message.transfer, self.queued, round(self.rate), lease.known))

    # ---- prompts that are computed for others

    def grow(self) -> None:
        """What was filled since the last call is lent to whoever waits for it."""
        for key in self._computing:
            if (lease := self._leases.get(key)) is not None:
                self._extend(lease)

    def found(self, key: Key) -> None:
        """What is here of this prompt now was not computed for whoever waits for it."""
        if key in self._computing and (lease := self._leases.get(key)) is not None:
            self._extend(lease)
            lease.known = lease.end
            self.wires.send(key[0], Coming(key[1], self.queued, round(self.rate), lease.known))

    def computed(self, key: Key, row: bytes = b"") -> None:
        """No more of this prompt comes: it is done, with this row behind its last token, or could not be."""
        if key not in self._computing:
            return
        prompt = self._computing.pop(key)
        if (lease := self._leases.get(key)) is not None:
            self._extend(lease)
            lease.grows = False
            if row:
                self.wires.send(key[0], Row(key[1], seeded_checksum(row, prompt), row))
            self.wires.send(key[0], Grant(key[1], lease.end))
            if not lease.held:
                self._close(key)

    def _prefill(self, key: Key, prefill: Prefill) -> None:
        if key in self._computing or key in self._leases:
            return  # said twice
        if self._refuses(key, prefill.generation):
            return
        self._computing[key] = named(prefill.tokens)
        self.asked.append((key, prefill))
        self.wires.send(key[0], Coming(key[1], self.queued, round(self.rate)))

    def _extend(self, lease: _Lease) -> None:
        while found := self.store.find(lease.names[lease.end : lease.end + _GROWS_BY]):
            lease.held.update(enumerate(found, lease.end))
            lease.end += len(found)

    def _drop(self, key: Key) -> None:
        if key in self._computing:
            del self._computing[key]
            self.unwanted.append(key)

    # ---- ends of leases

    def lost(self, peer: int) -> None:
        """The connection has ended."""
        for key in [key for key in self._computing if key[0] == peer]:
            self._drop(key)
        for key in [key for key in self._leases if key[0] == peer]:
            self._close(key)

    def tick(self, now: float) -> None:
        for key in [key for key, lease in self._leases.items() if now >= lease.until]:
            self.lapsed += 1
            self._drop(key)
            self._close(key)
            self.wires.send(
                key[0], EndTransfer(key[1], f"nothing was heard for {LEASE_SECONDS:g} s: the lease is over")
            )
        for request in [request for request, parted in self._parted.items() if now >= parted.until]:
            self.lapsed += 1
            self._release_parted(request)

    def send(self, *, large: bool = False) -> int:
        """One piece of the lease that has waited longest; how many bytes that were, 0 where nothing can be sent. A
        `large` one, if it may be, saves half of the messages and takes twice the time."""
        for key, lease in self._leases.items():
            if self._room(key, lease):
                self._leases[key] = self._leases.pop(key)  # the others first
                return self._send_piece(key, lease, large and self.wires.takes_large(key[0]))
        return 0

    def _want(self, key: Key, want: Want, now: float) -> None:
        if key in self._leases:
            return  # said twice
        if self._refuses(key, want.generation):
            self._drop(key)
            return
        blocks = self.store.find(want.names)
        if self.looks_below and len(blocks) < len(want.names) and key not in self._computing:
            self._computing[key] = b""
            self.lacking.append((key, want.names))
        grows = key in self._computing
        if len(blocks) * self.store.block_bytes >= _MUCH_BYTES:
            self.wires.apart(key[0])
        self._release_parted(want.request)
        if not grows:
            self.wires.send(key[0], Grant(key[1], len(blocks)))
        if blocks or grows:
            held = dict(enumerate(blocks))
            self._leases[key] = _Lease(
                want.names, held, now + LEASE_SECONDS, len(blocks), grows, len(blocks), now
            )
            if grows and blocks:
                self.wires.send(key[0], Coming(key[1], self.queued, round(self.rate), len(blocks)))

    def _refuses(self, key: Key, generation: int) -> bool:
        other = generation != self.generation
        if other or len(self._leases) >= MOST_LEASES:
            why = f"this is life {self.generation}" if other else f"{MOST_LEASES} leases are the limit"
            self.wires.send(key[0], EndTransfer(key[1], f"{why}, compute the tokens again"))
            return True
        return False

    def _room(self, key: Key, lease: _Lease) -> bool:
        most = max(1, WINDOW_BYTES // self.store.block_bytes)
        return lease.next < lease.end and lease.under_way < most and self.wires.has_room(key[0])

    def _send_piece(self, key: Key, lease: _Lease, large: bool) -> int:
        first, size = lease.next, self.store.block_bytes
        least = max(1, (_LEAST_BYTES << min(lease.pieces, _DOUBLED)) // size)
        lease.next = min(lease.end, first + min(least, blocks_of_piece(size, large=large)))
        lease.pieces += 1
        blocks = [lease.held[position] for position in range(first, lease.next)]
        room = self.wires.room(key[0], len(blocks) * size)
        checksum = self.store.take(blocks, lease.names[first : lease.next], room.view)
        self.wires.send(key[0], Piece(key[1], first, len(blocks), checksum, room.view, room.slot))
        self.bytes_sent += len(room.view)
        return len(room.view)

    def _acknowledged(self, key: Key, lease: _Lease, ack: Ack) -> None:
        """What was not sent yet cannot be acknowledged."""
        sent = range(ack.first, min(ack.first + ack.count, lease.next))
        self.store.release([lease.held.pop(position) for position in sent if position in lease.held])
        if not (lease.held or lease.grows):
            self._close(key)

    def _close(self, key: Key) -> None:
        self.store.release(list(self._leases.pop(key).held.values()))

    def _release_parted(self, request: int) -> None:
        if (parted := self._parted.pop(request, None)) is not None:
            self.store.release(parted.blocks)

    def close(self) -> None:
        """Let everything go."""
        self._computing.clear()
        for key in list(self._leases):
            self._close(key)
        for request in list(self._parted):
            self._release_parted(request)
