"""The open requests of a node, by handle: those that somebody waits for, and those that are computed ahead."""

from collections.abc import Iterator
from math import inf

from afserve.engine.kv.blocks import Hash
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.scheduling.turns import Group

AHEAD_TOKENS = 32  # in a step: whoever comes waits for no more than one layer of it
_LOOK = 0.005  # seconds, while others wait
REST = 0.1  # seconds without anybody who waits, before anything is computed ahead: requests come together


class OpenRequests(dict[int, Sequence]):
    """`block_size` in tokens."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self._block_size, self._ahead = block_size, 0
        self._rest_until = -inf
        self.others_wait = False  # somebody who is not open yet waits for room
        self.moving = False  # KV blocks come or go

    def add(self, sequence: Sequence) -> None:
        self[sequence.request.handle] = sequence
        self._ahead += sequence.request.ahead

    def remove(self, sequence: Sequence) -> None:
        del self[sequence.request.handle]
        self._ahead -= sequence.request.ahead

    @property
    def tile_bytes(self) -> int:
        """Of the pictures of all of them."""
        return sum(len(tile.pixels) for one in self.values() for tile in one.request.tiles)

    def rest_from(self, now: float) -> None:
        """A step is over that somebody waited for."""
        self._rest_until = now + REST

    def rests(self, now: float) -> float:
        """Seconds until what is ahead may go on, where there is nothing else."""
        if not 0 < self._ahead == len(self):
            return 0.0
        return max(self._rest_until - now, _LOOK if self.others_wait else 0.0)

    def holds_ahead(self, now: float) -> bool:
        """Whether nothing of what is ahead may begin."""
        return len(self) > self._ahead or self.others_wait or now < self._rest_until

    @property
    def gives_way(self) -> bool:
        """Whether there is something ahead, and something else that it would hold up."""
        return self._ahead > 0 and (self._ahead < len(self) or self.others_wait)

    @property
    def queued_tokens(self) -> int:
        """Of prompts that somebody waits for, still to be computed here."""
        left = ((s, max(0, s.given - s.computed)) for s in self.values() if not s.request.ahead)
        return sum(tokens // s.shared.split.parts if s.shared else tokens for s, tokens in left)

    def prompts_left(self) -> Iterator[tuple[Group, int]]:
        return ((s.group, s.prompt_left) for s in self.values())

    def written_names(self) -> dict[int, list[Hash]]:
        """By handle, the names of the blocks that running requests have filled."""
        running = (one for one in self.items() if one[1].micro_batch >= 0)
        return {handle: sequence.written_names(self._block_size) for handle, sequence in running}

    def written_names_of(self, handle: int) -> list[Hash]:
        """Names of the blocks that a request has filled; none of one that is not known."""
        known = self.get(handle)
        return known.written_names(self._block_size) if known else []
