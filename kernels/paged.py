"""The integers that describe one batch over a paged KV cache, as tensors every kernel reads.

Shapes: T tokens in the batch, S sequences, B most blocks per sequence, N blocks in the cache.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from afserve.kernels.devices.opened import device_of


class ChosenRows:
    """What the last layer with an indexer chose (`indexer.chosen_batch`); None: all that tokens see. `taken` is what
    another device chose, of which `rows` is a copy."""

    def __init__(self) -> None:
        self.rows: PagedBatch | None = None
        self.taken: PagedBatch | None = None


class RotaryRows(NamedTuple):
    """Cos and sin of each row of a batch, float32, in the place of a layer's tables; row_T counts them from 0."""

    cos_TD: Tensor
    sin_TD: Tensor
    row_T: Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Tokens of one step. Sequence s owns tokens query_start_S1[s] : query_start_S1[s + 1].

    position_T     int64, position of each token in its sequence
    kv_slot_T      int64, block * block_size + offset where the token's key and value go
    query_start_S1 int32, S + 1 entries, first 0, last T
    context_S      int32, length of each sequence including this step's tokens
    block_table_SB int32, block ids in order; entries past the context are never read

    starts and contexts are query_start_S1 and context_S as the host knows them, for who would have to wait for a device
    to read those; empty where nobody said.

    Of the sequences that are `held` states stay in the cache as they are (`HeldStates`). `singly`: every token has the
    bits that it has as the only one of its sequence, also where a backend computes several in another way.

    `turns` are there where the rotary embedding does not turn all rows by position_T; they are of every layer that has
    one. Single ops read them, and no fused half.

    `chosen` goes from a layer with an indexer to those behind it that attend the same rows; it is of one step. `copies`
    are this batch on further devices of a node, by their numbers.

    `handle` is what a backend made of the tensors (`Ops.bind_batch`); None: every op looks them up. `replace` drops it.
    """

    position_T: Tensor
    kv_slot_T: Tensor
    query_start_S1: Tensor
    context_S: Tensor
    block_table_SB: Tensor
    max_query: int
    max_context: int
    starts: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    held: "HeldStates | None" = None
    singly: bool = False
    turns: RotaryRows | None = None
    chosen: ChosenRows = field(default_factory=ChosenRows, init=False, repr=False, compare=False)
    copies: "dict[int, PagedBatch]" = field(default_factory=dict, init=False, repr=False, compare=False)
    handle: object | None = field(default=None, init=False, repr=False, compare=False)

    def with_handle(self, handle: object) -> "PagedBatch":
        """For backends: the same batch, whose tensors `handle` knows."""
        bound = PagedBatch(  # field by field: `replace` takes twice as long, once per step
            self.position_T,
            self.kv_slot_T,
            self.query_start_S1,
            self.context_S,
            self.block_table_SB,
            self.max_query,
            self.max_context,
            self.starts,
            self.contexts,
            self.held,
            self.singly,
            self.turns,
        )
        object.__setattr__(bound, "handle", handle)
        object.__setattr__(bound, "chosen", self.chosen)
        object.__setattr__(bound, "copies", self.copies)
        return bound

    @property
    def tokens(self) -> int:
        return self.position_T.shape[0]

    @property
    def sequences(self) -> int:
        return self.context_S.shape[0]


def sequences(batch: PagedBatch, block_size: int) -> list[tuple[int, int, int, Tensor]]:
    """(first token, past-the-last token, context, block ids) of every sequence."""
    starts = batch.starts or batch.query_start_S1.tolist()
    contexts = batch.contexts if batch.starts else batch.context_S.tolist()
    return [
        (starts[s], starts[s + 1], context, batch.block_table_SB[s, : -(-context // block_size)].long())
        for s, context in enumerate(contexts)
    ]


def visible(queries: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """Causal mask of the last `queries` of `context` positions; `window` counts the token itself."""
    query = torch.arange(context - queries, context, device=device)[:, None]
    key = torch.arange(context, device=device)[None, :]
    mask = key <= query
    if window is not None:
        mask &= key > query - window
    return mask


def unmasked(batch: PagedBatch) -> PagedBatch:
    """The same rows, each of which sees the whole context of its sequence, so those behind it too: to attention it is
    the last of a sequence of its own. The batch has its host integers."""
    counts = [end - first for first, end in itertools.pairwise(batch.starts)]
    sequence_T = on_device(batch, [s for s, count in enumerate(counts) for _ in range(count)]).long()
    contexts = tuple(c for c, count in zip(batch.contexts, counts, strict=True) for _ in range(count))
    starts = tuple(range(batch.tokens + 1))
    return replace(
        batch,
        query_start_S1=on_device(batch, list(starts)),
        context_S=batch.context_S[sequence_T],
        block_table_SB=batch.block_table_SB[sequence_T],
        max_query=1,
        starts=starts,
        contexts=contexts,
    )


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Some rows of a batch, `row_R` int64, and these as a batch."""

    row_R: Tensor
    batch: PagedBatch


