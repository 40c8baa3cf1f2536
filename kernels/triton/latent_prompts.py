"""Which sequences of a step have their latents multiplied up to keys and values of each head, and the plan of it.

The rule is one count. Absorbed, a token multiplies 2 rank + rope numbers with each position that it sees, and its query
and result go through the up-projections. Multiplied up, it multiplies nope + rope + value, in whole tiles of tokens,
and each position goes through the up-projections instead. What multiplies less runs: a decoding token always absorbed,
a prompt multiplied up (of DeepSeek-V3's sizes from about 170 tokens a piece on, whatever its context).
Source of both forms: DeepSeek-V2 (arXiv 2405.04434, 2.1). Shapes: M rows of latents, N tiles.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from afserve.kernels.devices import scratch
from afserve.kernels.formats.eight_bits import is_eight
from afserve.kernels.latent import MlaLayer
from afserve.kernels.paged import BatchPart, PagedBatch, on_device, part_of


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Of one head, and rows of a tile of queries."""

    rank: int
    nope: int
    rope: int
    value: int
    queries: int

    @classmethod
    def of(cls, layer: MlaLayer, queries: int) -> "LatentSizes":
        return cls(layer.rank, layer.nope, layer.rope, layer.value_size, queries)

    def absorbed(self, rows: int, context: int) -> int:
        """Multiplications of one head for the last `rows` tokens of `context`."""
        seen = rows * context - rows * (rows - 1) // 2
        return seen * (2 * self.rank + self.rope) + rows * self.rank * (self.nope + self.value)

    def multiplied_up(self, rows: int, context: int) -> int:
        """The same, and what whole tiles multiply besides."""
        seen = -(-rows // self.queries) * self.queries * context - rows * (rows - 1) // 2
        return seen * (self.nope + self.rope + self.value) + context * self.rank * (self.nope + self.value)

    def go_up(self, rows: int, context: int) -> bool:
        """Whether latents are multiplied up."""
        return context <= scratch.LONGEST and self.multiplied_up(rows, context) < self.absorbed(rows, context)


@dataclass(frozen=True, slots=True)
class LatentPrompts:
    """Sequences whose latents are gathered together: `row_M` int64, their places in the cache, and `tile_N4` as
    `attend_prompts` reads it."""

    row_M: Tensor
    tile_N4: Tensor

    def heads_together(self, sizes: LatentSizes, itemsize: int) -> int:
        """How many heads' keys and values are there at a time."""
        each = self.row_M.shape[0] * (sizes.nope + sizes.value) * itemsize
        return max(1, scratch.PROMPTS // each)


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """`absorbed`: the other rows; None where there are none."""

    prompts: tuple[LatentPrompts, ...]
    absorbed: BatchPart | None


class PromptPlans:
    """Of one batch, whose layers mostly have the same sizes. The batch has its host integers."""

    def __init__(self) -> None:
        self._known: dict[tuple[LatentSizes, int], PromptPlan | None] = {}

    def of(self, batch: PagedBatch, sizes: LatentSizes, block_size: int) -> PromptPlan | None:
        """None: all rows are absorbed."""
        key = sizes, block_size
        if key not in self._known:
            self._known[key] = plan(batch, sizes, block_size)
        return self._known[key]


def plannable(batch: PagedBatch) -> bool:
    """Whether a plan may find anything: a piece of a prompt whose length the host knows."""
    return batch.max_query > 1 and bool(batch.starts) and not batch.singly


def plan_of(
    layer: MlaLayer, q_TAD: Tensor, cache_NBC: Tensor, batch: PagedBatch, queries: int
) -> PromptPlan | None:
    """With so many rows of a tile; None: all rows are absorbed. Latents of another dtype than their weights stay so,
    but those in 8 bits."""
    alike = q_TAD.dtype is layer.up_k.dtype and (cache_NBC.dtype is q_TAD.dtype or is_eight(cache_NBC.dtype))
    if not plannable(batch) or not alike:
        return None
    plans = batch.handle if isinstance(batch.handle, PromptPlans) else PromptPlans()
    return plans.of(batch, LatentSizes.of(layer, queries), cache_NBC.shape[1])


def plan(batch: PagedBatch, sizes: LatentSizes, block_size: int) -> PromptPlan | None:
    counts = [end - first for first, end in pairwise(batch.starts)]
    goes_up = [sizes.go_up(*one) for one in zip(counts, batch.contexts, strict=True)]
    if not any(goes_up):
        return None
    rest = [(s, count) for s, count in enumerate(counts) if not goes_up[s]]
    together = _together([s for s, up in enumerate(goes_up) if up], batch.contexts)
    prompts = tuple(_prompts(batch, some, sizes.queries, block_size) for some in together)
    return PromptPlan(prompts, part_of(batch, rest) if rest else None)


def _together(chosen: list[int], contexts: tuple[int, ...]) -> Iterator[list[int]]:
    """In order, as many as have rows enough, at least one."""
    some, rows = list[int](), 0
    for s in chosen:
        if some and rows + contexts[s] > scratch.TOGETHER:
            yield some
            some, rows = [], 0
        some.append(s)
        rows += contexts[s]
    yield some


def _prompts(batch: PagedBatch, chosen: list[int], queries: int, block_size: int) -> LatentPrompts:
    within_B = torch.arange(block_size, device=batch.block_table_SB.device)
    rows, tiles, first_key = list[Tensor](), list[tuple[int, int, int, int]](), 0
    for s in chosen:
        (first, end), context = batch.starts[s : s + 2], batch.contexts[s]
        block_N = batch.block_table_SB[s, : -(-context // block_size)].long()
        rows.append((block_N[:, None] * block_size + within_B).flatten()[:context])
        before = context - (end - first)
        tiles += [
            (first + at, min(queries, end - first - at), before + at, first_key)
            for at in range(0, end - first, queries)
        ]
        first_key += context
    tiles.sort(key=lambda tile: -tile[2])  # what takes longest begins first
    tile_N4 = on_device(batch, [number for tile in tiles for number in tile]).view(-1, 4)
    return LatentPrompts(torch.cat(rows) if len(rows) > 1 else rows[0], tile_N4)
