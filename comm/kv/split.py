"""Which node computes which tokens of a prompt that several prefill nodes compute together: numbers only.

The prompt is cut into chunks, and chunks go round: with two nodes one has the 1st, 3rd, 5th, the other the 2nd, 4th. A
chunk needs the keys and values of all tokens before it, layer by layer. So whoever computes a chunk is one layer behind
whoever computes the chunk before, and with k nodes k chunks are computed at once. Parts that are longer than a chunk
would not do: the last chunk of one comes before the first layer of the next. Layers in place of tokens would not
do either: no node would have a whole block that it could name, keep and find again.

The lead is whom a decode node has asked for the prompt. It has the last chunk, and when it is done it has all blocks.
"""

from dataclasses import dataclass

LEAD = 0
MOST_PARTS = 16


@dataclass(frozen=True, slots=True)
class Split:
    """`tokens` of a prompt from `start` on, in chunks of `chunk`, for so many `parts`; what is before `start` is in the
    caches, or computed by everybody. All but the last chunk fill blocks. `mine` is this node's part."""

    tokens: int
    start: int
    chunk: int
    parts: int
    mine: int = LEAD

    @property
    def chunks(self) -> int:
        return -(-(self.tokens - self.start) // self.chunk)

    def part_of(self, chunk: int) -> int:
        return (self.chunks - 1 - chunk) % self.parts

    def tokens_of(self, chunk: int) -> range:
        first = self.start + chunk * self.chunk
        return range(first, min(first + self.chunk, self.tokens))

    def own(self, computed: int) -> range | None:
        """What this node computes next, when it has the first `computed` tokens; None if that was all."""
        if computed < self.start:
            return range(computed, min(computed + self.chunk, self.start))
        mine = (at for at in range(self.chunk_at(computed), self.chunks) if self.part_of(at) == self.mine)
        return next((self.tokens_of(chunk) for chunk in mine), None)

    @property
    def end(self) -> int:
        """Tokens up to the end of this node's last chunk: what comes behind them is nothing to it."""
        last = next(chunk for chunk in reversed(range(self.chunks)) if self.part_of(chunk) == self.mine)
        return self.tokens_of(last).stop

    def chunk_at(self, token: int) -> int:
        return (token - self.start) // self.chunk

    def takers(self, chunk: int) -> list[int]:
        """The other parts that have a chunk behind this one."""
        later = range(chunk + 1, min(chunk + 1 + self.parts, self.chunks))
        behind = {self.part_of(one) for one in later}
        return sorted(behind - {self.mine})


def split_over(tokens: int, start: int, parts: int, most: int, block_size: int) -> Split | None:
    """Chunks of at most `most` tokens, of whole blocks, as equal as they can be and as many for each part; None where
    there is nothing to share. Every part has one at least."""
    left, largest = tokens - start, most // block_size * block_size
    if not 1 < parts <= MOST_PARTS or start % block_size or min(left, largest) <= 0:
        return None
    rounds = -(-left // (largest * parts))
    equal = -(-left // (rounds * parts))
    split = Split(tokens, start, min(-(-equal // block_size) * block_size, largest), parts)
    return split if split.chunks >= parts else None


@dataclass(frozen=True, slots=True)
class SplitMember:
    """A life of a node that computes a part; they are in the order of their parts."""

    generation: int
    address: str
