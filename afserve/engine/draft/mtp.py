"""Drafts by the checkpoint's layer of multi-token prediction: one pass of it behind each step, over the step's rows.

That pass takes prompts too, so that its keys and values are complete; each further token of a draft is one more pass
with one row a sequence, whose keys and values the next step's pass writes over. A sequence whose blocks came from where
nobody ran the layer is drafted for badly until they are behind it. Shapes: T rows, R rows that are drafted from, H
hidden.
"""

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic

import numpy as np
import torch
from torch import Tensor

from afserve.engine.draft.drafter import NO_DRAFT, Draft
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.scheduling.sequence_blocks import SequenceBlocks
from afserve.engine.scheduling.step_plan import PROMPT, StepPlan
from afserve.engine.step.runner import PredictorRunner, StepRun, T
from afserve.engine.step.step_buffers import StepBuffers
from afserve.engine.step.step_input import StepInput, paged_batch
from afserve.models.decoder import AttentionModel


class MtpDrafter:
    """What was drafted for each sequence behind its last step, by order."""

    name = "mtp"

    def __init__(self) -> None:
        self._made: dict[int, tuple[int, list[int], list[float]]] = {}

    def begin(self, sequence: Sequence, length: int) -> None:
        """What is added next follows the first `length` tokens."""
        self._made[sequence.order] = length, [], []

    def add(self, sequence: Sequence, token: int, confidence: float) -> None:
        _, tokens, likely = self._made[sequence.order]
        tokens.append(token)
        likely.append(confidence)

    def guess(self, sequence: Sequence, most: int) -> Draft:
        length, tokens, confidence = self._made.get(sequence.order, (0, [], []))
        return Draft(tokens[:most], confidence[:most]) if length == len(sequence.tokens) else NO_DRAFT

    def forget(self, sequence: Sequence) -> None:
        self._made.pop(sequence.order, None)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a pass that are of one sequence: of the positions from `first` on, each with the token behind it. `most`
    tokens are drafted from the last one. `source` is where the rows they are made of begin."""

    sequence: Sequence
    first: int
    following: Many[int]
    source: int
    prompt: bool
    most: int

    @property
    def end(self) -> int:
        return self.first + len(self.following)


class MtpLoop(Generic[T]):
    """Of one micro-batch: what it runs between the tokens of a step and its end."""

    def __init__(
        self,
        drafter: MtpDrafter,
        model: AttentionModel,
        runner: PredictorRunner[T],
        blocks: SequenceBlocks,
        most: int,
        longest: int,
    ) -> None:
        """`most` tokens are drafted for a sequence, none of them beyond its first `longest`."""
        assert model.predictor is not None, "`served_spec` gives a model its layer, or refuses"
        self._drafter, self._model, self._predictor, self._runner = drafter, model, model.predictor, runner
        self._blocks, self._most, self._longest = blocks, most, longest
        self._buffers = StepBuffers(model.ops.device, longest)

    def follow(
        self,
        plan: StepPlan,
        step: StepInput,
        x_TH: Tensor,
        runs: Mapping[int, Many[int]],
        failed: Collection[int],
    ) -> StepRun[T]:
        """`x_TH` is what the last layer gave for all rows of the step, `runs` the tokens that these gave, and `failed`
        who gave nothing, by the index of a chunk. The step's sequences are in flight meanwhile."""
        batch = [one for one in self._begin(plan, step, runs, failed) if one.following]
        hidden_TH = self._model.normed(x_TH)
        while batch:
            rows = [row for one in batch for row in range(one.source, one.source + len(one.following))]
            hidden_TH = yield from self._pass(batch, hidden_TH[self._index(rows)])
            batch = self._draft(batch, hidden_TH)
        return hidden_TH

    def _begin(
        self, plan: StepPlan, step: StepInput, runs: Mapping[int, Many[int]], failed: Collection[int]
    ) -> Iterator[_Rows]:
        """Confirmed rows of the step whose next token is known."""
        for index, (chunk, source) in enumerate(zip(plan.chunks, step.paged.starts, strict=False)):
            if index in failed:
                continue
            sequence, start, run = chunk.sequence, chunk.start, runs.get(index, ())
            known = start + chunk.count - chunk.supposed
            following = [*sequence.tokens[start + 1 : known + 1], *run]
            most = self._wanted(sequence, run) if run else 0
            yield _Rows(sequence, start, following, source, chunk.kind is PROMPT, most)

    def _wanted(self, sequence: Sequence, run: Many[int]) -> int:
        """How many tokens are drafted behind `run`."""
        length = len(sequence.tokens) + len(run)
        left = sequence.prompt_length + sequence.request.params.max_tokens - length - 1
        most = min(self._most, left, self._longest - length)
        if most <= 0 or sequence.cancelled or not sequence.eos_ids.isdisjoint(run):
            return 0
        self._drafter.begin(sequence, length)
        return most

    def _pass(self, batch: Many[_Rows], hidden_TH: Tensor) -> StepRun[T]:
        """What the next tokens are read of, and the next pass begins with."""
        size, model = self._blocks.pool.block_size, self._model
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for one in batch:
            blocks = one.sequence.blocks
            tokens += one.following
            positions += range(one.first + 1, one.end + 1)  # rotary angles are those of the embedded tokens
            slots += [blocks[p // size] * size + p % size for p in range(one.first, one.end)]
        starts = [0, *accumulate(len(one.following) for one in batch)]
        contexts, tables = [one.end for one in batch], [one.sequence.blocks for one in batch]
        columns = tokens, positions, slots
        token_T, position_T, kv_slot_T = self._buffers.write("rows", len(tokens), np.int64, columns)
        paged = paged_batch(position_T, kv_slot_T, starts, contexts, tables, size, self._buffers)
        x_TH = self._predictor.join(model.embed(token_T), hidden_TH)
        decodes = sum(len(one.following) for one in batch if not one.prompt)
        x_TH = yield from self._runner.run_predictor(x_TH, paged, decodes)
        return self._predictor.close(x_TH)

    def _draft(self, batch: Many[_Rows], hidden_TH: Tensor) -> list[_Rows]:
        """Keeps the likeliest token behind each sequence, and returns the rows that go on with it."""
        ends = accumulate(len(one.following) for one in batch)
        drafting = [(one, end - 1) for one, end in zip(batch, ends, strict=True) if one.most]
        if not drafting:
            return []
        scores_RV = self._model.scores(hidden_TH[self._index([row for _, row in drafting])])
        chosen_R = self._model.ops.argmax(scores_RV)
        best_R1 = scores_RV.gather(1, chosen_R.clamp_min(0).long()[:, None])
        likely_R = (best_R1.squeeze(1) - scores_RV.logsumexp(1)).exp()
        more = []
        for (one, row), token, likely in zip(drafting, chosen_R.tolist(), likely_R.tolist(), strict=True):
            if token < 0:  # its experts gave no sum
                continue
            self._drafter.add(one.sequence, token, likely)
            if one.most > 1 and self._blocks.grow(one.sequence, one.end + 1 - one.sequence.computed):
                more.append(_Rows(one.sequence, one.end, (token,), row, one.prompt, one.most - 1))
        return more

    def _index(self, rows: list[int]) -> Tensor:
        return torch.tensor(rows, device=self._model.ops.device)
