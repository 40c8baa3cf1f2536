"""Attention in aligned chunks as ordinary attention: every part of a sequence inside of a chunk becomes a sequence.

Such a part sees the keys from the beginning of its chunk, so its context begins there, and its block table too.
"""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from afserve.kernels.paged import PagedBatch


def cut(batch: PagedBatch, chunk: int, block_size: int) -> PagedBatch:
    """The same tokens as more and shorter sequences; the batch itself where no context leaves its first chunk.

    `chunk` must be a multiple of the block size. Positions and KV slots stay those of the whole sequences.
    """
    assert chunk % block_size == 0, "Ops.bind_gqa refuses it"
    starts = batch.starts or tuple(batch.query_start_S1.tolist())
    contexts = batch.contexts or tuple(batch.context_S.tolist())
    if max(contexts, default=0) <= chunk:
        return batch
    ends, seen, rows, first_blocks = [0], [], [], []
    for row, context in enumerate(contexts):
        queries = starts[row + 1] - starts[row]
        position = context - queries
        while position < context:
            begin = position // chunk * chunk
            stop = min(begin + chunk, context)
            ends.append(ends[-1] + stop - position)
            seen.append(stop - begin)
            rows.append(row)
            first_blocks.append(begin // block_size)
            position = stop
    device = batch.context_S.device
    return replace(
        batch,
        query_start_S1=torch.tensor(ends, dtype=torch.int32, device=device),
        context_S=torch.tensor(seen, dtype=torch.int32, device=device),
        block_table_SB=_shifted(batch.block_table_SB, rows, first_blocks),
        max_query=max(end - start for start, end in pairwise(ends)),
        max_context=max(seen),
        starts=tuple(ends),
        contexts=tuple(seen),
    )


def _shifted(table_SB: Tensor, rows: list[int], first_blocks: list[int]) -> Tensor:
    """Row i is row rows[i] of the table from block first_blocks[i] on; entries past the end are never read."""
    device, width = table_SB.device, table_SB.shape[1]
    first_S1 = torch.tensor(first_blocks, device=device)[:, None]
    column_SB = (first_S1 + torch.arange(width, device=device)).clamp(max=width - 1)
    return table_SB[torch.tensor(rows, device=device)].gather(1, column_SB).contiguous()
