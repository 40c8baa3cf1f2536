"""`--draft METHOD` without a number: as many tokens as pay, by what acceptance and steps were measured to be.

Where nothing pays, nobody is asked for up to 15 steps, and of those that are asked one token is still tried now and
then, so that a price that was measured in a bad moment is measured again: in one of 16 steps at most, and in one part
of 100 of their time. Of whom nothing is verified is not asked all the time either (`guess_budget.py`).
"""

import math
from collections.abc import Sequence as Many

from afserve.engine.draft.acceptance import Acceptance
from afserve.engine.draft.allotment import Others, allot
from afserve.engine.draft.guess_budget import GuessBudget
from afserve.engine.draft.price import Candidate, RanStep
from afserve.engine.draft.step_costs import ExpertSpread, StepCosts
from afserve.engine.stats import smoothed

_TRIED_STEPS = 16  # asked ones, between two in which something is tried that does not pay
_TRIED_SHARE = 0.01  # of the time
_LATELY = 0.1  # weight of the newest step


class AdaptivePrice:
    """Of a model whose MoE layers have `experts`, of which a row chooses `top_k`. Times come with the steps; it has no
    clock, and no chance: told the same it says the same."""

    longest_rest = 15  # steps: a text that begins to repeat is noticed so late

    def __init__(self, experts: int, top_k: int) -> None:
        self.acceptance = Acceptance()
        self.costs = StepCosts(ExpertSpread(experts, top_k))
        self._budget, self._step_seconds = GuessBudget(), 0.0
        self._resting: dict[int, int] = {}  # by order: steps since it was last verified
        self._since = 0  # steps since something was tried
        self._saved = 0.0  # seconds that may go into trying
        self._plain = self._yield = (
            1.0  # of this node's rows those that are no draft's, and tokens for each; lately
        )

    def whom_to_ask(self, orders: Many[int]) -> set[int]:
        return self._budget.choose(orders, self._step_seconds)

    def guesses_took(self, count: int, seconds: float) -> None:
        self._budget.guesses_took(count, seconds)

    def expected(self, candidate: Candidate) -> float:
        return sum(self.acceptance.survival(candidate))

    def lengths(self, rows: int, room: int, candidates: Many[Candidate]) -> list[int]:
        survivals = [self.acceptance.survival(candidate) for candidate in candidates]
        if not self.costs.known:  # the first step is measured without drafts
            return [0] * len(candidates)
        prices = self.costs.prices(rows)
        found = allot(survivals, rows, self._others(), room, prices)
        self._note_tokens(rows, survivals, found)
        for candidate, length in zip(candidates, found, strict=True):
            if length:
                self._budget.paid(candidate.order)
        self._since += 1
        allowed = _TRIED_SHARE * prices.seconds
        self._saved = min(self._saved + allowed, prices.seconds)
        if candidates and not any(found) and room > rows:
            cost = prices.added(1)
            if self._since >= _TRIED_STEPS and self._saved >= cost:
                self._since, self._saved = 0, self._saved - cost
                found[self._longest_rested(candidates)] = 1
        self._note_rest(candidates, found)
        return found

    def confirmed(self, candidate: Candidate, tried: int, right: int) -> None:
        self.acceptance.learn_outcome(candidate, tried, right)

    def step_measured(self, step: RanStep) -> None:
        self.costs.note_step(step)
        if 0.0 < step.seconds < math.inf:
            self._step_seconds = smoothed(self._step_seconds, step.seconds, _LATELY)

    def sequence_ended(self, order: int) -> None:
        self.acceptance.drop_trend(order)
        self._budget.drop_order(order)
        self._resting.pop(order, None)

    def _others(self) -> Others:
        """They are taken to draft as this node does."""
        pool = self.costs.pool
        return Others(pool * self._plain, pool * self._yield)

    def _note_tokens(self, rows: int, survivals: Many[Many[float]], lengths: Many[int]) -> None:
        expected = sum(sum(draft[:length]) for draft, length in zip(survivals, lengths, strict=True))
        whole = max(1, rows + sum(lengths))
        self._plain += _LATELY * (rows / whole - self._plain)
        self._yield += _LATELY * ((rows + expected) / whole - self._yield)

    def _longest_rested(self, candidates: Many[Candidate]) -> int:
        return max(range(len(candidates)), key=lambda index: self._resting.get(candidates[index].order, 0))

    def _note_rest(self, candidates: Many[Candidate], lengths: Many[int]) -> None:
        for candidate, length in zip(candidates, lengths, strict=True):
            self._resting[candidate.order] = 0 if length else self._resting.get(candidate.order, 0) + 1