def part_of(batch: PagedBatch, counts: Sequence[tuple[int, int]]) -> BatchPart:
    """The first rows of some sequences: (sequence, how many), in order. The batch has its host integers."""
    rows: list[int] = []
    starts, contexts = [0], []
    for sequence, count in counts:
        first, end = batch.starts[sequence : sequence + 2]
        rows += range(first, first + count)
        starts.append(len(rows))
        contexts.append(batch.contexts[sequence] - (end - first) + count)
    row_R, sequence_P = on_device(batch, rows).long(), on_device(batch, [sequence for sequence, _ in counts])
    part = PagedBatch(
        batch.position_T[row_R],
        batch.kv_slot_T[row_R],
        on_device(batch, starts),
        on_device(batch, contexts),
        batch.block_table_SB[sequence_P],
        max(count for _, count in counts),
        max(contexts),
        tuple(starts),
        tuple(contexts),
        singly=True,
    )
    return BatchPart(row_R, part)


def on_device(batch: PagedBatch, numbers: list[int]) -> Tensor:
    """int32 where the batch is: a copy for which the host does not wait."""
    where = batch.position_T.device
    pinned = device_of(where).pinned(len(numbers), torch.int32)
    pinned.numpy()[:] = numbers
    return pinned.to(where, non_blocking=True)


@dataclass(frozen=True, slots=True)
class HeldParts:
    """`others` are the sequences of a batch that are not held, if there are any, `held` those that are, and `before_S`
    int64 the positions before the first tokens of those. `aside` has the same rows over copies of one block each, that
    at `before_S`, from position 1 on."""

    others: BatchPart | None
    held: BatchPart
    before_S: Tensor
    aside: PagedBatch


class HeldStates:
    """Sequences of one batch of which it is not known yet how many tokens count. Recurrent states cannot go back, so
    layers that have them compute such rows beside the cache, and keep what they need to move on by those that count."""

    def __init__(self, sequences: tuple[int, ...]) -> None:
        """By their index in the batch, in order; each has tokens before these."""
        self._sequences = sequences
        self._parts: HeldParts | None = None
        self._waiting: list[Callable[[BatchPart], object]] = []

    def split(self, batch: PagedBatch) -> HeldParts:
        """`batch` is the one that this belongs to."""
        if self._parts is None:
            sizes = [(s, batch.starts[s + 1] - batch.starts[s]) for s in range(batch.sequences)]
            others = [size for size in sizes if size[0] not in self._sequences]
            held = part_of(batch, [sizes[s] for s in self._sequences])
            first_S = held.batch.position_T[held.batch.query_start_S1[:-1]]
            rest = part_of(batch, others) if others else None
            self._parts = HeldParts(rest, held, first_S - 1, _aside(held.batch))
        return self._parts

    def wait(self, layer: Callable[[BatchPart], object]) -> None:
        """Once it is known, `layer` is told which of the rows that are held count, as a part of their batch."""
        self._waiting.append(layer)

    def move_on(self, counts: Sequence[int]) -> None:
        """Of each sequence so many of the first tokens count. Once, before anybody reads these blocks again."""
        counted = [(at, count) for at, count in enumerate(counts) if count]
        if self._parts is not None and counted:
            part = part_of(self._parts.held.batch, counted)
            for layer in self._waiting:
                layer(part)
        self._waiting.clear()


def _aside(batch: PagedBatch) -> PagedBatch:
    counts = [end - first for first, end in itertools.pairwise(batch.starts)]
    positions = [1 + at for count in counts for at in range(count)]
    contexts = [1 + count for count in counts]
    position_T = on_device(batch, positions).long()
    table_S1 = on_device(batch, list(range(len(counts))))[:, None]
    return PagedBatch(
        position_T,
        position_T,
        batch.query_start_S1,
        on_device(batch, contexts),
        table_S1,
        batch.max_query,
        batch.max_query + 1,
        batch.starts,
        tuple(contexts),
        singly=True,
    )
