"""Prompts that several prefill nodes compute together: who is in, what has come of each layer, and when it is over.

A node that is needed and gone, silent, full, or says what is not right ends it for everybody, at once or at a deadline.
Nothing is lost with it but time: a slice counts for whoever has it, and the lead computes what is missing. A peer sends
at most one chunk before it needs one of this node, so that is what waits here at most. It never waits; times are
passed in, and messages go out through `post`. It knows no cache and no scheduler.
"""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from afserve.comm.kv.messages import Among, Message, Name, Payload, Prefill, named
from afserve.comm.kv.split import LEAD, Split, SplitMember
from afserve.comm.kv.split_messages import (
    Go,
    GroupJoined,
    Helped,
    Here,
    Leave,
    Propose,
    Slice,
    SplitMessage,
    slice_checksum,
    unwrap,
    wrap,
)
from afserve.errors import ProtocolError

log = logging.getLogger("afserve.kv")
JOIN_SECONDS = 0.5  # until all have answered, and until they are told to go
SILENT_SECONDS = 2.0  # without a word of the node that this one waits for
TURN_SECONDS = 20.0  # without a slice: the others may have other prompts first
HERE_SECONDS = SILENT_SECONDS / 4
MOST_AT_ONCE = 4  # prompts at a node: each may keep a chunk of every peer
MOST_HELPED = 1024
_LOW = (1 << 32) - 1
Key = tuple[int, int]  # a peer, and its number of the transfer
Layered = tuple[int, int]  # a layer, and a block's place in the prompt


@dataclass(frozen=True, slots=True)
class Arrived:
    """What has come of a layer: the `whole`, or all up to what part `lacks`, or something `wrong`."""

    whole: bool = False
    lacks: int | None = None
    wrong: str = ""


class SharedPrompt:
    """One prompt at one of the nodes that compute it. `prefill` has this node's tokens. `over` says why no more comes,
    once that is so."""

    def __init__(
        self,
        group: int,
        split: Split,
        members: tuple[SplitMember, ...],
        prefill: Prefill,
        post: Callable[[int, SplitMessage], None],
    ) -> None:
        """`post` takes the part that a message is for."""
        self.group, self.split, self.members, self.prefill = group, split, members, prefill
        self.over = ""
        self.waits_for: int | None = None  # whose part it waits for now
        self.bytes_sent = 0
        self._post = post
        self._come: dict[Layered, tuple[int, Payload]] = {}
        self._places: dict[int, dict[int, int]] = {}  # by layer: blocks from this one on
        self._names: list[Name] = []  # of all tokens up to the end of each chunk

    @property
    def leads(self) -> bool:
        return self.split.mine == LEAD

    def arrived(self, layer: int, tokens: range, block_size: int) -> Arrived:
        """How far this layer of the blocks of these tokens has come. A question: nothing changes."""
        known, at, end = self._places.get(layer, {}), tokens.start // block_size, tokens.stop // block_size
        while at < end and at in known:
            at += known[at]
        if at > end:
            return Arrived(wrong=f"a slice reaches over block {end - 1}, where its chunk ends")
        if at < end:
            return Arrived(lacks=self.split.part_of(self.split.chunk_at(at * block_size)))
        return Arrived(whole=True)

    def wait_for(self, arrived: Arrived) -> None:
        """This node waits for the part that is lacking, or goes on; where what came is wrong, it is over."""
        self.waits_for = arrived.lacks
        if arrived.wrong:
            self.leave(arrived.wrong)

    def take(self, layer: int, blocks: range) -> list[tuple[range, Payload]]:
        """What has come of this layer of these blocks: which they are, and their bytes. Once."""
        found, at = [], blocks.start
        while at < blocks.stop:
            count, payload = self._come.pop((layer, at))
            found.append((range(at, at + count), payload))
            at += count
        return found

    def came(self, slice: Slice) -> None:
        place = slice.layer, slice.first
        if slice.first not in self._places.setdefault(slice.layer, {}):
            self._places[slice.layer][slice.first] = slice.count
            self._come[place] = slice.count, slice.payload

    def is_right(self, slice: Slice) -> bool:
        """Whether it is what was sent, and of this prompt's tokens."""
        if slice.chunk >= self.split.chunks:
            return False
        name = self._name(slice.chunk)
        return slice_checksum(name, slice.layer, slice.first, slice.count, slice.payload) == slice.checksum

    def _name(self, chunk: int) -> Name:
        """Of all tokens up to its end; the split is part of it, and so is who asked."""
        while len(self._names) <= chunk:
            own, tokens = self.split.tokens_of(len(self._names)), self.prefill.tokens
            if self._names:
                self._names.append(named(tokens[own.start : own.stop], self._names[-1]))
            else:
                self._names.append(named((self.group & _LOW, *tokens[: own.stop])))
        return self._names[chunk]

    def send(self, layer: int, blocks: range, tokens: range, payload: Payload) -> None:
        """This layer of these blocks of a chunk, to those who need it."""
        chunk = self.split.chunk_at(tokens.start)
        checksum = slice_checksum(self._name(chunk), layer, blocks.start, len(blocks), payload)
        slice = Slice(self.group, chunk, layer, blocks.start, len(blocks), checksum, payload)
        for part in self.split.takers(chunk):
            self._post(part, slice)
            self.bytes_sent += len(payload)

    def leave(self, why: str) -> None:
        """It is over, and the others are told."""
        if not self.over:
            self.end(why)
            for part in range(self.split.parts):
                if part != self.split.mine:
                    self._post(part, Leave(self.group, why))

    def end(self, why: str) -> None:
        self.over = self.over or why or "it is over"
        self._come.clear()
        self._places.clear()
        self.waits_for = None


