"""When a sequence ends: with which of the tokens that a step gave it, and why. Integers only."""

from collections.abc import Sequence as Many

from afserve.engine.scheduling.request import FinishReason
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.scheduling.step_plan import Finished


def extend(sequence: Sequence, run: Many[int], longest: int) -> Finished | None:
    """Append tokens until one ends the sequence; what follows it is dropped. It has at most `longest` tokens."""
    for token in run:
        sequence.tokens.append(token)
        reason = _finish_reason(sequence, token, longest)
        if reason is not None:
            return Finished(sequence, reason, token if _stops(sequence, token) else None)
    return None


def failed(sequence: Sequence, error: str, spoiled: tuple[int, ...]) -> Finished:
    if sequence.cancelled:
        return Finished(sequence, "cancelled", spoiled=spoiled)
    return Finished(sequence, "error", error=error, spoiled=spoiled)


def _finish_reason(sequence: Sequence, token: int, longest: int) -> FinishReason | None:
    if _stops(sequence, token) or (sequence.guide is not None and sequence.complete):
        return "stop"
    length = len(sequence.tokens)
    most = sequence.prompt_length + sequence.request.params.max_tokens
    return "length" if length >= most or length >= longest else None


def _stops(sequence: Sequence, token: int) -> bool:
    """Whether this token, its last one, ends it."""
    params = sequence.request.params
    ends = token in sequence.eos_ids or token in params.stop_token_ids
    return ends and sequence.output_length >= params.min_tokens
