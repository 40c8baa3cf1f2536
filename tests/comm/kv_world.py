"""Nodes that exchange KV blocks over wires that lose, repeat, reorder, corrupt and end: seeded, on a fake clock.

The exchange and the pool of blocks are the real ones. A block's right content follows from its name, so a wrong one is
seen where it is published.
"""

import hashlib
import random
from collections import Counter, deque
from typing import Any, Protocol

from afserve.clock import FakeClock
from afserve.comm.disk.record import checksum_of as block_checksum
from afserve.comm.kv import wires
from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.forms import decode, decode_head, encode
from afserve.comm.kv.messages import Offer, Want, checksum_of
from afserve.comm.kv.puller import Prompt
from afserve.comm.kv.rooms import Room
from afserve.comm.kv.wires import Closed, PeerMessage
from afserve.engine.kv.blocks import BlockPool, block_hash
from afserve.errors import ProtocolError

BLOCK = 64
LIMIT, GAP = 2.0, 0.1  # seconds: of a pull, and between two turns of a node


def content(name: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=BLOCK).digest()


def row_of(tokens) -> bytes:
    return hashlib.blake2b(repr(tuple(tokens)).encode(), digest_size=24).digest()


def chain(prompt: int, length: int) -> list[bytes]:
    return named(tokens_of(prompt, length))


def tokens_of(prompt: int, length: int) -> tuple[int, ...]:
    """Two fill a block."""
    return tuple(token for number in range(length) for token in (prompt, number))


def named(tokens: tuple[int, ...]) -> list[bytes]:
    names, parent = [], b"root"
    for at in range(0, len(tokens) - 1, 2):
        parent = block_hash(parent, tokens[at : at + 2])
        names.append(parent)
    return names


class Store:
    """A `BlockStore` over a real pool, whose memory is a table."""

    block_bytes = BLOCK

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, 1)
        self.memory: dict[int, bytes] = {}
        self.held: Counter[int] = Counter()

    def find(self, names):
        found = self.pool.match(names)
        self.pool.hold(found)
        self.held.update(found)
        return found

    def reserve(self, count, *, copies, spare=False):
        taken = self.pool.allocate(min(count, self.pool.free if spare else self.pool.available))
        self.held.update(taken)
        for block in taken:
            self.memory[block] = b"?" * BLOCK
        return taken

    def release(self, blocks, *, copies=False, awaited=False):
        self.held.subtract(blocks)
        assert min(self.held.values(), default=0) >= 0, "released twice"
        self.pool.release(blocks, copies=copies, awaited=awaited)

    def publish(self, block, name):
        assert self.memory[block] == content(name), "a wrong block was published"
        self.pool.publish(block, name)

    def take(self, blocks, names, into):
        assert all(self.held[block] for block in blocks), "read without a hold"
        into[:] = b"".join(self.memory[block] for block in blocks)
        return self.checksum(names, into)

    def fill(self, blocks, names, payload):
        assert all(self.held[block] for block in blocks), "written without a hold"
        raw = bytes(payload)
        assert len(raw) == BLOCK * len(blocks)
        for at, block in enumerate(blocks):
            self.memory[block] = raw[at * BLOCK : (at + 1) * BLOCK]
        return self.checksum(names, raw)

    def clear(self, blocks):
        for block in blocks:
            self.memory[block] = bytes(BLOCK)

    @staticmethod
    def checksum(names, raw):
        return checksum_of(
            [block_checksum(name, raw[at * BLOCK : (at + 1) * BLOCK]) for at, name in enumerate(names)]
        )

    def compute(self, names) -> None:
        """As a request that computes its prompt: what is missing is allocated, written and published."""
        held = self.find(names)
        rest = names[len(held) :]
        if len(rest) <= self.pool.available:
            new = self.reserve(len(rest), copies=False)
            for block, name in zip(new, rest, strict=True):
                self.memory[block] = content(name)
                self.publish(block, name)
            held = held + new
        self.release(held)


class Link:
    """One connection between two ends (node, its number of the peer); what is under way, each way."""

    def __init__(self, caller, called) -> None:
        self.ends = [caller, called]
        self.under_way: list[deque[Any]] = [deque(), deque()]  # to the called, to the caller
        self.closed = [False, False]
        self.dead = False


class Addressed(Protocol):
    address: str


