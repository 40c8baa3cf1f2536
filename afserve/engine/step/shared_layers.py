"""A prompt that several nodes compute, where its steps run: its layers into and out of this node's cache, and what its
scheduler has decided, said to the others. Between two layers a step waits for the others' next one. It knows no peers
(`comm/kv/sharing.py`).
"""

from collections.abc import Callable, Sequence

from afserve.comm.kv.messages import PIECE_BYTES
from afserve.engine.kv.cache import KvCache
from afserve.engine.scheduling.shared_prompts import Awaits, PromptLeft, SharedNews
from afserve.engine.scheduling.step_plan import Chunk
from afserve.errors import AfserveError


class Abandoned(AfserveError):
    """The others' part of a step does not come: it ends in the middle, and its chunk was not computed."""


class StatesMoved(Abandoned):
    """Nor can it be computed again as it is: recurrent states have moved on."""


def tell_others(news: list[SharedNews]) -> None:
    """What a plan decided about shared prompts; the list is empty afterwards."""
    for one in news:
        match one:
            case PromptLeft(prompt, why):
                prompt.leave(why)
            case Awaits(prompt, arrived):
                prompt.wait_for(arrived)
    news.clear()


class SharedLayers:
    """One step's chunk. `sequence.computed` stays what it is until the step ends."""

    def __init__(self, chunk: Chunk, kv: KvCache) -> None:
        shared, block_size = chunk.sequence.shared, kv.pool.block_size
        assert shared is not None, "a chunk that no other node has a part in"
        self._kv, self._shared, self._blocks = kv, shared, chunk.sequence.blocks
        self._tokens = range(chunk.start, chunk.start + chunk.count)
        self._size, self._before = block_size, range(chunk.sequence.computed, chunk.start)
        self._needs = range(chunk.sequence.computed // block_size, chunk.start // block_size)
        self._gives = range(chunk.start // block_size, self._tokens.stop // block_size)
        self._taken = bool(shared.split.takers(shared.split.chunk_at(chunk.start)))

    def come(self, layer: int) -> bool:
        """Whether the others' part of this layer is in the cache. Raises Abandoned where it does not come."""
        shared = self._shared
        arrived = shared.arrived(layer, self._before, self._size)
        shared.wait_for(arrived)
        if not arrived.whole:
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
