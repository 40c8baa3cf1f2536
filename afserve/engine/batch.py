"""From a plan of integers to the tensors that kernels read.

Shapes: T tokens of the step, S sequences, B most blocks per sequence, R rows whose logits are wanted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from afserve.engine.scheduler import StepPlan
from afserve.kernels.paged import PagedBatch


@dataclass(frozen=True, slots=True)
class Batch:
    """`logit_row_R` indexes tokens: for each chunk all its prompt rows if asked, else its last if sampled.

    The first `decodes` tokens are single ones, the others belong to prompt chunks.
    """

    token_T: Tensor
    paged: PagedBatch
    logit_row_R: Tensor
    decodes: int


def build(plan: StepPlan, block_size: int, device: torch.device) -> Batch:
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    contexts: list[int] = []
    rows: list[int] = []
    for chunk in plan.chunks:
        sequence, end = chunk.sequence, chunk.start + chunk.count
        if chunk.count == 1:
            tokens.append(sequence.tokens[chunk.start])
            positions.append(chunk.start)
            slots.append(sequence.blocks[chunk.start // block_size] * block_size + chunk.start % block_size)
        else:
            tokens += sequence.tokens[chunk.start : end]
            positions += range(chunk.start, end)
            slots += [
                sequence.blocks[p // block_size] * block_size + p % block_size
                for p in range(chunk.start, end)
            ]
        first = starts[-1]
        if sequence.collects_prompt:
            rows += range(first, first + chunk.count)
        elif chunk.last:
            rows.append(first + chunk.count - 1)
        starts.append(first + chunk.count)
        contexts.append(end)
    return Batch(
        torch.tensor(tokens, device=device),
        PagedBatch(
            position_T=torch.tensor(positions, device=device),
            kv_slot_T=torch.tensor(slots, device=device),
            query_start_S1=torch.tensor(starts, dtype=torch.int32, device=device),
            context_S=torch.tensor(contexts, dtype=torch.int32, device=device),
            block_table_SB=_block_table(plan, device),
            max_query=max(chunk.count for chunk in plan.chunks),
            max_context=max(contexts),
        ),
        torch.tensor(rows, device=device, dtype=torch.int64),
        _decodes(plan),
    )


def _decodes(plan: StepPlan) -> int:
    """Chunks of one token stand in front (the scheduler's order), so their tokens do too."""
    count = 0
    for chunk in plan.chunks:
        if chunk.count != 1:
            break
        count += 1
    return count


def _block_table(plan: StepPlan, device: torch.device) -> Tensor:
    width = max(len(chunk.sequence.blocks) for chunk in plan.chunks)
    table = [chunk.sequence.blocks + [0] * (width - len(chunk.sequence.blocks)) for chunk in plan.chunks]
    return torch.tensor(table, dtype=torch.int32, device=device)
