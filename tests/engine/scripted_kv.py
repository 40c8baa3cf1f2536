"""In place of an engine and of a wire of KV blocks: a test scripts what it needs, and nothing else may be asked."""

from types import SimpleNamespace
from typing import Any, NoReturn

from afserve.comm.kv.exchange import Exchange
from afserve.comm.kv.puller import Pulled
from afserve.engine.attention_node import AttentionNode
from afserve.engine.kv.moving.moves import KvMoves


def unscripted(*_: object, **__: object) -> NoReturn:
    raise AssertionError("nobody should ask this here")


class ScriptedEngine(AttentionNode[Any]):
    """An engine that has nothing to do."""

    def __init__(self):
        pass

    busy = False
    queued_tokens, chunk_tokens, layers, row_bytes, block_bytes, most_room = 0, 512, 1, 8, 1000, 1000
    prefill_rate = prompt_rate = 0.0

    def has_room(self, names):
        unscripted(names)

    def usable_names(self, request):
        unscripted(request)

    def known(self, names):
        return 0

    def written_names(self):
        unscripted()

    def written_names_of(self, handle):
        unscripted(handle)

    def submit(self, request, shared=None):
        unscripted(request, shared)

    def cancel(self, handle):
        unscripted(handle)

    def draw(self, row, what, seconds):
        pass

    def draw_arrow(self, row, identity, step):
        pass


class ScriptedWire(Exchange):
    """A wire on which nothing is under way."""

    busy = eager = lending = False

    def __init__(self):
        self.ended: list[Pulled] = []
        self.settled: list[tuple[int, int]] = []
        self.sharing: Any = SimpleNamespace(started=[], ended=[])

    def pull(self, address, names, limit, *, request, generation, prompt=None, members=(), instead=None):
        unscripted(address, names)

    def fetch(self, key, names, limit, generation):
        unscripted(key, names)

    def cancel(self, transfer):
        unscripted(transfer)

    def load(self, address):
        return None

    def part(self, request, names):
        unscripted(request, names)

    def offer(self, address, names):
        unscripted(address, names)

    def take_asked(self):
        return []

    def look_below(self):
        pass

    def take_lacking(self):
        return []

    def take_unwanted(self):
        return []

    def computing(self, queued, rate):
        pass

    def computed(self, key, row=b""):
        unscripted(key, row)

    def found(self, key):
        unscripted(key)

    def helped(self, key):
        return ()

    def propose(self, split, members, prefill):
        unscripted(split, members, prefill)

    def turn(self, seconds, *, lingers=False):
        pass

    def stats(self):
        unscripted()

    def close(self):
        pass


class NoKv(KvMoves):
    """In place of `KvMoves`, on a node whose KV stays where it is."""

    busy = eager = holding = False

    in_line = 0

    def __init__(self):
        pass

    def pull(self, request, source):
        return False

    def restore(self, request):
        return False

    def part(self, number):
        pass

    def cancel(self, number):
        pass

    def computed(self, event):
        pass

    def copy_to(self, peers):
        pass

    def hands_on(self, peers):
        return False

    def turn(self):
        return []