class Wires(wires.Wires):
    """A node's `Wires`: peers are links of the world."""

    def __init__(self, world: "World", node: Addressed) -> None:
        self.world, self.node = world, node
        self.links: dict[int, tuple[Link, int]] = {}  # by peer: the link, and which end this is
        self.events: list[PeerMessage | Closed] = []
        self.numbers = 0

    def join(self, link: Link, end: int) -> int:
        self.numbers += 1
        self.links[self.numbers] = link, end
        return self.numbers

    def dial(self, address: str) -> int:
        owner = self.world.at(address)
        if owner is None or self.world.dice.random() < self.world.faulty / 2:
            self.numbers += 1
            self.events.append(Closed(self.numbers, "nobody answers"))
            return self.numbers
        link = Link(None, None)
        peer = self.join(link, 0)
        link.ends = [(self, peer), (owner.wires, owner.wires.join(link, 1))]
        self.world.links.append(link)
        return peer

    def send(self, peer: int, message) -> None:
        link, end = self.links.get(peer, (None, 0))
        if link is not None and not link.dead:
            head, body = encode(message)
            self.world.carry(link.under_way[end], bytearray(head), bytearray(body))

    def has_room(self, peer: int) -> bool:
        return True

    def takes_large(self, peer: int) -> bool:
        return bool(peer % 2)

    def room(self, peer: int, size: int) -> Room:
        return Room(memoryview(bytearray(size)))

    def used(self, said: PeerMessage) -> None:
        self.world.happened["used"] += 1

    kept = moving = False

    def receive(self, keep=False):
        events, self.events = self.events, []
        return events

    def leave(self) -> None:
        self.world.happened["left"] += 1

    give_way = leave

    def apart(self, peer: int) -> None:
        self.world.happened["apart"] += 1

    def close(self) -> None:
        for link, end in self.links.values():
            link.dead = link.closed[end] = True


class Node:
    def __init__(self, world: "World", index: int, generation: int) -> None:
        self.address, self.generation = f"{index}.{generation}", generation
        self.index = index
        self.store, self.wires = Store(world.dice.choice((12, 40))), Wires(world, self)
        self.exchange = Exchange(self.store, self.wires, world.clock, generation)
        self.world = world
        self.pulls: dict[int, tuple[float, list[bytes], tuple[int, ...]]] = {}
        self.offers: set[int] = set()
        self.prompts: dict[tuple[int, int], tuple[list[bytes], int]] = {}  # to compute, and how far it is
        self.rows: dict[tuple[int, int], bytes] = {}
        self.fetches: dict[int, tuple[tuple[int, int], list[bytes]]] = {}  # by transfer
        self.turned = world.clock.now()

    def compute_prompts(self) -> None:
        """As a node that computes prompts for others: a block of each per turn, and some are refused. What whoever asks
        has of it may be fetched first."""
        for key, prefill in self.exchange.take_asked():
            names = named(prefill.tokens)
            self.rows[key] = row_of(prefill.tokens)
            if (wanted := names[: prefill.here]) and self.world.dice.random() < 0.5:
                self.fetches[self.exchange.fetch(key, wanted, LIMIT, prefill.life)] = key, names
            else:
                self.prompts[key] = names, 0
        for key in self.exchange.take_unwanted():
            self.prompts.pop(key, None)
            for transfer in [at for at, (asked, _) in self.fetches.items() if asked == key]:
                del self.fetches[transfer]
                self.exchange.cancel(transfer)
        for key, (names, done) in list(self.prompts.items()):
            self.store.compute(names[: done + 1])
            self.prompts[key] = names, done + 1
        self.exchange.computing(len(self.prompts), 7.5)
        for key, (names, done) in list(self.prompts.items()):
            if done >= len(names) or self.world.dice.random() < 0.02:
                del self.prompts[key]
                self.exchange.computed(key, self.rows[key] if done >= len(names) else b"")
                self.world.happened["computed for another"] += 1

    def turn(self, seconds: float) -> None:
        self.turned = self.world.clock.now()
        self.compute_prompts()
        self.exchange.turn(seconds)
        for pulled in self.exchange.ended:
            if (fetched := self.fetches.pop(pulled.transfer, None)) is not None:
                self.prompts[fetched[0]] = fetched[1], 0
                self.exchange.found(fetched[0])
                self.world.happened["fetched from who asked"] += pulled.complete and pulled.received > 0
            if pulled.transfer not in self.pulls:
                continue
            began, names, tokens = self.pulls.pop(pulled.transfer)
            assert pulled.row in (b"", row_of(tokens)), "a row of another prompt"
            self.world.happened["row"] += bool(pulled.row)
            assert self.turned - began <= LIMIT + 2 * GAP, "it waited too long"
            self.world.happened["complete" if pulled.complete else "partial"] += 1
            self.store.compute(names)  # the rest, as the request does that wanted them
        self.exchange.ended.clear()
        for offer, _ in self.exchange.settled:
            self.offers.remove(offer)
        self.exchange.settled.clear()


