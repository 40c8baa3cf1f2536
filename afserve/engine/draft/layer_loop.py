"""Drafts by a layer that guesses (`layer.py`): one pass of it behind each step, over the step's rows.

That pass takes prompts too, so that its keys and values are complete; what it writes for rows that were not confirmed
is written over before anybody reads it. Each further token of a draft is one more pass with one row a sequence. A
sequence whose blocks came from where nobody ran the layer is drafted for badly until they are behind it. Shapes: T
rows, S sequences that are drafted for, H hidden.
"""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Generic

import torch
from torch import Tensor

from afserve.engine.draft.layer import DraftLayer
from afserve.engine.draft.layer_drafter import LayerDrafter
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.scheduling.sequence_blocks import SequenceBlocks
from afserve.engine.scheduling.step_plan import StepPlan
from afserve.engine.step.load import ExpertLoad
from afserve.engine.step.runner import StepRun, T
from afserve.engine.step.step_buffers import StepBuffers
from afserve.engine.step.step_input import StepInput, block_tables, paged_batch, slots_of
from afserve.kernels.devices.opened import device_of
from afserve.kernels.paged import PagedBatch
from afserve.kernels.stack import DraftChain
from afserve.models.vision.sections import SectionedRotary, TokenSpan

KeepKeys = Callable[[Tensor, Tensor, PagedBatch], None]
"""Of tokens, and of the rows that go in with them."""


@dataclass(frozen=True, slots=True)
class _Drafted:
    """A sequence that `most` more tokens are drafted for; `chunk` is its place in the plan. The last row that was
    computed for it is `row` of its pass and stands at `position`; `product` is that of the likelihoods so far."""

    sequence: Sequence
    chunk: int
    row: int
    position: int
    most: int
    product: float = 1.0


