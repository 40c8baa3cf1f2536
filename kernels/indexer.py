"""The indexers of sparse attention: which cached rows a token attends, as values and in plain PyTorch. First DeepSeek's
(DSA), which chooses rows.

A key of `dim` numbers is kept for each token. `heads` queries score it: the sum over heads of weight * relu(q . k). A
token attends the `top` rows with the highest scores, or all where it sees no more than that. Of equal scores the
earlier position counts as higher, and a score that is no number as the highest: what is spoiled is seen.

Example: top 2, scores 3, 7, 7, 7 at positions 0 to 3 -> positions 1 and 2. Sources: DeepSeek-V3.2 (arXiv 2512.02556),
transformers' `modeling_deepseek_v32`. Shapes: T tokens, J index heads, I index key, K chosen rows, N blocks, B tokens.

Then MiniMax M3's, which chooses blocks: aligned runs of `block` positions. There is an index query for each key head,
and a block scores as the best q . k of its keys that the token sees. Attended are the `top` best blocks, among which
the last `local` ones always are, and in all of them what the token sees. Of equal scores the earlier block counts as
higher. Scores are sums in float64, so that a row has the same ones alone and among others.

Example: blocks of 4, top 2, local 1, a token at position 9: block 2 (positions 8, 9) and the better one of blocks 0 and
1. Source: transformers' `modeling_minimax_m3_vl`. Shapes: G key heads, D elements of a head, M blocks of keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from afserve.errors import ConfigError
from afserve.kernels.formats.eight_bits import latents_at
from afserve.kernels.packed import PackedLinear
from afserve.kernels.paged import PagedBatch, sequences
from afserve.kernels.pointwise import LogScale

INDEX_EPS = 1e-6
_SCORED = 1 << 24  # scores that are held at a time, one for each of a token's heads and keys


@dataclass(frozen=True, slots=True)
class NormalisedQueries:
    """Queries of the normalised row behind a LayerNorm, those of each head scaled by position."""

    norm_H: Tensor
    norm_bias_H: Tensor
    scale: LogScale


@dataclass(frozen=True, slots=True)
class Indexer:
    """`queries` are made of what attention's own are made of, `keys` and `weights` of the normalised row. Keys pass a
    LayerNorm. Of each head as many numbers are turned as attention turns, in pairs if `interleaved`. With an
    `own` input queries are made of it."""

    queries: PackedLinear
    keys: PackedLinear
    weights: PackedLinear
    norm_I: Tensor
    bias_I: Tensor
    top: int
    interleaved: bool
    own: "NormalisedQueries | None" = None

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


_BLOCKS_SCORED = 1 << 22  # scores of the indexer below that are held at a time, one for each key head and key


@dataclass(frozen=True, slots=True)
class BlockIndexer:
    """Of block-sparse attention (MiniMax M3). `queries` (of all key heads) and `keys` are made of the normalised row,
    and pass RMS norms of each head. Their first `turned` numbers are turned as attention's are."""

    queries: PackedLinear
    keys: PackedLinear
    q_norm_I: Tensor
    k_norm_I: Tensor
    block: int
    top: int
    local: int
    turned: int

    @property
    def dim(self) -> int:
        return self.keys.outputs

    @property
    def heads(self) -> int:
        return self.queries.outputs // self.dim

    @property
    def reach(self) -> int:
        """Tokens that a token attends at most; one that sees no more attends all."""
        return self.top * self.block


