"""Which tokens of drafts a step computes, once all else in it has its rows and blocks: nobody waits for a draft, and of
several sequences none takes the rows of another. Integers only."""

from collections.abc import Sequence as Many

from afserve.engine.scheduling.fair_share import FairShares
from afserve.engine.scheduling.sequence_blocks import SequenceBlocks
from afserve.engine.scheduling.step_plan import PROMPT, VERIFY, Chunk

NOBODY: tuple[int, ...] = ()  # of the chunks of a step, where none has a draft


def drafts_share(guessed: int, rows: int) -> int:
    """Of the rows that decoding sequences leave, those that prompts leave to so many guessed tokens: a quarter at most,
    so that beside others' drafts a prompt takes no more than a third more steps."""
    return min(guessed, rows // 4)


def suppose_drafts(
    chunks: Many[Chunk], rows: int, longest: int, blocks: SequenceBlocks, shares: FairShares
) -> tuple[int, ...]:
    """Adds drafts to the chunks that have their sequences' newest tokens, at most so many `rows`; what a short one does
    not need is the others'. No sequence passes its first `longest` tokens. Gives the indices of the chunks that suppose
    tokens now."""
    drafting = [chunk for chunk in chunks if chunk.sequence.draft and chunk.last and chunk.kind is not PROMPT]
    drafting.sort(key=lambda chunk: len(chunk.sequence.draft))
    for others, chunk in zip(reversed(range(len(drafting))), drafting, strict=True):
        end = chunk.start + chunk.count
        supposed = blocks.suppose(chunk.sequence, chunk.count, min(rows // (others + 1), longest - end))
        if supposed:
            chunk.kind, chunk.count, chunk.supposed = VERIFY, chunk.count + supposed, supposed
            shares.charge(chunk.sequence, end, supposed)
            rows -= supposed
    return tuple(index for index, chunk in enumerate(chunks) if chunk.supposed)
