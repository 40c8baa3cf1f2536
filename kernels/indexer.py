"""The indexer of sparse attention (DSA): which cached rows a token attends, as values and in plain PyTorch.

A key of `dim` numbers is kept for each token. `heads` queries score it: the sum over heads of weight * relu(q . k). A
token attends the `top` rows with the highest scores, or all where it sees no more than that. Of equal scores the
earlier position counts as higher, and a score that is no number as the highest: what is spoiled is seen.

Example: top 2, scores 3, 7, 7, 7 at positions 0 to 3 -> positions 1 and 2. Sources: DeepSeek-V3.2 (arXiv 2512.02556),
transformers' `modeling_deepseek_v32`. Shapes: T tokens, J index heads, I index key, K chosen rows, N blocks, B tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from afserve.kernels.formats.eight_bits import latents_at
from afserve.kernels.packed import PackedLinear
from afserve.kernels.paged import PagedBatch, sequences

INDEX_EPS = 1e-6
_SCORED = 1 << 24  # scores that are held at a time, one for each of a token's heads and keys


@dataclass(frozen=True, slots=True)
class Indexer:
    """`queries` are made of what attention's own are made of, `keys` and `weights` of the normalised row. Keys pass a
    LayerNorm. Of each head as many numbers are turned as attention turns, in pairs if `interleaved`."""

    queries: PackedLinear
    keys: PackedLinear
    weights: PackedLinear
    norm_I: Tensor
    bias_I: Tensor
    top: int
    interleaved: bool

    @property
    def heads(self) -> int:
        return self.weights.outputs

    @property
    def dim(self) -> int:
        return self.keys.outputs

    @property
    def scale(self) -> float:
        """Of a head's weight; scores are compared with each other alone, so it could be any."""
        return float((self.heads * self.dim) ** -0.5)


def choose_rows(q_TJI: Tensor, weight_TJ: Tensor, index_NBI: Tensor, batch: PagedBatch, top: int) -> Tensor:
    """(T, K) int32, K = min(top, longest context): the slots (block * B + offset) of the rows that each token attends,
    in the order of their positions. Entries behind a token's last one mean nothing."""
    most, size = min(top, batch.max_context), index_NBI.shape[1]
    slot_TK = torch.zeros((len(q_TJI), most), dtype=torch.int32, device=q_TJI.device)
    offset_B = torch.arange(size, device=q_TJI.device)
    for start, stop, context, blocks in sequences(batch, size):
        slot_C = (blocks[:, None] * size + offset_B).flatten()[:context]
        key_IC = latents_at(index_NBI, blocks, q_TJI.shape[2]).flatten(0, 1)[:context].t()
        position_C = torch.arange(context, device=q_TJI.device)
        step = max(1, _SCORED // (context * q_TJI.shape[1]))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            each_QJC = (q_TJI[first:last].float() @ key_IC).relu_()
            score_QC = (each_QJC * weight_TJ[first:last, :, None]).sum(1)
            own_Q1 = torch.arange(first, last, device=q_TJI.device)[:, None] + (context - stop)
            score_QC.masked_fill_(position_C > own_Q1, float("-inf"))
            best_QC = score_QC.sort(dim=-1, descending=True, stable=True).indices
            chosen_QK = best_QC[:, :most].sort(-1).values
            slot_TK[first:last, : chosen_QK.shape[1]] = slot_C[chosen_QK].int()
    return slot_TK


def chosen_batch(batch: PagedBatch, slot_TK: Tensor, top: int) -> PagedBatch:
    """The same tokens, each a sequence of its own that sees what was chosen for it: over the cache as blocks of one
    row, so that a slot is a block."""
    device, (tokens, most) = slot_TK.device, slot_TK.shape
    count_T = (batch.position_T + 1).clamp(max=top).int()
    start_T1 = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    starts: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    if batch.starts:
        starts = tuple(range(tokens + 1))
        ends = zip(batch.starts, batch.starts[1:], batch.contexts, strict=False)
        counts = tuple(
            min(top, context - last + 1 + at) for first, last, context in ends for at in range(first, last)
        )
    last_T = count_T.long() - 1
    return PagedBatch(
        last_T, last_T, start_T1, count_T, slot_TK, 1, most, starts, counts, singly=batch.singly
    )


def as_rows(cache_NBC: Tensor) -> Tensor:
    """A cache as blocks of one row each."""
    return cache_NBC.flatten(0, 1).unsqueeze(1)
