"""`--draft METHOD` without a number: as many tokens as pay, by what acceptance and steps were measured to be.

What does not pay is still tried now and then, each within an allowance: a search of a text (`search_turns.py`), a layer
that guesses behind steps (`layer_trials.py`), and one token, so that a price that was measured in a bad moment is
measured again. All of them take less than 2 parts of 100 of the time.
"""

import math
from collections.abc import Sequence as Many

from afserve.engine.draft.acceptance import Acceptance
from afserve.engine.draft.allotment import Others, allot
from afserve.engine.draft.allowance import Allowance, Usual
from afserve.engine.draft.drafter import LAYERS, SEARCHERS
from afserve.engine.draft.layer_trials import LayerTrials
from afserve.engine.draft.price import Candidate, RanStep
from afserve.engine.draft.search_turns import SearchTurns
from afserve.engine.draft.step_costs import ExpertSpread, StepCosts

_TRIED_STEPS = 16  # asked ones, between two in which a token is tried that does not pay
_TRIED_SHARE = 0.0025  # of the time
_PLAIN_EVERY = 500  # steps with drafts
_LATELY = 0.1  # weight of the newest step
_CHEAPER = 1.1  # times as good: a guess that needs no pass of a layer


class AdaptivePrice:
    """Of a model whose MoE layers have `experts`, of which a row chooses `top_k`. Times come with the steps; it has no
    clock, and no chance: told the same it says the same."""

    def __init__(self, experts: int, top_k: float, layer: LayerTrials | None = None) -> None:
        """`layer`: whether one that guesses behind steps runs, where there is one."""
        self.acceptance = Acceptance()
        self.costs = StepCosts(ExpertSpread(experts, top_k))
        self._searches, self._layer = SearchTurns(), layer
        self._tries = Allowance(_TRIED_SHARE)
        self._resting: dict[int, int] = {}  # by order: steps since it was last verified
        self._since = 0  # steps since something was tried
        self._with_drafts = 0  # steps since one that could have had drafts had none
        self._usual: dict[int, Usual] = {}  # by about how many sequences: a step without drafts
        self._token_seconds = 0.0  # of the last step that only decoded
        # Of this node's rows those that are no draft's, and tokens for each; lately.
        self._plain = self._yield = 1.0

    @property
    def rest(self) -> int:
        awake = self._layer is not None and self._layer.awake
        return 0 if awake else self._searches.rest

    def whom_to_search(self, orders: Many[int]) -> set[int]:
        return self._searches.choose(orders)

    def search_took(self, order: int, seconds: float) -> None:
        self._searches.took(order, seconds)

    def expected(self, candidate: Candidate) -> float:
        expected = sum(self.acceptance.survival(candidate))
        return expected if candidate.drafter in LAYERS else _CHEAPER * expected

    def lengths(self, rows: int, room: int, candidates: Many[Candidate]) -> list[int]:
        survivals = [self.acceptance.survival(candidate) for candidate in candidates]
        if not self.costs.known:  # the first steps are measured without drafts
            return [0] * len(candidates)
        prices = self.costs.prices(rows)
        found = allot(survivals, rows, self._others(), room, prices)
        if any(found) and self._plain_due():
            found = [0] * len(found)
        self._note_tokens(rows, survivals, found)
        self._since += 1
        if candidates and not any(found) and room > rows:
            cost = prices.added(1)
            due = self._since >= _TRIED_STEPS or not self.costs.measured(rows + 1)
            if due and self._tries.saved >= min(cost, self._tries.most):
                self._since = 0
                self._tries.spend(cost)
                found[self._longest_rested(candidates)] = 1
        self._note_rest(candidates, found)
        return found

    def confirmed(self, candidate: Candidate, tried: int, right: int) -> None:
        self.acceptance.learn_outcome(candidate, tried, right)
        if right and candidate.drafter in SEARCHERS:
            self._searches.paid(candidate.order)

    def step_measured(self, step: RanStep) -> None:
        if not (step.rows > 0 and 0.0 < step.seconds < math.inf):
            return
        if not step.mixed:
            self.costs.note_step(step)
        self._book(step)

    def _book(self, step: RanStep) -> None:
        """What drafts brought in this step, and what they took, by who made them."""
        tokens, drafted = step.rows - step.drafted, step.drafted
        share = self.costs.drafts_share(step.rows, drafted) if drafted else 0.0
        usual = self._usual.setdefault(tokens.bit_length(), Usual())
        plain = step.seconds if step.mixed else usual.note(step.seconds * (1.0 - share))
        if not step.mixed:
            self._token_seconds = plain / max(tokens, 1)
        elif not self._token_seconds:
            self._token_seconds = plain / step.rows
        row = plain * share / (1.0 - share) / max(drafted, 1)
        won = {False: 0.0, True: 0.0}  # by whether a layer made them
        for one in step.verified:
            if one.drafter in SEARCHERS or one.drafter in LAYERS:
                rows = one.rows - one.instead
                won[one.drafter in LAYERS] += (one.right - one.instead) * self._token_seconds - rows * row
        passed = plain + step.rested_seconds
        passes = step.passes + step.asking if step.passes else 0.0
        if not step.passes:
            self._searches.asking_took(step.asking)
        self._searches.pass_time(passed, usual.seconds, won[False])
        self._tries.pass_time(passed, usual.seconds)
        if self._layer is None:
            return
        if step.mixed:
            self._layer.note_prompts(passes, won[True])
        else:
            self._layer.note_steps(tokens, passed, usual.seconds, passes, won[True])

    def sequence_ended(self, order: int) -> None:
        self.acceptance.drop_trend(order)
        self._searches.drop_order(order)
        self._resting.pop(order, None)

    def _plain_due(self) -> bool:
        """Where all steps have drafts, nothing tells what their rows take: now and then one goes without."""
        self._with_drafts = (self._with_drafts + 1) % _PLAIN_EVERY
        return not self._with_drafts

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
