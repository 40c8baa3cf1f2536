"""The end that wants blocks: it reserves memory, asks, checks what comes, and makes it findable block by block.

A pull ends when everything came, or at its deadline, or when nothing has come for a while, or when computing the rest
looks faster, or with the first wrong byte. One of a prompt that the owner computes first waits for as long as the owner
says that it does. Whatever came right stays; the rest is computed by whoever wanted it. It never waits. Messages go out
through `post`; it knows no sockets, and times are passed in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from afserve.comm.kv.lender import LEASE_SECONDS
from afserve.comm.kv.messages import (
    MOST_NAMES,
    Abort,
    Ack,
    Coming,
    EndTransfer,
    Grant,
    Message,
    Name,
    Payload,
    Piece,
    Prefill,
    Renew,
    Row,
    Want,
    named,
    seeded_checksum,
)
from afserve.comm.kv.split import SplitMember
from afserve.comm.kv.split_messages import Helped, wrap
from afserve.comm.kv.store import BlockStore
from afserve.tiles import PictureTile

STALL_SECONDS = 1.0  # without a block
COMING_SECONDS = 2.0  # without a word of an owner that computes: one step of it may take long
RENEW_SECONDS = LEASE_SECONDS / 6
COMPLETE, CANCELLED = "complete", "cancelled"
Post = Callable[[int, Message], None]


@dataclass(frozen=True, slots=True)
class Pulled:
    """How a pull ended. Of `asked` blocks `received` came, beside `here` that were there before; `why` is COMPLETE or
    what ended it. `seconds` from the first message. Of a prompt that the owner was to compute, the first `known` of the
    received ones were in its cache, and `row` came behind its last token, where all of it was computed there."""

    transfer: int
    request: int
    asked: int
    received: int
    here: int
    bytes: int
    seconds: float
    why: str
    known: int = 0
    row: Payload = b""

    @property
    def complete(self) -> bool:
        return self.why == COMPLETE


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the owner is to compute first: `tokens`, whose blocks are those of the chain that is pulled, in order; the
    last `tail` of them are behind that chain.

    `request` is whose they are here. All `members` compute it together, if there are any. `life` is that of this node,
    which may be asked for what it has of the prompt."""

    tokens: tuple[int, ...]
    request: int = 0
    priority: int = 0
    salt: str = ""
    tenant: str = ""
    share: int = 1
    tail: int = 0
    members: tuple[SplitMember, ...] = ()
    life: int = 0
    tiles: tuple[PictureTile, ...] = ()

    def prefill(self, transfer: int, generation: int, here: int, blocks: int, of: int) -> Prefill:
        """Only the first `blocks` are wanted, of the `of` that all tokens fill; the first `here` of them are here."""
        count = len(self.tokens) if blocks == of else (len(self.tokens) - self.tail) * blocks // of
        asked = self.priority, self.salt, self.tenant, self.share
        tiles = tuple(tile for tile in self.tiles if tile.start < count)
        return Prefill(
            transfer, self.request, generation, self.tokens[:count], *asked, here, self.life, tiles
        )


@dataclass(frozen=True, slots=True)
class Instead:
    """Computing the missing blocks takes `seconds`. What comes is not judged by that before `patience` is over."""

    seconds: float
    patience: float


@dataclass(frozen=True, slots=True)
class Load:
    """What a node that computes prompts said of itself at a time: tokens that are queued, tokens per second."""

    at: float
    queued: int
    rate: float

    def queued_at(self, now: float) -> float:
        """Tokens, if nothing was added since."""
        return max(0.0, self.queued - self.rate * (now - self.at))