class LayerLoop(Generic[T]):
    """Of one micro-batch: what it runs between the tokens of a step and its end. While its `drafter` is not awake it
    keeps keys alone, where the layer can, and then drafts as well later, also for those who find the blocks."""

    reads_rows = True  # of the whole step

    def __init__(
        self,
        drafter: LayerDrafter,
        layer: DraftLayer[T],
        blocks: SequenceBlocks,
        load: ExpertLoad,
        longest: int,
        keep_keys: KeepKeys | None = None,
        sections: SectionedRotary | None = None,
    ) -> None:
        """`sections`: of a layer whose rows turn as the model's do, by places in pictures."""
        self.reads_on, self._keep_keys = keep_keys is not None, keep_keys  # while it rests
        self.drafter, self._layer, self._sections = drafter, layer, sections
        self._blocks, self._load, self._longest = blocks, load, longest
        self._buffers = StepBuffers(device_of(layer.ops.device), longest)
        self.passes = 1  # at most, of those that followed the last step: the first is there without a draft

    def follow(
        self, plan: StepPlan, step: StepInput, x_TH: Tensor, runs: Mapping[int, Many[int]]
    ) -> StepRun[T]:
        """`x_TH` is what the last layer gave for all rows of the step, `runs` the tokens that these gave, by the index
        of a chunk. The step's sequences are in flight meanwhile."""
        (token_T,) = self._buffers.write("tokens", step.tokens, torch.int64, (_following(plan, runs),))
        # Rotary angles are those of the embedded tokens.
        position_T = (step.paged.position_T + 1).clamp_max_(self._longest - 1)
        turns = None
        if step.paged.turns is not None and self._sections is not None:
            spans = [TokenSpan(one.sequence.request.tiles, one.start + 1, one.count) for one in plan.chunks]
            turns = self._sections.rotary_rows(spans)
        paged = replace(step.paged, position_T=position_T, held=None, turns=turns)
        hidden_TH = self._layer.enter(x_TH)
        if self._keep_keys is not None and not self.drafter.awake:
            self._keep_keys(token_T, hidden_TH, paged)
            return hidden_TH
        drafted = list(self._begin(plan, step, runs))
        self.passes = max((one.most for one in drafted), default=1)
        if (chain := self._layer.chain()) is not None:
            self._draft_at_once(chain, plan, drafted, token_T, hidden_TH, paged, step.decodes)
            return hidden_TH
        hidden_TH = yield from self._layer.run_pass(token_T, hidden_TH, paged, step.decodes)
        while drafted:
            hidden_SH = _rows(hidden_TH, [one.row for one in drafted])
            scores_SV = self._layer.scores(hidden_SH)
            tokens = self._layer.target_ids(self._layer.ops.argmax(scores_SV).tolist())
            more = list(self._go_on(drafted, tokens, scores_SV.softmax(1).amax(1).tolist()))
            if more:
                pairs = [(one, tokens[one.row]) for one in more]
                hidden_TH = yield from self._further(pairs, _rows(hidden_SH, [one.row for one in more]))
            drafted = [replace(one, row=row) for row, one in enumerate(more)]
        return hidden_TH

    def _draft_at_once(
        self,
        chain: DraftChain,
        plan: StepPlan,
        drafted: Many[_Drafted],
        token_T: Tensor,
        hidden_TH: Tensor,
        paged: PagedBatch,
        decodes: int,
    ) -> None:
        """All passes in one call."""
        size = self._blocks.pool.block_size
        ends = [[0] * paged.sequences for _ in range(3)]
        for one in drafted:
            further = one.position + one.most - one.sequence.computed
            lacking = further - self._blocks.grow_spare(one.sequence, further)
            values = one.row, one.position + 1, one.most - lacking
            for column, value in zip(ends, values, strict=True):
                column[one.chunk] = value
        tables = [chunk.sequence.blocks for chunk in plan.chunks]
        table_SB = block_tables(tables, size, self._buffers, "grown")
        ends_3S = torch.tensor(ends, dtype=torch.int32)
        paged = replace(paged, block_table_SB=table_SB)
        made = chain.draft_tokens(token_T, hidden_TH, paged, ends_3S, self.drafter.least, size)
        self._load.predicted(
            0, made.expert_RK[: paged.tokens], decodes
        )  # on a CPU, where there are no queues
        if len(further_RK := made.expert_RK[paged.tokens :]):
            self._load.predicted(0, further_RK, len(further_RK))
        tokens, likely = made.token_SD.tolist(), made.likely_SD.tolist()
        for one in drafted:
            for token, confidence in zip(tokens[one.chunk], likely[one.chunk], strict=True):
                if token >= 0:
                    self.drafter.add(one.sequence, token, confidence)

    def _begin(self, plan: StepPlan, step: StepInput, runs: Mapping[int, Many[int]]) -> Iterator[_Drafted]:
        """Those that are drafted for."""
        for index, length, most in self.drafter.begin_runs(plan, runs):
            row = step.paged.starts[index] + length - 2 - plan.chunks[index].start
            yield _Drafted(plan.chunks[index].sequence, index, row, length - 2, most)

    def _go_on(self, drafted: Many[_Drafted], tokens: list[int], likely: list[float]) -> Iterator[_Drafted]:
        """Keeps a token of each; those that go on, by their place in `drafted`."""
        for row, (one, token, confidence) in enumerate(zip(drafted, tokens, likely, strict=True)):
            if token < 0:  # experts gave no sum
                continue
            sequence, position = one.sequence, one.position + 1
            self.drafter.add(sequence, token, confidence)
            product = one.product * confidence
            if one.most == 1 or product < self.drafter.least:
                continue
            known = position + 1 - sequence.computed
            if self._blocks.grow_spare(sequence, known) == known:
                yield _Drafted(sequence, one.chunk, row, position, one.most - 1, product)

    def _further(self, pairs: Many[tuple[_Drafted, int]], hidden_SH: Tensor) -> StepRun[T]:
        """The pass behind the tokens that were drafted last."""
        size = self._blocks.pool.block_size
        tables = [one.sequence.blocks for one, _ in pairs]
        contexts = [one.position + 1 for one, _ in pairs]
        slots = [slot for one, _ in pairs for slot in slots_of(one.sequence.blocks, (one.position,), size)]
        columns = [token for _, token in pairs], contexts, slots
        token_S, position_S, kv_slot_S = self._buffers.write("rows", len(pairs), torch.int64, columns)
        starts = list(range(len(pairs) + 1))
        paged = paged_batch(position_S, kv_slot_S, starts, contexts, tables, size, self._buffers)
        if self._sections is not None and any(one.sequence.request.tiles for one, _ in pairs):
            spans = [TokenSpan(one.sequence.request.tiles, one.position + 1, 1) for one, _ in pairs]
            paged = replace(paged, turns=self._sections.rotary_rows(spans))
        return (yield from self._layer.run_pass(token_S, hidden_SH, paged, len(pairs)))


def _following(plan: StepPlan, runs: Mapping[int, Many[int]]) -> list[int]:
    """The token behind each row of the step; any where nobody knows it."""
    tokens: list[int] = []
    for index, chunk in enumerate(plan.chunks):
        after = chunk.start + 1
        following = chunk.sequence.tokens[after : after + chunk.count]
        if chunk.last:
            following += runs.get(index, ())
            following += [0] * (chunk.count - len(following))
        tokens += following
    return tokens


def _rows(x_TH: Tensor, rows: list[int]) -> Tensor:
    """Those rows; no copy where they follow each other."""
    first, end = rows[0], rows[0] + len(rows)
    if rows == list(range(first, end)):
        return x_TH[first:end]
    return x_TH[torch.tensor(rows, device=x_TH.device)]