@dataclass(slots=True)
class _Group:
    """`heard` says when each part said something, `said` when this one did. It waits `since`, or had a slice then."""

    prompt: SharedPrompt
    peers: dict[int, int]  # by part
    since: float
    said: float
    joined: set[int] = field(default_factory=set)
    heard: dict[int, float] = field(default_factory=dict)
    going: bool = False
    waits: bool = False

    def late(self, now: float) -> str:
        """Why it is over, where it is; a part that was not heard yet was, when this one began to wait for it."""
        if not self.going:
            return "" if now - self.since < JOIN_SECONDS else f"not all have joined within {JOIN_SECONDS:g} s"
        part = self.prompt.waits_for
        if part is None or not self.waits:
            self.waits, self.since = part is not None, now
        if part is None:
            self.heard.clear()
            return ""
        if now - self.heard.setdefault(part, now) >= SILENT_SECONDS:
            return f"nothing was heard of part {part + 1} for {SILENT_SECONDS:g} s"
        return "" if now - self.since < TURN_SECONDS else f"nothing came of a part for {TURN_SECONDS:g} s"


class Sharing:
    """`started` are prompts to begin with, and `ended` those that are over before their end, for whoever takes them
    out. `helped` says who is to compute a peer's prompt. `generation` is this life of the node."""

    def __init__(
        self,
        post: Callable[[int, Message], None],
        dial: Callable[[str], int],
        generation: int,
        block_bytes: int,
    ) -> None:
        self._post, self._dial = post, dial
        self._generation, self._block_bytes = generation, block_bytes
        self._groups: dict[int, _Group] = {}
        self._helped: dict[Key, tuple[SplitMember, ...]] = {}
        self.started: list[SharedPrompt] = []
        self.ended: list[SharedPrompt] = []
        self.bytes_sent = self.bytes_received = 0

    @property
    def busy(self) -> bool:
        return bool(self._groups)

    @property
    def room(self) -> bool:
        return len(self._groups) < MOST_AT_ONCE

    def helped(self, key: Key) -> tuple[SplitMember, ...]:
        return self._helped.pop(key, ())

    def propose(
        self, split: Split, members: tuple[SplitMember, ...], prefill: Prefill, now: float
    ) -> SharedPrompt:
        """As the lead, to the others; it starts when all have joined."""
        number = secrets.randbits(63)
        group = self._open(number, split, members, prefill, now)
        for part in range(1, split.parts):
            theirs = Split(split.tokens, split.start, split.chunk, split.parts, part)
            asked = Prefill(
                prefill.transfer,
                prefill.request,
                members[part].generation,
                prefill.tokens[: theirs.end],
                prefill.priority,
                prefill.salt,
                prefill.tenant,
                prefill.share,
            )
            self._say(group, part, Propose(number, theirs, members[: split.parts], asked))
        return group.prompt

    def close(self, prompt: SharedPrompt) -> None:
        """This node has done its part, or nobody needs it."""
        if (group := self._groups.pop(prompt.group, None)) is not None:
            self.bytes_sent += group.prompt.bytes_sent

    def heard(self, peer: int, among: Among, now: float) -> None:
        try:
            message = unwrap(among, self._block_bytes)
        except ProtocolError as error:
            log.warning("%s; it is not taken", error.message)
            return
        match message:
            case Helped(transfer, members):
                if len(self._helped) == MOST_HELPED:  # their prompts have not come
                    del self._helped[next(iter(self._helped))]
                self._helped[peer, transfer] = members
            case Propose():
                self._proposed(peer, message, now)
            case GroupJoined(number, part):
                self._joined(number, part, now)
            case Go(number):
                self._begin(number, now)
            case Slice():
                self._slice(message, now)
            case Here(number, part):
                if (found := self._groups.get(number)) is not None:
                    found.heard[part] = now
            case Leave(number, why):
                self._over(number, why)

    def lost(self, peer: int, why: str) -> None:
        """The connection has ended."""
        self._helped = {key: members for key, members in self._helped.items() if key[0] != peer}
        for group in [group for group in self._groups.values() if peer in group.peers.values()]:
            group.prompt.leave(f"a node that computes a part is gone: {why}")

    def tick(self, now: float) -> None:
        for group in list(self._groups.values()):
            if not group.prompt.over and (why := group.late(now)):
                group.prompt.leave(why)
            elif group.going and now - group.said >= HERE_SECONDS:
                group.said = now
                for part in group.peers:
                    self._say(group, part, Here(group.prompt.group, group.prompt.split.mine))
        for number in [number for number, group in self._groups.items() if group.prompt.over]:
            self._drop(number)

    def _proposed(self, peer: int, message: Propose, now: float) -> None:
        if message.group in self._groups:
            return  # said twice
        other = message.prefill.generation != self._generation
        if other or not self.room:
            why = f"this is life {self._generation}" if other else f"{MOST_AT_ONCE} prompts are the limit"
            self._post(peer, wrap(Leave(message.group, why)))
            return
        group = self._open(message.group, message.split, message.members, message.prefill, now)
        self._say(group, LEAD, GroupJoined(message.group, message.split.mine))

    def _open(
        self, number: int, split: Split, members: tuple[SplitMember, ...], prefill: Prefill, now: float
    ) -> _Group:
        others = [part for part in range(split.parts) if part != split.mine]
        peers = {part: self._dial(members[part].address) for part in others}

        def post(part: int, message: SplitMessage) -> None:
            self._post(peers[part], wrap(message))

        prompt = SharedPrompt(number, split, members, prefill, post)
        self._groups[number] = _Group(prompt, peers, now, now)
        return self._groups[number]

    def _joined(self, number: int, part: int, now: float) -> None:
        group = self._groups.get(number)
        if group is None or not group.prompt.leads or group.going:
            return
        group.joined.add(part)
        if group.joined >= group.peers.keys():
            for other in group.peers:
                self._say(group, other, Go(number))
            self._begin(number, now)

    def _begin(self, number: int, now: float) -> None:
        group = self._groups.get(number)
        if group is not None and not (group.going or group.prompt.over):
            group.going, group.since = True, now
            self.started.append(group.prompt)

    def _slice(self, slice: Slice, now: float) -> None:
        group = self._groups.get(slice.group)
        if group is None or group.prompt.over:
            return  # said late
        if not group.prompt.is_right(slice):
            group.prompt.leave(f"layer {slice.layer} of block {slice.first} is not what was sent")
            return
        group.since = group.heard[group.prompt.split.part_of(slice.chunk)] = now
        self.bytes_received += len(slice.payload)
        group.prompt.came(slice)

    def _over(self, number: int, why: str) -> None:
        """The lead tells those whom a node that leaves has not reached."""
        group = self._groups.get(number)
        if group is not None and group.prompt.leads:
            group.prompt.leave(why)
        elif group is not None:
            group.prompt.end(why)

    def _drop(self, number: int) -> None:
        group = self._groups.pop(number)
        self.bytes_sent += group.prompt.bytes_sent
        self.ended.append(group.prompt)

    def _say(self, group: _Group, part: int, message: SplitMessage) -> None:
        self._post(group.peers[part], wrap(message))

    def end(self) -> None:
        """This node ends."""
        self._groups.clear()
