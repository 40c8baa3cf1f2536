"""Drafts by the checkpoint's layer of multi-token prediction: one pass of it behind each step, over the step's rows.

That pass takes prompts too, so that its keys and values are complete; what it writes for rows that were not confirmed
is written over before anybody reads it. Each further token of a draft is one more pass with one row a sequence. A
sequence whose blocks came from where nobody ran the layer is drafted for badly until they are behind it. Shapes: T
rows, S sequences that are drafted for, H hidden.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np
import torch
from torch import Tensor

from afserve.drafts import DraftChoice
from afserve.engine.draft.drafter import NO_DRAFT, Draft
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.scheduling.sequence_blocks import SequenceBlocks
from afserve.engine.scheduling.step_plan import PROMPT, Chunk, StepPlan
from afserve.engine.step.runner import PredictorRunner, StepRun, T
from afserve.engine.step.step_buffers import StepBuffers
from afserve.engine.step.step_input import StepInput, paged_batch
from afserve.kernels.paged import PagedBatch
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
class _Drafted:
    """A sequence that `most` more tokens are drafted for. The last row that was computed for it is `row` of its pass
    and stands at `position`."""

    sequence: Sequence
    row: int
    position: int
    most: int
    prompt: bool


class MtpLoop(Generic[T]):
    """Of one micro-batch: what it runs between the tokens of a step and its end."""

    def __init__(
        self,
        drafter: MtpDrafter,
        model: AttentionModel,
        runner: PredictorRunner[T],
        blocks: SequenceBlocks,
        choice: DraftChoice,
        longest: int,
    ) -> None:
        """No token is drafted beyond a sequence's first `longest`."""
        assert model.predictor is not None, "`served_spec` gives a model its layer, or refuses"
        self._drafter, self._model, self._predictor, self._runner = drafter, model, model.predictor, runner
        self._blocks, self._choice, self._longest = blocks, choice, longest
        self._buffers = StepBuffers(model.ops.device, longest)

    def follow(
        self, plan: StepPlan, step: StepInput, x_TH: Tensor, runs: Mapping[int, Many[int]]
    ) -> StepRun[T]:
        """`x_TH` is what the last layer gave for all rows of the step, `runs` the tokens that these gave, by the index
        of a chunk. The step's sequences are in flight meanwhile."""
        (token_T,) = self._buffers.write("tokens", step.tokens, np.int64, (_following(plan, runs),))
        # Rotary angles are those of the embedded tokens.
        position_T = (step.paged.position_T + 1).clamp_max_(self._longest - 1)
        paged = replace(step.paged, position_T=position_T, held=None)
        hidden_TH = yield from self._pass(token_T, self._model.normed(x_TH), paged, step.decodes)
        drafted = list(self._begin(plan, step, runs))
        while drafted:
            hidden_SH = _rows(hidden_TH, [one.row for one in drafted])
            scores_SV = self._model.scores(hidden_SH)
            tokens = self._model.ops.argmax(scores_SV).tolist()
            more = list(self._go_on(drafted, tokens, scores_SV.softmax(1).amax(1).tolist()))
            if more:
                pairs = [(one, tokens[one.row]) for one in more]
                hidden_TH = yield from self._further(pairs, _rows(hidden_SH, [one.row for one in more]))
            drafted = [replace(one, row=row) for row, one in enumerate(more)]
        return hidden_TH

    def _begin(self, plan: StepPlan, step: StepInput, runs: Mapping[int, Many[int]]) -> Iterator[_Drafted]:
        """Those that are drafted for."""
        for index, run in runs.items():
            chunk, sequence = plan.chunks[index], plan.chunks[index].sequence
            length = len(sequence.tokens) + len(run)
            left = sequence.prompt_length + sequence.request.params.max_tokens - length - 1
            most = min(self._wanted(chunk), left, self._longest - length)
            if most > 0 and not sequence.cancelled and sequence.eos_ids.isdisjoint(run):
                self._drafter.begin(sequence, length)
                row = step.paged.starts[index] + length - 2 - chunk.start
                yield _Drafted(sequence, row, length - 2, most, chunk.kind is PROMPT)

    def _wanted(self, chunk: Chunk) -> int:
        """Where the price says how many are verified, one more than it let the last step verify."""
        if self._choice.tokens is not None:
            return self._choice.tokens
        return min(self._choice.most, chunk.supposed + 1)

    def _go_on(self, drafted: Many[_Drafted], tokens: list[int], likely: list[float]) -> Iterator[_Drafted]:
        """Keeps a token of each; those that go on, by their place in `drafted`."""
        for row, (one, token, confidence) in enumerate(zip(drafted, tokens, likely, strict=True)):
            if token < 0:  # experts gave no sum
                continue
            sequence, position = one.sequence, one.position + 1
            self._drafter.add(sequence, token, confidence)
            if one.most > 1 and self._blocks.grow(sequence, position + 1 - sequence.computed):
                yield _Drafted(sequence, row, position, one.most - 1, one.prompt)

    def _further(self, pairs: Many[tuple[_Drafted, int]], hidden_SH: Tensor) -> StepRun[T]:
        """The pass behind the tokens that were drafted last."""
        size = self._blocks.pool.block_size
        tables = [one.sequence.blocks for one, _ in pairs]
        contexts = [one.position + 1 for one, _ in pairs]
        slots = [
            blocks[(c - 1) // size] * size + (c - 1) % size
            for blocks, c in zip(tables, contexts, strict=True)
        ]
        columns = [token for _, token in pairs], contexts, slots
        token_S, position_S, kv_slot_S = self._buffers.write("rows", len(pairs), np.int64, columns)
        starts = list(range(len(pairs) + 1))
        paged = paged_batch(position_S, kv_slot_S, starts, contexts, tables, size, self._buffers)
        decodes = sum(not one.prompt for one, _ in pairs)
        return (yield from self._pass(token_S, hidden_SH, paged, decodes))

    def _pass(self, token_T: Tensor, hidden_TH: Tensor, paged: PagedBatch, decodes: int) -> StepRun[T]:
        """What the next tokens are read of, and the next pass begins with."""
        x_TH = self._predictor.join(self._model.embed(token_T), hidden_TH)
        x_TH = yield from self._runner.run_predictor(x_TH, paged, decodes)
        return self._predictor.close(x_TH)


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
