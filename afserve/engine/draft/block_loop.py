"""Drafts by a head that guesses a block of tokens at once: one pass behind each step, whatever of it is verified.

The head keeps keys and values of all rows of the step, prompts' too; what it writes for rows that were not confirmed,
and for the block itself, is written over before anybody reads it. A block is always as long as the head was trained
for, or as `--draft` says, but for the end of the context and of the free KV blocks: what is guessed of the first places
does not hang on how many are wanted. Shapes: R rows of blocks.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic

import torch
from torch import Tensor

from afserve.engine.draft.layer_drafter import LayerDrafter
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.scheduling.sequence_blocks import SequenceBlocks
from afserve.engine.scheduling.step_plan import StepPlan
from afserve.engine.step.runner import PredictorRunner, StepRun, T
from afserve.engine.step.step_buffers import StepBuffers
from afserve.engine.step.step_input import StepInput, paged_batch, slots_of
from afserve.kernels.cache import LayerCache
from afserve.kernels.devices.opened import device_of
from afserve.kernels.ops import Ops
from afserve.models.drafters.dflash import DflashHead


@dataclass(frozen=True, slots=True)
class _Block:
    """`rows` of them: the `newest` token at `first`, then masks. Up to `most` tokens of it are wanted."""

    sequence: Sequence
    newest: int
    first: int
    rows: int
    most: int


class BlockLoop(Generic[T]):
    """Of one micro-batch, as `LayerLoop`. It waits for nobody: a head has no experts."""

    reads_rows = True  # of the whole step
    reads_on = True  # while it rests, too: blocks have keys of all their tokens, whoever finds them
    passes = 1

    def __init__(
        self,
        drafter: LayerDrafter,
        head: DflashHead,
        caches: Many[LayerCache],
        ops: Ops,
        runner: PredictorRunner[T],
        blocks: SequenceBlocks,
        longest: int,
    ) -> None:
        self.drafter, self._head, self._caches, self._runner = drafter, head, caches, runner
        self._blocks, self._longest, self._spec = blocks, longest, head.spec
        self._guesses = min(self._spec.guesses, drafter.most)
        self._buffers = StepBuffers(device_of(ops.device), longest)

    def follow(
        self, plan: StepPlan, step: StepInput, x_TH: Tensor, runs: Mapping[int, Many[int]]
    ) -> StepRun[T]:
        """`runs` are the tokens that the step gave, by the index of a chunk. Its sequences are in flight meanwhile.
        While the `drafter` is not awake nothing is guessed."""
        self._head.keep_context(self._runner.seen_rows(), self._caches, step.paged)
        if self.drafter.awake and (blocks := list(self._begin(plan, runs))):
            self._guess(blocks)
        yield from ()
        return x_TH

    def _begin(self, plan: StepPlan, runs: Mapping[int, Many[int]]) -> Iterator[_Block]:
        """Of the sequences that are drafted for those that have room."""
        for index, length, most in self.drafter.begin_runs(plan, runs):
            sequence, first = plan.chunks[index].sequence, length - 1
            rows = self._spec.rows(min(self._guesses, self._longest - length))
            known = first - sequence.computed
            rows = self._blocks.grow_spare(sequence, known + rows) - known
            if rows >= self._spec.rows(1):
                yield _Block(sequence, runs[index][-1], first, rows, most)

    def _guess(self, blocks: Many[_Block]) -> None:
        size, lead = self._blocks.pool.block_size, self._spec.rows(0)
        tokens, positions, slots, starts = list[int](), list[int](), list[int](), [0]
        for one in blocks:
            places = range(one.first, one.first + one.rows)
            tokens += [one.newest] + [self._spec.mask] * (one.rows - 1)
            positions += places
            slots += slots_of(one.sequence.blocks, places, size)
            starts.append(starts[-1] + one.rows)
        columns = tokens, positions, slots
        token_R, position_R, kv_slot_R = self._buffers.write("rows", len(tokens), torch.int64, columns)
        contexts = [one.first + one.rows for one in blocks]
        tables = [one.sequence.blocks for one in blocks]
        batch = paged_batch(position_R, kv_slot_R, starts, contexts, tables, size, self._buffers)
        rows_RH = self._head.block_rows(token_R, self._caches, batch)
        guessing = [range(first + lead, end) for first, end in pairwise(starts)]
        found = self._head.guesses(rows_RH, guessing, [one.newest for one in blocks])
        for one, guesses in zip(blocks, found, strict=True):
            for guess in guesses[: one.most]:
                self.drafter.add(one.sequence, *guess)
