"""A prompt that several nodes compute, at one of them: when its next chunk begins, and its layers into and out of a
cache.

A chunk begins when the first layer of all before it has come: then whoever computes these is at work on them, so that
no two nodes ever wait for each other, whatever else they have to do. Between two layers it waits for the next one. It
knows no peers (`comm/kv/sharing.py`) and runs nothing.
"""

from collections.abc import Callable, Sequence

from afserve.comm.kv.messages import PIECE_BYTES
from afserve.comm.kv.sharing import SharedPrompt
from afserve.engine.kv_cache import KvCache
from afserve.engine.sequence import Sequence as Running
from afserve.engine.step_plan import PROMPT, Chunk
from afserve.errors import AfserveError


class Abandoned(AfserveError):
    """The others' part of a step does not come: it ends in the middle, and its chunk was not computed."""


def own_chunk(
    sequence: Running,
    shared: SharedPrompt,
    block_size: int,
    most: int,
    reserve: Callable[[Running, int], int],
) -> Chunk | None:
    """What this node computes next of the prompt, with room reserved; None while it waits, or where it is over. The
    tokens from what is computed to the chunk's first are those of other nodes."""
    own = shared.split.own(sequence.computed)
    if own is None or len(own) > most:
        shared.leave(f"{most} tokens are this node's limit now")
        return None
    if not shared.has(0, range(sequence.computed // block_size, own.start // block_size), begun=False):
        return None
    wanted = own.stop - sequence.computed
    room = reserve(sequence, wanted)
    if 0 < room < wanted:
        shared.leave(f"its cache has no room for {wanted} tokens")
    return (
        Chunk(sequence, own.start, len(own), own.stop == len(sequence.tokens), PROMPT)
        if room == wanted
        else None
    )


class SharedLayers:
    """One step's chunk. `sequence.computed` stays what it is until the step ends."""

    def __init__(self, chunk: Chunk, shared: SharedPrompt, kv: KvCache, block_size: int) -> None:
        self._kv, self._shared, self._blocks = kv, shared, chunk.sequence.blocks
        self._tokens = range(chunk.start, chunk.start + chunk.count)
        self._needs = range(chunk.sequence.computed // block_size, chunk.start // block_size)
        self._gives = range(chunk.start // block_size, self._tokens.stop // block_size)
        self._taken = bool(shared.split.takers(shared.split.chunk_at(chunk.start)))

    def come(self, layer: int) -> bool:
        """Whether the others' part of this layer is in the cache. Raises Abandoned where it does not come."""
        shared = self._shared
        if not shared.has(layer, self._needs, begun=True):
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
