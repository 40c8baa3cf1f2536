"""From the times of tokens to figures: steady-state rate, time to first token, time per token. Values only.

The steady state of a batch begins when its last sequence has its first token and ends when its first sequence
is complete: all of it decodes then, nothing prefills and nobody has left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Timeline:
    """One sequence: when it was submitted and when each of its tokens arrived, in seconds."""

    submitted: float
    tokens: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """Of one batch. `tokens_per_second` is None when the batch never was in a steady state."""

    tokens_per_second: float | None
    ttft: float
    tpot: float


def figures(batch: Sequence[Timeline]) -> BatchFigures:
    begin = max(one.tokens[0] for one in batch)
    end = min(one.tokens[-1] for one in batch)
    made = sum(begin < at <= end for one in batch for at in one.tokens)
    return BatchFigures(
        made / (end - begin) if end > begin and made else None,
        median(one.tokens[0] - one.submitted for one in batch),
        median(_per_token(one) for one in batch),
    )


def _per_token(one: Timeline) -> float:
    return (one.tokens[-1] - one.tokens[0]) / max(1, len(one.tokens) - 1)


def spread(values: Sequence[float | None]) -> tuple[float | None, float | None, float | None]:
    """(median, smallest, largest) of what there is."""
    known = sorted(value for value in values if value is not None)
    return (median(known), known[0], known[-1]) if known else (None, None, None)
