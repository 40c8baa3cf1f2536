"""Steps as values, without a scheduler."""

import random

import torch

from afserve.engine.step.step_input import StepInput
from afserve.kernels.paged import PagedBatch


def decode_step(
    sequences: int, context: int = 9, draw: random.Random | None = None, blocks: int = 4
) -> StepInput:
    """One token of each sequence, whose contexts are `context` long."""
    draw = draw or random.Random(0)

    def column(dtype: torch.dtype, most: int = 99) -> torch.Tensor:
        return torch.tensor([draw.randrange(most) for _ in range(sequences)], dtype=dtype)

    starts = tuple(range(sequences + 1))
    paged = PagedBatch(
        column(torch.int64),
        column(torch.int64),
        torch.tensor(starts, dtype=torch.int32),
        torch.full((sequences,), context, dtype=torch.int32),
        torch.stack([column(torch.int32) for _ in range(blocks)], 1),
        max_query=1,
        max_context=context,
        starts=starts,
        contexts=(context,) * sequences,
    )
    rows = list(range(sequences))
    ends = [row + 1 for row in rows]
    return StepInput(column(torch.int64), paged, torch.tensor(rows), rows, ends, True, sequences, True, None)
