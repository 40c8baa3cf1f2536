"""How many tokens sequences decode in one step, one behind the other: as many as nobody has to wait for.

Every token is drawn as in a step of its own; what is around a step, planning and telling, is done once for all. Values
in, values out.
"""

from collections.abc import Sequence as Many

from afserve.engine.scheduling.sequence_blocks import SequenceBlocks
from afserve.engine.scheduling.step_plan import DECODE, Chunk

_SECONDS = 0.01  # of a step, at most: who reads along sees no pause, and who asks waits no longer


class PassTime:
    """Of one micro-batch: the seconds of a pass, by the last step of that kind. Behind any other step one pass is
    measured first."""

    def __init__(self) -> None:
        self._seconds: float | None = None

    def most_passes(self, offered: int) -> int:
        """So many of these take no longer than a step may."""
        if self._seconds is None:
            return min(offered, 1)
        return min(offered, max(1, int(_SECONDS / self._seconds)) if self._seconds > 0.0 else offered)

    def measured(self, passes: int, seconds: float) -> None:
        self._seconds = seconds / passes

    def other_step(self) -> None:
        self._seconds = None


def passes_of(chunks: Many[Chunk], most: int, longest: int, blocks: SequenceBlocks) -> int:
    """Of the sequences of a step, which have blocks for a token more; 0 where more is wanted of any than its likeliest
    token. None passes its max_tokens or its first `longest` tokens, and nobody leaves for the others' blocks."""
    for chunk in chunks:
        one = chunk.sequence
        if chunk.kind is not DECODE or not one.unread or one.output_length < one.request.params.min_tokens:
            return 0
    if most > 1:
        most = min(most, *(_left(chunk, longest) for chunk in chunks))
    if most > 1:
        blocks.spare((), 0)
        most = min(blocks.grow_spare(chunk.sequence, most) for chunk in chunks)
    return most


def _left(chunk: Chunk, longest: int) -> int:
    """Tokens that its sequence may still have."""
    sequence, known = chunk.sequence, chunk.start + chunk.count
    return min(sequence.prompt_length + sequence.request.params.max_tokens, longest) - known
