"""Drafts by a small model beside the served one (`draft_model.py`): behind each step it reads the newest tokens.

It reads prompts too, in pieces of its own; who has to wait for that is not drafted for yet. What fails here is logged
once, and nobody is drafted for until it is tried again.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

from torch import Tensor

from afserve.adviser import Adviser
from afserve.clock import Clock, MonotonicClock
from afserve.engine.draft.draft_model import DraftModel, Text
from afserve.engine.draft.layer_drafter import LayerDrafter
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.scheduling.step_plan import Chunk, StepPlan
from afserve.engine.step.runner import StepRun, T
from afserve.engine.step.step_input import StepInput

_NOBODY: tuple[int, ...] = ()


@dataclass(slots=True)
class _Drafted:
    """`most` tokens are drafted for it; 0: it is only read. `product` is that of the likelihoods so far."""

    sequence: Sequence
    text: Text
    most: int
    product: float = 1.0


class ModelLoop:
    """Of all micro-batches of a node: it waits for nobody, so there is never one in the middle of another."""

    reads_rows = False
    reads_on = False  # while it rests: it reads later what it has missed

    def __init__(self, drafter: LayerDrafter, model: DraftModel, clock: Clock | None = None) -> None:
        self.drafter, self._model = drafter, model
        self._clock, self._adviser = clock or MonotonicClock(), Adviser("the draft model")
        drafter.on_forget = model.forget
        self.passes = 1  # at most, of those that followed the last step

    def follow(
        self, plan: StepPlan, step: StepInput, x_TH: Tensor, runs: Mapping[int, Many[int]]
    ) -> StepRun[T]:
        """As `LayerLoop.follow`; of the step it wants no rows."""
        self._adviser.ask(self._clock.now(), lambda: self._draft(plan, runs), None)
        yield from ()
        return x_TH

    def _draft(self, plan: StepPlan, runs: Mapping[int, Many[int]]) -> None:
        most = {index: most for index, _, most in self.drafter.begin_runs(plan, runs)}
        self.passes = max(most.values(), default=1)
        live = self._texts(plan, runs, most)
        guesses = self._model.read_on([(one.text, one.most > 0) for one in live])
        while live:
            further = list[tuple[_Drafted, int]]()
            for one, (token, chance) in zip(live, guesses, strict=True):
                if token >= 0:
                    self.drafter.add(one.sequence, token, chance)
                    one.most, one.product = one.most - 1, one.product * chance
                    if one.most and one.product >= self.drafter.least:
                        further.append((one, token))
            live = [one for one, _ in further]
            guesses = self._model.guess_on([(one.text, token) for one, token in further])

    def _texts(
        self, plan: StepPlan, runs: Mapping[int, Many[int]], most: Mapping[int, int]
    ) -> list[_Drafted]:
        """What is read, in its order: those that are drafted for, and of all those first that lack little."""
        found = list[_Drafted]()
        for index, chunk in enumerate(plan.chunks):
            if _is_read(chunk):
                known = [*chunk.sequence.tokens, *runs.get(index, _NOBODY)]
                text = self._model.text_of(chunk.sequence, known)
                if text is not None:
                    found.append(_Drafted(chunk.sequence, text, most.get(index, 0)))
        found.sort(key=lambda one: (not one.most, one.text.sequence.pending))
        return found


def _is_read(chunk: Chunk) -> bool:
    params = chunk.sequence.request.params
    return params.draft != 0 and params.max_tokens > 1 and not chunk.sequence.cancelled
