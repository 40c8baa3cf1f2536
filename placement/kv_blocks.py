"""How many tokens a block of the KV cache has, and what a token costs there.

A block also holds the states of layers that have them (kernels/delta.py). Unless the user says how long blocks are,
they are so long that states take no more memory than keys and values do. It knows no machine.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from afserve.config import BLOCK_TOKENS
from afserve.spec import ModelSpec

_PLAIN = 16  # tokens: a tile of the native kernels
# of keys that the Triton kernels for attention take in a step: one entry of the block table names them
GPU_BLOCK = 64
_ENDS = 8
_FEWEST = 8  # blocks of a cache whose size is given, so that several requests fit into it


def gpu_block(spec: ModelSpec, devices: Collection[str]) -> int | None:
    """Tokens of a block where some attention nodes are on GPUs and no layer has states; None elsewhere. Nodes that move
    blocks to each other have them of one size."""
    return None if set(devices) == {"cpu"} or spec.state_bytes() else GPU_BLOCK


def block_size(spec: ModelSpec, element: int, asked: int | None, kv_tokens: int | None = None) -> int:
    """Tokens, `asked` if that is a number. `element`: bytes of a key's or a value's number, 1 in 8 bits. `kv_tokens`:
    of a node's whole cache, where they are given."""
    return (
        balanced_block(spec.state_bytes(), spec.kv_bytes_per_token(element), kv_tokens)
        if asked is None
        else asked
    )


def balanced_block(states: int, token: int, kv_tokens: int | None = None) -> int:
    """Tokens of a block where a sequence's states have so many bytes, and a token's keys and values so many."""
    if not states:
        return _PLAIN
    longest = int(BLOCK_TOKENS.high)
    balanced = -(-states // (token * _PLAIN)) * _PLAIN if token else longest
    if kv_tokens is not None:
        longest = max(_PLAIN, min(longest, kv_tokens // _FEWEST // _PLAIN * _PLAIN))
    return min(balanced, longest)


@dataclass(frozen=True, slots=True)
class KvRoom:
    """What the blocks of a node's cache take. Of a model in which only some layers see all tokens, the others, which
    see a window, have blocks of their own: those that running sequences see, and beside them one for every
    `_ENDS` blocks, for the ends of prefixes that others may find. Where that saves less than half of them, all layers
    keep all tokens, which is simpler.

    E.g. gpt-oss-20b, whose window is 128 tokens, half of its layers: 256 sequences see 2,304 blocks of 16 tokens; a
    cache of 16,384 blocks has 4,386 for these layers.

    block     tokens
    whole     bytes of a block in layers that see all tokens, states included
    windowed  bytes in the others
    seen      blocks that running sequences and a step see in those
    fixed     bytes beside blocks, of rows that are near where the cache lies elsewhere
    most_blocks  that have room in that other memory
    """

    block: int
    whole: int
    windowed: int = 0
    seen: int = 0
    fixed: int = 0
    most_blocks: int = 1 << 31

    def window_blocks(self, blocks: int) -> int:
        """For the layers that see a window, beside so many blocks; 0: they keep what all do."""
        own = self.seen + blocks // _ENDS
        return own if self.windowed and 2 * own <= blocks else 0

    def bytes_of(self, tokens: int) -> int:
        blocks = tokens // self.block
        return self.fixed + blocks * self.whole + (self.window_blocks(blocks) or blocks) * self.windowed

    def bytes_of_request(self, tokens: float, window: int) -> tuple[float, bool]:
        """Of one request, with what it sees in layers with a window; and whether these have blocks of their own, of
        which a step's, the node's `seen`, come beside."""
        blocks = math.ceil(tokens / self.block)
        own = seen_blocks(window, self.block) + blocks / _ENDS
        apart = self.windowed > 0 and 2 * own <= blocks
        return blocks * self.whole + (own if apart else blocks) * self.windowed, apart

    def tokens_in(self, size: int) -> int:
        """As many as so many bytes hold, in whole blocks; fewer than none where size is below 0."""
        blocks = (size - self.fixed) // (self.whole + self.windowed)
        apart = (size - self.seen * self.windowed) * _ENDS // (_ENDS * self.whole + self.windowed)
        return min(self.most_blocks, apart if self.window_blocks(apart) else blocks) * self.block


def kv_room(
    spec: ModelSpec,
    element: int,
    block: int,
    sequences: int = 0,
    step_tokens: int = 0,
    beside: int = 0,
    kept: Sequence[ModelSpec] = (),
) -> KvRoom:
    """Of a node that runs so many sequences at most, in steps of so many tokens. What is not the model's keeps `beside`
    bytes of each token. `kept`: the shapes of what lies in this memory, if that is not all of the model once."""
    shapes = kept or (spec,)
    windowed = sum(shape.windowed_bytes_per_token(element) for shape in shapes) * block
    tokens = sum(shape.kv_bytes_per_token(element, block) for shape in shapes)
    whole = (tokens + beside) * block - windowed
    seen = sequences * seen_blocks(spec.widest_window, block) + of_step(step_tokens, block)
    return KvRoom(block, whole, windowed, seen)


def seen_blocks(window: int, block: int) -> int:
    """Of a sequence."""
    return -(-window // block) + 1


def of_step(tokens: int, block: int) -> int:
    """Blocks of layers with a window that a step of so many tokens writes."""
    return -(-tokens // block) + 2
