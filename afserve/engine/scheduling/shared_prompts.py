"""A prompt that several nodes compute, at one of them: when its next chunk begins, and its layers into and out of a
cache.

A chunk begins when the first layer of all before it has come: then whoever computes these is at work on them, so that
no two nodes ever wait for each other, whatever else they have to do. Between two layers it waits for the next one. It
knows no peers (`comm/kv/sharing.py`) and runs nothing.
"""

from collections.abc import Callable, Sequence

from afserve.comm.kv.messages import PIECE_BYTES
from afserve.comm.kv.sharing import SharedPrompt
from afserve.engine.kv.cache import KvCache
from afserve.engine.scheduling.sequence import Sequence as Running
from afserve.engine.scheduling.step_plan import PROMPT, Chunk
from afserve.errors import AfserveError


class Abandoned(AfserveError):
    """The others' part of a step does not come: it ends in the middle, and its chunk was not computed."""


def shared_of(sequence: Running) -> SharedPrompt | None:
    """While it is not over: then this node computes what is missing."""
    if sequence.shared is not None and sequence.shared.over:
        sequence.shared = None
    return sequence.shared


def leave(sequence: Running, why: str) -> None:
    """This node goes on alone with it, or not at all."""
    if sequence.shared is not None:
        sequence.shared.leave(why)
        sequence.shared = None


def own_chunk(
    sequence: Running,
    shared: SharedPrompt,
    others: Sequence[Chunk],
    block_size: int,
    most: int,
    reserve: Callable[[Running, int], int],
) -> Chunk | None:
    """What this node computes next of the prompt, `most` tokens at most, with room reserved and in flight; None while
    it waits, or where it is over. The tokens from what is computed to the chunk's first are other nodes'.

    It has a step of its own, so that nobody waits with it, and none where `others` have this one: prompts before it, or
    sequences that this node decodes, which it would have to wait for for too long.
    """
    if others:
        if others[0].kind is not PROMPT:
            shared.leave("a node decodes")
        return None
    own = shared.split.own(sequence.computed)
    if own is None or len(own) > most:
        shared.leave(f"{most} tokens are this node's limit now")
        return None
    if not shared.has(0, range(sequence.computed, own.start), block_size):
        return None
    wanted = own.stop - sequence.computed
    room = reserve(sequence, wanted)
    if 0 < room < wanted:
        shared.leave(f"its cache has no room for {wanted} tokens")
    if room < wanted:
        return None
    sequence.in_flight = True
    return Chunk(sequence, own.start, len(own), own.stop == len(sequence.tokens), PROMPT)


class SharedLayers:
    """One step's chunk. `sequence.computed` stays what it is until the step ends."""

    def __init__(self, chunk: Chunk, shared: SharedPrompt, kv: KvCache, block_size: int) -> None:
        self._kv, self._shared, self._blocks = kv, shared, chunk.sequence.blocks
        self._tokens = range(chunk.start, chunk.start + chunk.count)
        self._size, self._before = block_size, range(chunk.sequence.computed, chunk.start)
        self._needs = range(chunk.sequence.computed // block_size, chunk.start // block_size)
        self._gives = range(chunk.start // block_size, self._tokens.stop // block_size)
        self._taken = bool(shared.split.takers(shared.split.chunk_at(chunk.start)))

    def come(self, layer: int) -> bool:
        """Whether the others' part of this layer is in the cache. Raises Abandoned where it does not come."""
        shared = self._shared
        if not shared.has(layer, self._before, self._size):
            if shared.over:
                raise Abandoned(shared.over)
            return False
        for place, payload in shared.take(layer, self._needs):
            if not self._kv.write_layer(layer, self._at(place), payload):
                shared.leave(f"layer {layer} of {len(place)} blocks came with {len(payload)} bytes")
                raise Abandoned(shared.over)
        return True

    def give(self, layer: int, fine: Callable[[], bool]) -> None:
        """This layer of the chunk is in the cache: to whoever needs it, unless a row of it is spoiled."""
        if not self._taken or self._shared.over:
            return
        if not fine():
            self._shared.leave("its numbers are not finite")
            return
        most = max(1, PIECE_BYTES // self._kv.layer_bytes(layer))
        for first in range(self._gives.start, self._gives.stop, most):
            place = range(first, min(first + most, self._gives.stop))
            self._shared.send(layer, place, self._tokens, self._kv.read_layer(layer, self._at(place)))

    def _at(self, place: range) -> Sequence[int]:
        return self._blocks[place.start : place.stop]
