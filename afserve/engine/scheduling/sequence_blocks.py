"""The blocks of sequences in the node's pool: what is found, grown, published and given back. It preempts nobody."""

from collections.abc import Iterable
from collections.abc import Sequence as Many

from afserve.engine.kv.blocks import BlockPool, Hash
from afserve.engine.kv.retained import Retention
from afserve.engine.kv.told import ToldCache
from afserve.engine.scheduling.request import GenerationRequest
from afserve.engine.scheduling.sequence import Sequence


class SequenceBlocks:
    """`told` learns what can be found."""

    def __init__(self, pool: BlockPool, told: ToldCache) -> None:
        self.pool, self._told = pool, told
        self._size = pool.block_size
        self._spared = 0  # blocks that drafts leave to others

    def found(self, sequence: Sequence) -> list[int]:
        """Cached blocks of a prefix, leaving at least one token to compute."""
        return self.pool.match(sequence.usable_names(self._size))

    def room_to_enter(self, sequence: Sequence, most: int, others: int) -> list[int] | None:
        """Its cached blocks, where there is room for the `most` tokens that it computes first, and 1 % for `others` to
        grow."""
        found = self.found(sequence)
        first = min(len(sequence.tokens) - len(found) * self._size, most)
        need = -(-first // self._size) + min(others, self.pool.blocks // 100)
        return found if self.pool.can_grow(need, found) else None

    def hold(self, sequence: Sequence, found: list[int]) -> None:
        """It begins with these."""
        sequence.computed = sequence.entered = len(found) * self._size
        self.pool.hold(found, sequence.computed)
        sequence.blocks = list(found)
        self._tell(sequence, 0, len(found))

    def release(self, sequence: Sequence) -> None:
        """What was computed ahead and is cancelled keeps nothing: a prompt may be let go while it is computed again."""
        request = sequence.request
        keeps = request.retain > 0 and not (request.ahead and sequence.cancelled)
        retain = Retention(request.tenant.owner, request.retain) if keeps else None
        self.pool.release(sequence.blocks, computed=sequence.computed, retain=retain)
        sequence.blocks = []

    def grow(self, sequence: Sequence, count: int) -> bool:
        """Whether it has blocks for `count` more tokens now."""
        need = -(-(sequence.computed + count) // self._size) - len(sequence.blocks)
        if need > 0:
            if not self.pool.can_grow(need):
                return False
            self.pool.grow(sequence.blocks, need)
        return True

    def room(self, sequence: Sequence) -> int:
        """Tokens for which there are blocks, nobody preempted."""
        return (len(sequence.blocks) + self.pool.growable) * self._size - sequence.computed

    def spare(self, others: Iterable[Sequence], most: int) -> None:
        """Drafts leave them the blocks that they may need in a step, which has `most` tokens of each."""
        self._spared = sum(-(-min(other.pending, most) // self._size) for other in others)

    def grow_spare(self, sequence: Sequence, count: int) -> int:
        """Blocks for as many of `count` more tokens, which nobody needs, as have room; how many it has blocks for."""
        need = -(-(sequence.computed + count) // self._size) - len(sequence.blocks)
        if (taken := min(need, self.pool.growable - self._spared)) > 0:
            self.pool.grow(sequence.blocks, taken)
        return min(count, len(sequence.blocks) * self._size - sequence.computed)

    def suppose(self, sequence: Sequence, count: int, most: int) -> int:
        """How much of its draft is computed behind `count` known tokens, `most` tokens at most: what has room without
        preempting anybody."""
        return self.grow_spare(sequence, count + min(len(sequence.draft), most)) - count

    def computed(self, sequence: Sequence, before: int) -> None:
        """Blocks that were filled since its first `before` tokens may be found by others from now on. Those that only
        a draft needed are free again."""
        first, full = before // self._size, sequence.computed // self._size
        if first < full and self.pool.caching:
            hashes = sequence.full_hashes(self._size)
            for index in range(first, full):
                self.pool.publish(sequence.blocks[index], hashes[index])
            self._tell(sequence, first, full)
        if self.pool.slides:
            self.pool.slide(sequence.blocks, before, sequence.computed)
        used = -(-sequence.computed // self._size)
        if used < len(sequence.blocks) and sequence.shared is None:
            self.pool.release(sequence.blocks[used:], computed=0)
            del sequence.blocks[used:]

    def _tell(self, sequence: Sequence, first: int, last: int) -> None:
        """Its blocks in [first, last) can be found by others from now on."""
        salt = sequence.request.cache_salt
        self._told.filled(sequence.hashes, sequence.keys, sequence.tokens, first, last, salt)

    def unwritten(self, sequence: Sequence) -> tuple[int, ...]:
        """What a step that failed may have spoiled: those before were full, and written by steps that did not fail."""
        return tuple(sequence.blocks[sequence.computed // self._size :])

    def usable_names(self, request: GenerationRequest) -> list[Hash]:
        """Names of the blocks that a request could find here, its own chain from the first on."""
        return Sequence.start(request, 0, frozenset(), self.pool.root).usable_names(self._size)

    def check(self, running: Many[Sequence], held: Iterable[int]) -> None:
        self.pool.check([*(s.blocks for s in running), list(held)], [s.computed for s in running])
        for sequence in running:
            assert len(sequence.blocks) * self._size >= sequence.computed, "tokens without a block"