@dataclass(slots=True)
class _Pull:
    """`blocks` has the memory for each position that may still come, `held` what came or was here before."""

    peer: int
    transfer: int
    request: int
    names: tuple[Name, ...]
    blocks: dict[int, int]
    held: list[int]
    here: int
    copies: bool
    began: float
    until: float
    progress: float
    renewed: float
    coming: bool = False
    prompt: Name = b""  # what its tokens are `named`, where all of them are computed for it
    row: Payload = b""
    known: int = 0
    received: int = 0
    bytes: int = 0
    instead: Instead | None = None

    def too_slow(self, now: float) -> bool:
        """Whether all of them would take longer at the rate so far than to compute them."""
        took = now - self.began
        other = self.instead
        return (
            other is not None
            and took >= other.patience
            and took * len(self.names) > other.seconds * self.received
        )


@dataclass(slots=True)
class Puller:
    """Ends are in `ended`, for whoever takes them. Peers are numbers of connections; `loads` is what those who compute
    prompts for this node said last."""

    store: BlockStore
    post: Post
    bytes_received: int = 0
    corrupt: int = 0
    ended: list[Pulled] = field(default_factory=list)
    loads: dict[int, Load] = field(default_factory=dict)
    _pulls: dict[int, _Pull] = field(default_factory=dict)
    _numbers: int = 0

    @property
    def busy(self) -> bool:
        return bool(self._pulls)

    def start(
        self,
        peer: int,
        names: Sequence[Name],
        now: float,
        limit: float,
        *,
        request: int = 0,
        generation: int = 0,
        copies: bool = False,
        spare: bool = False,
        prompt: Prompt | None = None,
        instead: Instead | None = None,
    ) -> int:
        """Ask for a chain of blocks, those that are missing here; the number of the transfer. It takes at most `limit`
        seconds, and ends sooner where `instead` is faster. `copies` are kept for others, in `spare` memory alone where
        that is said. The owner computes `prompt` first."""
        self._numbers += 1
        here = self.store.find(names)
        missing = tuple(names[len(here) :][:MOST_NAMES])
        blocks = self.store.reserve(len(missing), copies=copies, spare=spare) if missing else []
        pull = _Pull(
            peer,
            self._numbers,
            request,
            missing[: len(blocks)],
            dict(enumerate(blocks)),
            here,
            len(here),
            copies,
            began=now,
            until=now + limit,
            progress=now,
            renewed=now,
            coming=prompt is not None,
            instead=instead,
        )
        self._pulls[pull.transfer] = pull
        if blocks:
            if prompt is not None:
                reach = len(here) + len(blocks)
                pull.prompt = named(prompt.tokens) if reach == len(names) else b""
                if prompt.members:
                    self.post(peer, wrap(Helped(pull.transfer, prompt.members)))
                self.post(peer, prompt.prefill(pull.transfer, generation, len(here), reach, len(names)))
            self.post(peer, Want(pull.transfer, request, generation, pull.names))
        else:
            self._end(pull, now, "there is no room for its blocks" if missing else COMPLETE)
        return pull.transfer

    def cancel(self, transfer: int, now: float) -> None:
        """Nobody wants it any more."""
        if (pull := self._pulls.get(transfer)) is not None:
            self._give_up(pull, now, CANCELLED)

    def heard(self, peer: int, message: Grant | Piece | EndTransfer | Coming | Row, now: float) -> None:
        """Of a transfer that is over, or was never this peer's, nothing is taken."""
        if isinstance(message, Coming):
            self.loads[peer] = Load(now, message.queued, message.rate)
        pull = self._pulls.get(message.transfer)
        if pull is None or pull.peer != peer:
            if isinstance(message, Piece):
                self.post(peer, Abort(message.transfer))
            return
        match message:
            case Coming(known=known):
                pull.progress, pull.known = now, max(pull.known, known)
            case Grant(_, count):
                pull.progress, pull.coming = now, False
                self._granted(pull, count, now)
            case Piece():
                self._piece(pull, message, now)
            case Row():
                self._row(pull, message)
            case EndTransfer(_, why):
                self._end(pull, now, why or "its owner ended it")

    def lost(self, peer: int, now: float, why: str) -> None:
        """The connection has ended."""
        self.loads.pop(peer, None)
        for pull in [pull for pull in self._pulls.values() if pull.peer == peer]:
            self._end(pull, now, why)

    def tick(self, now: float) -> None:
        for pull in list(self._pulls.values()):
            if now >= pull.until:
                self._give_up(pull, now, f"it took longer than {pull.until - pull.began:.2f} s")
            elif now - pull.progress >= (stall := COMING_SECONDS if pull.coming else STALL_SECONDS):
                self._give_up(pull, now, f"nothing came for {stall:g} s")
            elif pull.too_slow(now):
                self._give_up(pull, now, "computing them is faster")
            elif now - pull.renewed >= RENEW_SECONDS:
                pull.renewed = now
                self.post(pull.peer, Renew(pull.transfer))

    def _granted(self, pull: _Pull, count: int, now: float) -> None:
        """The owner has only the first `count`: the memory for the others is given back."""
        self._free(pull, [position for position in pull.blocks if position >= count])
        self._end_if_all(pull, now)

    def _piece(self, pull: _Pull, piece: Piece, now: float) -> None:
        positions = range(piece.first, piece.first + piece.count)
        names = pull.names[piece.first : piece.first + piece.count]
        if len(names) != piece.count or len(piece.payload) != piece.count * self.store.block_bytes:
            self._wrong(pull, piece, now)
            return
        if all(position in pull.blocks for position in positions):  # otherwise it came before
            blocks = [pull.blocks[position] for position in positions]
            if self.store.fill(blocks, names, piece.payload) != piece.checksum:
                self.store.clear(blocks)
                self._wrong(pull, piece, now)
                return
            for position, block, name in zip(positions, blocks, names, strict=True):
                del pull.blocks[position]
                self.store.publish(block, name)
            pull.held += blocks
            pull.received += piece.count
            pull.bytes += len(piece.payload)
            self.bytes_received += len(piece.payload)
            pull.progress = now
        self.post(pull.peer, Ack(pull.transfer, piece.first, piece.count, piece.slot))
        self._end_if_all(pull, now)

    def _wrong(self, pull: _Pull, piece: Piece, now: float) -> None:
        self.corrupt += 1
        last = piece.first + piece.count - 1
        self._give_up(pull, now, f"blocks {piece.first} to {last} are not what was sent")

    def _row(self, pull: _Pull, row: Row) -> None:
        """Without a right one the end of the prompt is computed here."""
        if not pull.prompt:
            return
        if seeded_checksum(row.payload, pull.prompt) == row.checksum:
            pull.row = row.payload
        else:
            self.corrupt += 1

    def _end_if_all(self, pull: _Pull, now: float) -> None:
        if not pull.blocks:
            whole = pull.received == len(pull.names)
            self._end(pull, now, COMPLETE if whole else "its owner has no more of them")

    def _give_up(self, pull: _Pull, now: float, why: str) -> None:
        self.post(pull.peer, Abort(pull.transfer))
        self._end(pull, now, why)

    def _free(self, pull: _Pull, positions: Sequence[int]) -> None:
        self.store.release([pull.blocks.pop(position) for position in positions])

    def _end(self, pull: _Pull, now: float, why: str) -> None:
        del self._pulls[pull.transfer]
        self._free(pull, list(pull.blocks))
        awaited = not pull.copies and why != CANCELLED
        self.store.release(pull.held[pull.here :], copies=pull.copies, awaited=awaited)
        self.store.release(pull.held[: pull.here], awaited=awaited)
        self.ended.append(
            Pulled(
                pull.transfer,
                pull.request,
                len(pull.names),
                pull.received,
                pull.here,
                pull.bytes,
                now - pull.began,
                why,
                min(pull.known, pull.received),
                pull.row,
            )
        )

    def close(self, now: float) -> None:
        """Let everything go."""
        for pull in list(self._pulls.values()):
            self._end(pull, now, "this node ends")
