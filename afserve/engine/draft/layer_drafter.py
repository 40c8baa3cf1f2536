"""What was guessed behind a step, by a layer or by a model beside the served one, until the next step asks for it.

It knows no tensors: who computes the guesses is `layer_loop.py` or `model_loop.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many

from afserve.drafts import DraftChoice
from afserve.engine.draft.drafter import NO_DRAFT, Draft
from afserve.engine.draft.layer_trials import LayerTrials
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.scheduling.step_plan import StepPlan

_IN_VAIN, _PATIENCE = 2, 10  # steps
_UNLIKELY = 0.2  # an adaptive draft ends where all of it is less likely


class WantedLengths:
    """How many tokens a layer guesses for each sequence where the price says how many are verified: one more than the
    last step verified of its own, but no more for a while where that one was in vain twice in a row; and one less than
    before where another's were verified."""

    def __init__(self) -> None:
        self._by_order: dict[int, tuple[int, int]] = {}  # the length, and below 0 steps left without one more

    def note(self, order: int, own: int | None, made: int) -> int:
        """Behind a step that verified so many of the tokens that were `made`; None: none of them, or another's. Gives
        the next length."""
        length, vain = self._by_order.get(order, (1, 0))
        if own is None:
            length = max(length - 1, 1)
        elif vain < 0:
            length, vain = max(own, 1), vain + 1
        else:
            length, vain = own + 1, vain + 1 if own < made else 0
            if vain == _IN_VAIN:
                length, vain = max(own, 1), -_PATIENCE
        self._by_order[order] = length, vain
        return length

    def drop_order(self, order: int) -> None:
        self._by_order.pop(order, None)


class LayerDrafter:
    """What was drafted for each sequence behind its last step, by order."""

    def __init__(self, choice: DraftChoice, longest: int) -> None:
        """No token is drafted beyond a sequence's first `longest`. Where the price says how many are verified, none
        behind what is unlikely, and `trials` say when nothing is drafted at all."""
        self.name, self._choice, self._longest = choice.method.value, choice, longest
        self.most = choice.most  # tokens of one sequence and step
        self.trials = None if choice.tokens else LayerTrials()
        self.least = 0.0 if choice.tokens else _UNLIKELY  # likelihood of a whole draft that goes on
        self.on_forget: Callable[[Sequence], object] = id
        self._made: dict[int, tuple[int, list[int], list[float]]] = {}
        self._lengths = WantedLengths()
        self._chosen: set[int] = set()  # those of whom the next step, or the one that runs, verifies it

    @property
    def awake(self) -> bool:
        """Whether anything may be drafted behind the next step."""
        return self.trials is None or self.trials.awake

    def begin_runs(self, plan: StepPlan, runs: Mapping[int, Many[int]]) -> Iterator[tuple[int, int, int]]:
        """Of the chunks whose step gave tokens (`runs`) those that are drafted for: the index, how many tokens the
        sequence has then, which the draft follows, and the most tokens of that."""
        chosen = {chunk.sequence.order for chunk in plan.chunks} & self._chosen
        self._chosen -= chosen
        for index, run in runs.items():
            sequence = plan.chunks[index].sequence
            own = plan.chunks[index].supposed if sequence.order in chosen else None
            wanted = self._choice.tokens or self._wanted(sequence.order, own)
            length = len(sequence.tokens) + len(run)
            params = sequence.request.params
            left = sequence.prompt_length + params.max_tokens - length - 1
            most = min(wanted, left, self._longest - length)
            most = most if params.draft is None else min(most, params.draft)
            if most > 0 and not sequence.cancelled and sequence.eos_ids.isdisjoint(run):
                self._made[sequence.order] = length, [], []
                yield index, length, most

    def _wanted(self, order: int, own: int | None) -> int:
        """Where each token takes a pass; else all that a pass gives: the price says how many are verified."""
        if self._choice.at_once:
            return self._choice.most
        _, made, _ = self._made.get(order, (0, (), ()))
        return min(self._choice.most, self._lengths.note(order, own, len(made)))

    def add(self, sequence: Sequence, token: int, confidence: float) -> None:
        _, tokens, likely = self._made[sequence.order]
        tokens.append(token)
        likely.append(confidence)

    def guess(self, sequence: Sequence, most: int) -> Draft:
        length, tokens, confidence = self._made.get(sequence.order, (0, [], []))
        if length != len(sequence.tokens):
            return NO_DRAFT
        return Draft(tokens[:most], confidence[:most])

    def choose(self, order: int) -> None:
        """What the next step verifies of this sequence is its draft, and no other drafter's."""
        self._chosen.add(order)

    def forget(self, sequence: Sequence) -> None:
        self._made.pop(sequence.order, None)
        self._chosen.discard(sequence.order)
        self._lengths.drop_order(sequence.order)
        self.on_forget(sequence)
