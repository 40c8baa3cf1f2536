"""A step as a value: what a plan of integers says, as the tensors that kernels read.

Shapes: T tokens of the step, S sequences, B most blocks per sequence, R rows whose logits are wanted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from afserve.engine.kv.blocks import GroupTable
from afserve.engine.scheduling.step_plan import DECODE, Chunk, StepPlan
from afserve.engine.step.step_buffers import StepBuffers
from afserve.kernels.paged import HeldStates, PagedBatch


class PlacedRows(NamedTuple):
    """rows_PH in the place of the embeddings of the tokens at_P (int64) of a step; each of `deeper` is added to these
    rows behind one of the first layers."""

    at_P: Tensor
    rows_PH: Tensor
    deeper: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class StepInput:
    """All that a runner knows of a step; made of its plan alone.

    token_T  int64, what is embedded
    paged    positions, places in the cache and block tables, of the first group of KV; `further` those of the others
    row_R    int64, indices of tokens whose logits are wanted: for each chunk all its prompt rows if asked, else, if it
             is sampled, its newest token's and those of the draft behind it. `rows` are the same on the host
    all_rows whether all rows are read of what the last layer gives, and not `row_R` alone
    ends     for each chunk how many of those rows it and the chunks before it have
    decodes  tokens that are decoded or verified: they are the first, the others belong to prompt chunks
    alone    no other micro-batch has anything to run
    shared   the one chunk of a step that needs or gives layers of other nodes
    looked_up_TX  float32, rows of the look-up table of a model that has one; None where nobody needs right ones
    not_looked_up  why nobody gave some of these, by token, where the link does not say it
    placed   rows of pictures; None where no token of the step is of one
    ahead    nobody waits for it: its runner yields None before each layer, and may be told to end there
    """

    token_T: Tensor
    paged: PagedBatch
    row_R: Tensor
    rows: list[int]
    ends: list[int]
    all_rows: bool
    decodes: int
    alone: bool
    shared: Chunk | None
    further: tuple[PagedBatch, ...] = ()
    ahead: bool = False
    looked_up_TX: Tensor | None = None
    not_looked_up: Mapping[int, str] = field(default_factory=dict)
    placed: PlacedRows | None = None

    def move_on(self, counts: Sequence[int]) -> None:
        """Of each sequence with a draft so many tokens count: recurrent states are moved on by those."""
        for paged in (self.paged, *self.further):
            if paged.held is not None:
                paged.held.move_on(counts)

    @property
    def tokens(self) -> int:
        return self.token_T.shape[0]


def build_step(
    plan: StepPlan,
    block_size: int,
    buffers: StepBuffers,
    further: Sequence[GroupTable] = (),
    *,
    every_row: bool = False,
) -> StepInput:
    """All tensors are in `buffers`, until the next step is. `block_size` is that of the first group of KV, `further`
    are the others of a model that has several. `every_row`: somebody reads what the last layer gives for each."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    contexts: list[int] = []
    rows: list[int] = []
    ends: list[int] = []
    for chunk in plan.chunks:
        sequence, start, first = chunk.sequence, chunk.start, len(tokens)
        end = start + chunk.count
        if chunk.kind is DECODE:  # one token, whose logits are always wanted
            tokens.append(sequence.tokens[start])
            positions.append(start)
            slots.append(sequence.blocks[start // block_size] * block_size + start % block_size)
            rows.append(first)
        else:
            tokens += sequence.tokens[start:end]
            if chunk.supposed:
                tokens += sequence.draft[: chunk.supposed]
            positions += range(start, end)
            slots += slots_of(sequence.blocks, range(start, end), block_size)
            if sequence.collects_prompt:
                rows += range(first, len(tokens))
            elif chunk.last:
                rows += range(len(tokens) - 1 - chunk.supposed, len(tokens))
        starts.append(len(tokens))
        contexts.append(end)
        ends.append(len(rows))
    of_rows, count = (tokens, positions, slots, rows), len(tokens)
    token_T, position_T, kv_slot_T, row_R = buffers.write("rows", count, torch.int64, of_rows)
    tables = [chunk.sequence.blocks for chunk in plan.chunks]
    paged = paged_batch(position_T, kv_slot_T, starts, contexts, tables, block_size, buffers, _held(plan))
    return StepInput(
        token_T,
        paged,
        row_R,
        rows,
        ends,
        every_row or len(rows) == len(tokens),
        plan.decodes,
        plan.alone,
        plan.shared,
        tuple(_of_group(plan, group, paged, buffers, at) for at, group in enumerate(further)),
        plan.ahead,
    )


def slots_of(table: Sequence[int], positions: Iterable[int], size: int) -> list[int]:
    """Where a sequence's tokens lie in the cache, by its blocks of `size` tokens."""
    return [table[p // size] * size + p % size for p in positions]


def paged_batch(
    position_T: Tensor,
    kv_slot_T: Tensor,
    starts: list[int],
    contexts: list[int],
    tables: Sequence[list[int]],
    block_size: int,
    room: StepBuffers,
    held: HeldStates | None = None,
) -> PagedBatch:
    """Sequence s has the tokens from `starts[s]` up to `starts[s + 1]`, which are the last of its `contexts[s]`."""
    table, width = _filled(tables)
    columns = starts, contexts, table
    query_start_S1, context_S, table_N = room.write("tables", len(tables), torch.int32, columns, block_size)
    return PagedBatch(
        position_T=position_T,
        kv_slot_T=kv_slot_T,
        query_start_S1=query_start_S1,
        context_S=context_S,
        block_table_SB=table_N.view(-1, width),
        max_query=max(end - start for start, end in pairwise(starts)),
        max_context=max(contexts),
        starts=tuple(starts),
        contexts=tuple(contexts),
        held=held,
    )


def _of_group(plan: StepPlan, group: GroupTable, paged: PagedBatch, room: StepBuffers, at: int) -> PagedBatch:
    """The same tokens over another group's blocks."""
    size = group.block_size
    tables = [group.table(chunk.sequence.blocks) for chunk in plan.chunks]
    slots = [
        slot
        for chunk, table in zip(plan.chunks, tables, strict=True)
        for slot in slots_of(table, range(chunk.start, chunk.start + chunk.count), size)
    ]
    (kv_slot_T,) = room.write(f"rows {at}", len(slots), torch.int64, (slots,))
    table_SB = block_tables(tables, size, room, f"tables {at}")
    return replace(paged, kv_slot_T=kv_slot_T, block_table_SB=table_SB, held=_held(plan))


def block_tables(tables: Sequence[list[int]], block_size: int, room: StepBuffers, name: str) -> Tensor:
    """The blocks of each sequence, filled up to the most that any has."""
    flat, width = _filled(tables)
    (table_N,) = room.write(name, len(tables), torch.int32, (flat,), block_size)
    return table_N.view(-1, width)


def _held(plan: StepPlan) -> HeldStates | None:
    """Those with a draft."""
    return HeldStates(plan.drafted) if plan.drafted else None


def _filled(rows: Sequence[list[int]]) -> tuple[list[int], int]:
    """Row after row, each filled up to the width of the longest."""
    width = max(map(len, rows))
    table: list[int] = []
    for row in rows:
        table += row
        table += [0] * (width - len(row))
    return table, width