class World:
    block_bytes = BLOCK

    def __init__(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        self.clock = FakeClock(50.0)
        self.faulty = dice.choice((0.0, 0.05, 0.25))
        self.nodes: list[Any] = [Node(self, index, 0) for index in range(dice.choice((2, 3)))]
        self.links: list[Link] = []
        self.happened: Counter[str] = Counter()
        self.requests = 0
        self.known = {name for prompt in range(6) for name in chain(prompt, 9)}

    def at(self, address: str) -> Node | None:
        return next((node for node in self.nodes if node.address == address), None)

    # ---- the wire

    def carry(self, queue, head: bytearray, body: bytearray) -> None:
        roll = self.dice.random() / max(self.faulty, 1e-9)
        if roll < 0.2:
            self.happened["dropped"] += 1
            return
        if roll < 0.4 and queue:
            queue.insert(self.dice.randrange(len(queue)), (head, body))
            self.happened["reordered"] += 1
            return
        if roll < 0.6:
            queue.append((bytearray(head), bytearray(body)))
            self.happened["repeated"] += 1
        elif roll < 0.8:
            part = body if body and self.dice.random() < 0.7 else head
            part[self.dice.randrange(len(part))] ^= 1 << self.dice.randrange(8)
            self.happened["corrupted"] += 1
        queue.append((head, body))

    def deliver(self, link: Link, way: int) -> None:
        """What is under way to the called (0) or to the caller (1)."""
        wires, peer = link.ends[1 - way]
        if link.under_way[way] and not link.closed[1 - way]:
            head, body = link.under_way[way].popleft()
            try:
                found = decode_head(bytes(head), self.block_bytes)
                if found.following != len(body):
                    raise ProtocolError("what follows is not what was said")
                message = decode(found, body)
            except ProtocolError as error:
                self.cut(link)
                wires.events.append(Closed(peer, error.message))
                link.closed[1 - way] = True
                return
            if isinstance(message, (Want, Offer)) and message.names[0] not in self.known:
                self.happened["another chain"] += 1
            wires.events.append(PeerMessage(peer, message))

    def cut(self, link: Link) -> None:
        link.dead = True
        self.happened["cut"] += 1

    def notice(self, link: Link) -> None:
        """One end of a dead link is told."""
        end = self.dice.randrange(2)
        if link.dead and not link.closed[end]:
            link.closed[end] = True
            wires, peer = link.ends[end]
            wires.events.append(Closed(peer, "its connection has ended"))

    # ---- a schedule

    def step(self) -> None:
        dice, roll = self.dice, self.dice.random()
        node = dice.choice(self.nodes)
        if roll < 0.35:
            self.turn(node)
        elif roll < 0.70 and self.links:
            link = dice.choice(self.links)
            for _ in range(dice.randint(1, 4)):
                self.deliver(link, dice.randrange(2))
            self.notice(link)
        elif roll < 0.80:
            self.advance(dice.choice((0.001, 0.01, 0.05)))
        elif roll < 0.95:
            self.ask(node)
        elif roll < 0.95 + self.faulty / 20:
            if dice.random() < 0.3:
                self.kill(node)
            elif self.links:
                self.cut(dice.choice(self.links))

    def turn(self, node: Node) -> None:
        node.turn(self.dice.choice((0.0, 1.0)))

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for node in self.nodes:
            if self.clock.now() - node.turned >= GAP:
                node.turn(1.0)

    def ask(self, node: Node) -> None:
        dice, other = self.dice, self.dice.choice(self.nodes)
        number, length = dice.randrange(6), dice.randint(1, 9)
        names, roll = chain(number, length), dice.random()
        if roll < 0.4:
            node.store.compute(names)
        elif roll < 0.5:
            self.requests += 1
            node.exchange.part(self.requests, names)
        elif roll < 0.6 and node.pulls:
            transfer = dice.choice(list(node.pulls))
            node.exchange.cancel(transfer)
        elif other is not node and roll < 0.75:
            part = names[dice.randrange(len(names)) :]
            if dice.random() < 0.5:
                node.offers.add(node.exchange.offer(other.address, part))
            else:
                node.offers.add(node.exchange.hand_on(other.address, [(name, 1 << 63) for name in part]))
        elif other is not node:
            generation = other.generation + (dice.random() < 0.05)
            tokens = (*tokens_of(number, length), *range(dice.choice((0, 1))))
            transfer = node.exchange.pull(
                other.address,
                names,
                LIMIT,
                request=dice.randint(0, self.requests),
                generation=generation,
                prompt=Prompt(tokens, tail=len(tokens) % 2) if dice.random() < 0.5 else None,
            )
            node.pulls[transfer] = self.clock.now(), names, tokens

    def kill(self, node: Node) -> None:
        """Its links are dead, and the others notice some time."""
        for link, end in node.wires.links.values():
            link.dead = link.closed[end] = True
        self.nodes[self.nodes.index(node)] = Node(self, node.index, node.generation + 1)
        self.happened["killed"] += 1

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.faulty = 0.0
        for _ in range(300):
            for link in self.links:
                for way in (0, 1):
                    self.deliver(link, way)
            self.advance(0.02)
            for node in self.nodes:
                self.turn(node)
        self.check()

    def check(self) -> None:
        for node in self.nodes:
            assert not (node.pulls or node.offers or node.prompts or node.fetches), "something never ended"
            assert not node.exchange.busy and not +node.store.held, "a block leaked"
            node.store.pool.check([])
            for block, name in node.store.pool._hash_of.items():
                assert node.store.memory[block] == content(name)
