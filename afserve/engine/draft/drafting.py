"""Between two steps of a micro-batch: who guesses, how much of it is verified, and what came of it.

Whatever fails here is logged once, and nobody drafts for a while: no answer needs a draft.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many

from afserve.adviser import Adviser
from afserve.drafts import DRAFT_TOKENS, DraftChoice, DraftMethod
from afserve.engine.draft.adaptive_price import AdaptivePrice
from afserve.engine.draft.counts import DraftCounts
from afserve.engine.draft.drafter import LAYERS, SEARCHERS, Drafter
from afserve.engine.draft.forced import ForcedDrafter
from afserve.engine.draft.layer_drafter import LayerDrafter
from afserve.engine.draft.ngram import NgramDrafter
from afserve.engine.draft.prediction import PredictionDrafter
from afserve.engine.draft.price import Candidate, DraftPrice, FixedPrice, RanStep, Verified
from afserve.engine.draft.spoiled import SpoiledDrafter
from afserve.engine.draft.suffix import SuffixDrafter
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.stats.drafts import DraftStats
from afserve.spec import ModelSpec

_SHORT = 6  # steps that nobody is asked before, where somebody was told what may follow
Ideas = list[tuple[Many[int], Candidate]]
"""What was guessed for one sequence; the one of which a part is verified stands first."""


class Drafting:
    """Of a whole node: its micro-batches share drafters and price. Of several that have an idea that one is believed of
    which the most tokens are expected to be right. Where nothing was worth a row, nobody is asked for some steps."""

    def __init__(
        self, drafters: Many[Drafter], price: DraftPrice, most: int, behind: LayerDrafter | None = None
    ) -> None:
        """`behind` is that of them which guesses behind each step, and only as far as it is verified."""
        self._told = [drafter for drafter in drafters if drafter.name not in SEARCHERS]
        self._searching = [drafter for drafter in drafters if drafter.name in SEARCHERS]
        self._price, self._most, self._behind = price, most, behind
        self._left = 0  # steps until somebody is asked again
        self._rested_seconds = 0.0  # of steps since a step was measured
        self._asking = 0.0  # seconds that looking at the last steps took, searches apart
        # By order, what was guessed for the step that runs.
        self._asked: dict[int, Ideas] = {}
        self._counts = DraftCounts()
        self._adviser = Adviser("drafting")

    def due(self) -> bool:
        """Once before each step: whether it may have drafts."""
        self._left -= 1
        return self._left < 0

    def propose(self, sequences: Many[Sequence], room: int, clock: Callable[[], float]) -> None:
        """Sets the drafts of those that decode in the next step, which may have `room` tokens."""
        began = clock()
        if not self._adviser.ask(clock(), lambda: self._propose(sequences, room, clock), False):
            for sequence in sequences:
                sequence.draft.clear()
        self._asking += clock() - began

    def _propose(self, sequences: Many[Sequence], room: int, clock: Callable[[], float]) -> bool:
        found = list[tuple[Sequence, Ideas]]()
        searched = self._price.whom_to_search([sequence.order for sequence in sequences])
        for sequence in sequences:
            left = sequence.prompt_length + sequence.request.params.max_tokens - len(sequence.tokens) - 1
            wanted = sequence.request.params.draft
            most = min(self._most, left) if wanted is None else min(self._most, left, wanted)
            ideas = self._ideas(self._told, sequence, most) if most > 0 else []
            if most > 0 and sequence.order in searched:
                began = clock()
                ideas += self._ideas(self._searching, sequence, most)
                taken = clock() - began
                self._asking -= taken
                self._price.search_took(sequence.order, taken)
            if ideas:
                if len(ideas) > 1:
                    ideas.sort(key=lambda idea: -self._price.expected(idea[1]))
                found.append((sequence, ideas))
        candidates = [ideas[0][1] for _, ideas in found]
        lengths = self._price.lengths(len(sequences), room, candidates) if found else []
        for (sequence, ideas), length in zip(found, lengths, strict=True):
            sequence.draft[:] = ideas[0][0][:length]
            self._asked[sequence.order] = ideas
            if self._behind is not None and ideas[0][1].drafter == self._behind.name:
                self._behind.choose(sequence.order)
        if sequences:
            self._left = 0 if any(lengths) else self._price.rest
            if self._left > _SHORT and any(s.guide is not None or s.request.prediction for s in sequences):
                self._left = _SHORT
        return True

    def _ideas(self, drafters: Many[Drafter], sequence: Sequence, most: int) -> Ideas:
        found: Ideas = []
        for drafter in drafters:
            tokens, confidence = drafter.guess(sequence, most)
            if tokens:
                found.append((tokens, Candidate(sequence.order, drafter.name, confidence)))
        return found

    @property
    def asked(self) -> bool:
        """Whether anything was guessed for the step that runs."""
        return bool(self._asked)

    def settle(self, sequence: Sequence, supposed: int, run: Many[int], now: float) -> Verified | None:
        """Its step verified `supposed` tokens of the draft and gave this run. What was guessed beyond them is compared
        as well, of other drafters too: that costs nothing, and tells what is worth a row next time. None where nothing
        was verified."""
        asked, instead = self._asked.pop(sequence.order, ()), 0
        for tokens, candidate in asked:
            same = [guess == token for guess, token in zip(tokens, run, strict=False)]
            right = same.index(False) if False in same else len(same)
            with self._adviser.guarded(now):
                self._price.confirmed(candidate, min(right + 1, len(same)), right)
            if candidate.drafter not in LAYERS:
                instead = max(instead, min(right, supposed))
        if not supposed or not asked:
            return None
        drafter, right = asked[0][1].drafter, len(run) - 1
        self._counts.verified(drafter, supposed, right)
        return Verified(drafter, supposed, right, instead if drafter in LAYERS else 0)

    @property
    def left(self) -> int:
        """Further steps that nobody is asked before."""
        return self._left

    def rest_steps(self, seconds: float, count: int) -> None:
        """So many steps are over before which nobody was asked, `due` for the first."""
        self._rested_seconds += seconds
        self._left -= count - 1

    def note_step(self, step: RanStep, clock: Callable[[], float]) -> None:
        """Any other one."""
        began, asking = clock(), max(self._asking, 0.0)
        step = step._replace(rested_seconds=self._rested_seconds, asking=asking)
        self._rested_seconds = 0.0
        with self._adviser.guarded(began):
            self._price.step_measured(step)
        self._asking = clock() - began

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._asked.pop(sequence.order, None)
        self._price.sequence_ended(sequence.order)
        for drafter in (*self._told, *self._searching):
            drafter.forget(sequence)

    def stats(self) -> DraftStats:
        return self._counts.stats()


def open_drafting(
    choice: DraftChoice, spec: ModelSpec, longest: int
) -> tuple[Drafting | None, LayerDrafter | None]:
    """None where nobody drafts; and who is told what is guessed behind steps, of the first `longest` tokens of a
    sequence, or None where nobody does that."""
    if choice.method is DraftMethod.OFF:
        return None, None
    behind = LayerDrafter(choice, longest) if choice.follows else None
    price: DraftPrice = (
        FixedPrice()
        if choice.tokens
        else AdaptivePrice(spec.experts, spec.moe.expected_sent, None if behind is None else behind.trials)
    )
    drafters: list[Drafter] = [PredictionDrafter(), ForcedDrafter()]
    if choice.method is DraftMethod.NGRAM:
        drafters.append(NgramDrafter(choice.ngram))
    elif behind is None or choice.tokens is None:
        drafters.append(SuffixDrafter(choice.suffix))
    drafters += [] if behind is None else [behind]
    if choice.synthetic:
        drafters = [SpoiledDrafter(each, choice.synthetic) for each in drafters]
    most = choice.tokens or int(DRAFT_TOKENS.high)
    return Drafting(drafters, price, most, behind), behind
