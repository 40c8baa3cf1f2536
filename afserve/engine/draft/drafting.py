"""Between two steps of a micro-batch: who guesses, how much of it is verified, and what came of it.

Whatever fails here is logged once, and nobody drafts for a while: no answer needs a draft.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many

from afserve.adviser import Adviser
from afserve.drafts import DraftChoice, DraftMethod
from afserve.engine.draft.adaptive_price import AdaptivePrice
from afserve.engine.draft.counts import DraftCounts
from afserve.engine.draft.drafter import Drafter
from afserve.engine.draft.forced import ForcedDrafter
from afserve.engine.draft.layer_loop import LayerDrafter
from afserve.engine.draft.ngram import NgramDrafter
from afserve.engine.draft.prediction import PredictionDrafter
from afserve.engine.draft.price import Candidate, DraftPrice, FixedPrice, RanStep
from afserve.engine.draft.spoiled import SpoiledDrafter
from afserve.engine.draft.suffix import SuffixDrafter
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.stats.drafts import DraftStats
from afserve.spec import ModelSpec


class Drafting:
    """Of a whole node: its micro-batches share drafters and price. Of several that have an idea that one is believed of
    which the most tokens are expected to be right. Where nothing was worth a row, nobody is asked for some steps."""

    def __init__(self, drafters: Many[Drafter], price: DraftPrice, most: int) -> None:
        self._drafters, self._price, self._most = drafters, price, most
        self._left = self._rest = 0  # steps until somebody is asked again, and how many these were
        # By order, what was guessed for the step that runs.
        self._asked: dict[int, tuple[Candidate, Many[int]]] = {}
        self._counts = DraftCounts()
        self._adviser = Adviser("drafting")

    def due(self) -> bool:
        """Once before each step: whether it may have drafts."""
        self._left -= 1
        return self._left < 0

    def propose(self, sequences: Many[Sequence], room: int, clock: Callable[[], float]) -> None:
        """Sets the drafts of those that decode in the next step, which may have `room` tokens."""
        if not self._adviser.ask(clock(), lambda: self._propose(sequences, room, clock), False):
            for sequence in sequences:
                sequence.draft.clear()

    def _propose(self, sequences: Many[Sequence], room: int, clock: Callable[[], float]) -> bool:
        began, found = clock(), list[tuple[Sequence, Many[int], Candidate]]()
        chosen = self._price.whom_to_ask([sequence.order for sequence in sequences])
        for sequence in sequences:
            if sequence.order not in chosen:
                sequence.draft.clear()
                continue
            left = sequence.prompt_length + sequence.request.params.max_tokens - len(sequence.tokens) - 1
            wanted = sequence.request.params.draft
            most = min(self._most, left) if wanted is None else min(self._most, left, wanted)
            if most > 0 and (ideas := self._ideas(sequence, most)):
                best = ideas[0]
                if len(ideas) > 1:
                    best = max(ideas, key=lambda idea: self._price.expected(idea[1]))
                found.append((sequence, *best))
        self._price.guesses_took(len(chosen), clock() - began)
        candidates = [candidate for *_, candidate in found]
        lengths = self._price.lengths(len(sequences), room, candidates) if found else []
        for (sequence, tokens, candidate), length in zip(found, lengths, strict=True):
            sequence.draft[:] = tokens[:length]
            self._asked[sequence.order] = candidate, tokens
        if sequences:
            self._rest = 0 if any(lengths) else min(2 * self._rest + 1, self._price.longest_rest)
            self._left = self._rest
        return True

    def _ideas(self, sequence: Sequence, most: int) -> list[tuple[Many[int], Candidate]]:
        found: list[tuple[Many[int], Candidate]] = []
        for drafter in self._drafters:
            tokens, confidence = drafter.guess(sequence, most)
            if tokens:
                found.append((tokens, Candidate(sequence.order, drafter.name, confidence)))
        return found

    def settle(self, sequence: Sequence, supposed: int, run: Many[int], now: float) -> str:
        """Its step verified `supposed` tokens of the draft and gave this run. What was guessed beyond them is compared
        as well: that costs nothing, and tells what is worth a row next time. Gives the drafter's name, empty for
        none."""
        asked = self._asked.pop(sequence.order, None)
        if asked is None:
            return ""
        candidate, tokens = asked
        if supposed:
            self._counts.verified(candidate.drafter, supposed, len(run) - 1)
        same = [guess == token for guess, token in zip(tokens, run, strict=False)]
        right = same.index(False) if False in same else len(same)
        tried = min(right + 1, len(same))
        with self._adviser.guarded(now):
            self._price.confirmed(candidate, tried, right)
        return candidate.drafter

    def note_step(self, step: RanStep, now: float) -> None:
        """A step that only decoded is over."""
        with self._adviser.guarded(now):
            self._price.step_measured(step)

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._asked.pop(sequence.order, None)
        self._price.sequence_ended(sequence.order)
        for drafter in self._drafters:
            drafter.forget(sequence)

    def stats(self) -> DraftStats:
        return self._counts.stats()


def open_drafting(choice: DraftChoice, spec: ModelSpec, mtp: LayerDrafter | None = None) -> Drafting | None:
    """None where nobody drafts. `mtp` is told what it says."""
    if choice.method is DraftMethod.OFF:
        return None
    price: DraftPrice = FixedPrice() if choice.tokens else AdaptivePrice(spec.experts, spec.top_k)
    drafters: list[Drafter] = [PredictionDrafter(), ForcedDrafter()]
    if choice.method is DraftMethod.NGRAM:
        drafters.append(NgramDrafter(choice.ngram))
    elif mtp is None or choice.tokens is None:
        drafters.append(SuffixDrafter(choice.suffix))
    drafters += [] if mtp is None else [mtp]
    if choice.synthetic:
        drafters = [SpoiledDrafter(each, choice.synthetic) for each in drafters]
    return Drafting(drafters, price, choice.most)
