"""When the next chunk of a prompt that several nodes compute begins at one of them, and when this node goes on alone.

A chunk begins when the first layer of all before it has come: then whoever computes these is at work on them, so that
no two nodes ever wait for each other, whatever else they have to do. Nothing is said to the others here: what they are
to know stands in `SharedNews`, which whoever runs the steps tells them (`engine/step/shared_layers.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from afserve.comm.kv.sharing import Arrived, SharedPrompt
from afserve.engine.scheduling.sequence import Sequence as Running
from afserve.engine.scheduling.step_plan import PROMPT, Chunk


@dataclass(frozen=True, slots=True)
class PromptLeft:
    """This node goes on alone with a prompt, or not at all."""

    prompt: SharedPrompt
    why: str


@dataclass(frozen=True, slots=True)
class Awaits:
    """How far the layer has come that this node's next chunk begins with."""

    prompt: SharedPrompt
    arrived: Arrived


SharedNews = PromptLeft | Awaits


def shared_of(sequence: Running) -> SharedPrompt | None:
    """While it is not over: then this node computes what is missing."""
    if sequence.shared is not None and sequence.shared.over:
        sequence.shared = None
    return sequence.shared


def leave(sequence: Running, why: str, news: list[SharedNews]) -> None:
    if sequence.shared is not None:
        news.append(PromptLeft(sequence.shared, why))
        sequence.shared = None


def own_chunk(
    sequence: Running,
    shared: SharedPrompt,
    others: Sequence[Chunk],
    block_size: int,
    most: int,
    reserve: Callable[[Running, int], int],
    news: list[SharedNews],
) -> Chunk | None:
    """What this node computes next of the prompt, `most` tokens at most, with room reserved and in flight; None while
    it waits, or where it is over. The tokens from what is computed to the chunk's first are other nodes'.

    It has a step of its own, so that nobody waits with it, and none where `others` have this one: prompts before it, or
    sequences that this node decodes, which it would have to wait for for too long.
    """
    if others:
        if others[0].kind is not PROMPT:
            leave(sequence, "a node decodes", news)
        return None
    own = shared.split.own(sequence.computed)
    if own is None or len(own) > most:
        leave(sequence, f"{most} tokens are this node's limit now", news)
        return None
    arrived = shared.arrived(0, range(sequence.computed, own.start), block_size)
    news.append(Awaits(shared, arrived))
    if arrived.wrong:
        sequence.shared = None
    if not arrived.whole:
        return None
    wanted = own.stop - sequence.computed
    room = reserve(sequence, wanted)
    if 0 < room < wanted:
        leave(sequence, f"its cache has no room for {wanted} tokens", news)
    if room < wanted:
        return None
    sequence.in_flight = True
    return Chunk(sequence, own.start, len(own), own.stop == len(sequence.tokens), PROMPT)