def chosen_blocks(q_TGI: Tensor, index_NBI: Tensor, batch: PagedBatch, of: BlockIndexer) -> PagedBatch:
    """Each key head of each token as a sequence of its own, head by head within a token, over the cache as
    `head_rows` shows it: so a row is a block."""
    size, heads = index_NBI.shape[1], q_TGI.shape[1]
    device, most = q_TGI.device, min(of.reach, batch.max_context)
    row_TGK = torch.zeros((*q_TGI.shape[:2], most), dtype=torch.int32, device=device)
    offset_B, head_G = torch.arange(size, device=device), torch.arange(heads, device=device)
    for start, stop, context, blocks in sequences(batch, size):
        row_C = ((blocks * heads * size)[:, None] + offset_B).flatten()[:context]
        key_CI = latents_at(index_NBI, blocks, of.dim).flatten(0, 1)[:context].double()
        step = max(1, _BLOCKS_SCORED // (context * heads))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            own_Q = torch.arange(first, last, device=device) + (context - stop)
            at_QGK = _positions(q_TGI[first:last].double() @ key_CI.t(), own_Q, of)[..., :most]
            row_QGK = row_C[at_QGK.clamp(max=context - 1)] + (head_G * size)[:, None]
            row_TGK[first:last, :, : row_QGK.shape[2]] = row_QGK.int()
    return _heads_alone(batch, row_TGK, of)


def _positions(score_QGC: Tensor, own_Q: Tensor, of: BlockIndexer) -> Tensor:
    """(Q, G, K) int64: what queries at these positions attend, in order; what a query does not see stands behind."""
    queries, heads, context = score_QGC.shape
    count = -(-context // of.block)
    own_Q11 = own_Q[:, None, None]
    padded = score_QGC.new_full((queries, heads, count * of.block), float("-inf"))
    padded[..., :context] = score_QGC
    padded.masked_fill_(torch.arange(count * of.block, device=own_Q.device) > own_Q11, float("-inf"))
    best_QGM = padded.unflatten(2, (count, of.block)).amax(-1)
    block_M, own_block = torch.arange(count, device=own_Q.device), own_Q11 // of.block
    near = (block_M <= own_block) & (block_M > own_block - of.local)
    best_QGM.masked_fill_(near, float("inf"))
    chosen = best_QGM.sort(dim=-1, descending=True, stable=True).indices[..., : of.top]
    chosen = chosen.masked_fill(chosen > own_block, count).sort(-1).values
    within = torch.arange(of.block, device=own_Q.device)
    position_QGK: Tensor = (chosen[..., None] * of.block + within).flatten(2)
    return position_QGK


def _heads_alone(batch: PagedBatch, row_TGK: Tensor, of: BlockIndexer) -> PagedBatch:
    (tokens, heads, most), device = row_TGK.shape, row_TGK.device
    blocks_T = (batch.position_T // of.block + 1).clamp(max=of.top)
    count_T = (blocks_T - 1) * of.block + batch.position_T % of.block + 1
    count_S = count_T.int().repeat_interleave(heads)
    start_S1 = torch.arange(tokens * heads + 1, dtype=torch.int32, device=device)
    last_S = count_S.long() - 1
    return PagedBatch(last_S, last_S, start_S1, count_S, row_TGK.flatten(0, 1), 1, most, singly=batch.singly)


def head_rows(cache_NGBD: Tensor) -> Tensor:
    """A cache in rows as blocks of one row of one head each."""
    return cache_NGBD.flatten(0, 2)[:, None, None]


class NearRows:
    """Rows of a layer's cache that were attended lately, in the device's memory, where the cache itself lies in the
    slower one of the host: those that were chosen are fetched before they are attended, unless they are near. A row is
    fetched into the place of one that was read longest ago, or nearly so. What is written goes to the cache alone, and
    its near copy is forgotten. Attention reads near rows as blocks of one row. Shapes: S slots of the cache, R near
    rows, C elements of a row, M = T * K.

    `place_S` says where a slot's row is near, or -1; it, `slot_R` and `used_R` end with an entry that means nothing.
    `counts_4`: fetches, the place that the native library looks at next, rows found, rows fetched."""

    reads_host = False

    def __init__(self, far_NBC: Tensor, count: int, counts_4: Tensor) -> None:
        """Over a cache, with room for so many rows where these are. Raises ConfigError."""
        where = counts_4.device
        if where.type != "cpu" and not self.reads_host:
            told = f"{where} reads rows of the host by Triton's kernels, and there are none; pip install afserve[gpu]"
            raise ConfigError(f"--kv-near-rows: {told}", param="kv_near_rows")
        self.far_SC = far_NBC.flatten(0, 1)
        self.place_S = torch.full((len(self.far_SC) + 1,), -1, dtype=torch.int32, device=where)
        self.row_RC = torch.zeros((count, far_NBC.shape[2]), dtype=far_NBC.dtype, device=where)
        self.slot_R = torch.full((count + 1,), -1, dtype=torch.int32, device=where)
        self.used_R = torch.zeros(count + 1, dtype=torch.int64, device=where)
        self.counts_4 = counts_4

    @property
    def places(self) -> int:
        return len(self.row_RC)

    @cached_property
    def as_cache(self) -> Tensor:
        """(R, 1, C): blocks of one row."""
        return self.row_RC.unsqueeze(1)

    def forget_rows(self, slot_T: Tensor) -> None:
        """These were written. A negative one is nobody's; then the last entry is overwritten."""
        self.place_S.index_fill_(0, slot_T, -1)

    def parts_of(self, rows: PagedBatch) -> Iterator[tuple[slice, PagedBatch]]:
        """Tokens that see what was chosen for them (`chosen_batch`), as many at a time as have room."""
        most = rows.block_table_SB.shape[1]
        step = max(1, self.places // max(1, most))
        if rows.tokens <= step:
            yield slice(None), rows
            return
        for first in range(0, rows.tokens, step):
            here, some = slice(first, first + step), len(rows.position_T[first : first + step])
            yield here, replace(
                rows, position_T=rows.position_T[here], kv_slot_T=rows.kv_slot_T[here],
                query_start_S1=rows.query_start_S1[: some + 1], context_S=rows.context_S[here],
                block_table_SB=rows.block_table_SB[here], starts=rows.starts[: some + 1],
                contexts=rows.contexts[here],
            )  # fmt: skip

    def fetch_rows(self, rows: PagedBatch) -> Tensor:
        """(T, K) int32: the places of the rows that tokens attend, which are near now. No more of them than there is
        room for. Nothing here waits for a device, or has a size that the rows decide."""
        slot_TK, device, count = rows.block_table_SB.long(), self.place_S.device, self.places
        inside_TK = torch.arange(slot_TK.shape[1], device=device) < rows.context_S[:, None]
        slot_M = torch.where(inside_TK, slot_TK, slot_TK[:, :1]).flatten()
        own_M, nowhere = torch.arange(len(slot_M), device=device), len(self.place_S) - 1
        self.counts_4[0] += 1
        now = self.counts_4[0]
        place_M = self.place_S[slot_M]
        lacks_M = place_M < 0
        self.used_R[torch.where(lacks_M, count, place_M)] = now
        self.place_S[slot_M] = torch.where(lacks_M, -2 - own_M, place_M).int()
        brings_M = self.place_S[slot_M] == -2 - own_M  # one of those that lack the same row
        oldest_R = self.used_R[:count].argsort(stable=True)
        free_M = oldest_R[(brings_M.cumsum(0) - 1).clamp_(min=0)]
        old_M = self.slot_R[free_M].long()
        loses_M = brings_M & (old_M >= 0) & (self.place_S[old_M] == free_M)
        self.place_S[torch.where(loses_M, old_M, nowhere)] = -1
        self.place_S[torch.where(brings_M, slot_M, nowhere)] = free_M.int()
        to_M = torch.where(brings_M, free_M, count)
        self.slot_R[to_M], self.used_R[to_M] = slot_M.int(), now
        self.copy_rows(brings_M, slot_M, free_M)
        self.counts_4[2] += inside_TK.sum() - brings_M.sum()
        self.counts_4[3] += brings_M.sum()
        return self.place_S[slot_M].view(slot_TK.shape)

    def copy_rows(self, brings_M: Tensor, slot_M: Tensor, place_M: Tensor) -> None:
        """Where `brings_M` is true, the row of the cache at its slot to its place; both have memory of one kind."""
        self.row_RC[place_M[brings_M]] = self.far_SC[slot_M[brings_M]]
