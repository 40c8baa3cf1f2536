"""What one step computes and how sequences end in it: values between the scheduler, who decides, and who runs the step.

Integers only; the tensors are made in `batch`.
"""

from dataclasses import dataclass
from enum import StrEnum

from afserve.engine.scheduling.request import FinishReason
from afserve.engine.scheduling.sequence import Sequence


class ChunkKind(StrEnum):
    """What a chunk computes: tokens that came with the request (or were thrown out of the cache since), the one token
    that this node generated last, or several that it accepted or supposes and computes at once."""

    PROMPT = "prompt"
    DECODE = "decode"
    VERIFY = "verify"


# By name, because looking up an enum's attribute is slow where it is done for every chunk.
PROMPT, DECODE, VERIFY = ChunkKind


@dataclass(slots=True)
class Chunk:
    """`count` tokens of a sequence from position `start`; `last` when its newest token is among them. The last
    `supposed` of them are the first of its draft. Nobody changes one; a frozen one takes longer to make, and each token
    has its own."""

    sequence: Sequence
    start: int
    count: int
    last: bool
    kind: ChunkKind
    supposed: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Chunks of decoding and verifying sequences stand before those of prompts. All of one that `draws` are empty: they
    stand for sequences whose row came with them. It is `alone` where no other micro-batch has sequences. `drafted` are
    the indices of the chunks that suppose tokens: a step without drafts looks at none for them. Each sequence decodes
    as many tokens as there are `passes`, one behind the other, and nothing else of its rows is read; 0 in any other
    step."""

    micro_batch: int
    chunks: tuple[Chunk, ...]
    drafted: tuple[int, ...] = ()
    draws: bool = False
    alone: bool = False
    passes: int = 0

    @property
    def shared(self) -> Chunk | None:
        """The chunk of a prompt that several nodes compute, which is alone in its step, if this is one that needs or
        gives any of their layers."""
        first = self.chunks[0]
        prompt = first.sequence.shared
        return None if prompt is None or first.start < prompt.split.start else first

    @property
    def ahead(self) -> bool:
        """Whether it is of a request that nobody waits for, which is alone in its step and in no other node's hands."""
        first = self.chunks[0].sequence
        return first.request.ahead and first.shared is None

    @property
    def supposed(self) -> int:
        """Tokens of drafts."""
        return sum(self.chunks[index].supposed for index in self.drafted)

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def decodes(self) -> int:
        """Tokens that are no prompt's; they stand in front."""
        return sum(chunk.count for chunk in self.chunks if chunk.kind is not PROMPT)


@dataclass(frozen=True, slots=True)
class Finished:
    """`error` is set only with the reason "error"; `spoiled` are blocks to be cleared before anybody reuses them."""

    sequence: Sequence
    reason: FinishReason
    stop_token_id: int | None = None
    error: str | None = None
    spoiled: tuple[int, ...] = ()
