"""Between two steps of a micro-batch: who guesses, how much of it is verified, and what came of it."""

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Many

from afserve.drafts import DRAFT_TOKENS, DraftChoice, DraftMethod
from afserve.engine.draft.drafter import Drafter
from afserve.engine.draft.forced import ForcedDrafter
from afserve.engine.draft.ngram import NgramDrafter
from afserve.engine.draft.price import Candidate, DraftPrice, FixedPrice
from afserve.engine.draft.suffix import SuffixDrafter
from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.stats import DraftStats
from afserve.kernels.cache import KeptShape, StateShape

log = logging.getLogger("afserve.engine")


class Drafting:
    """Of a whole node: its micro-batches share drafters and price. The first drafter that has an idea is believed."""

    def __init__(self, drafters: Many[Drafter], price: DraftPrice, most: int) -> None:
        self._drafters, self._price, self._most = drafters, price, most
        self._asked: dict[int, Candidate] = {}  # by order, those whose draft is in the step that runs
        self._drafted = self._steps = 0
        self._accepted = [0] * int(DRAFT_TOKENS.high)  # by position

    def propose(self, sequences: Many[Sequence]) -> None:
        """Sets the drafts of those that decode in the next step."""
        found: list[tuple[Sequence, Many[int], Candidate]] = []
        for sequence in sequences:
            left = sequence.prompt_length + sequence.request.params.max_tokens - len(sequence.tokens) - 1
            most = min(self._most, left)
            for drafter in self._drafters if most > 0 else ():
                tokens, confidence = drafter.guess(sequence, most)
                if tokens:
                    found.append((sequence, tokens, Candidate(drafter.name, confidence)))
                    break
        lengths = self._price.lengths(len(sequences), [candidate for *_, candidate in found]) if found else ()
        for (sequence, tokens, candidate), length in zip(found, lengths, strict=True):
            sequence.draft[:] = tokens[:length]
            if length:
                self._asked[sequence.order] = candidate

    def settle(self, sequence: Sequence, supposed: int, run: int) -> None:
        """Its step verified `supposed` tokens of the draft and gave a run of so many."""
        candidate = self._asked.pop(sequence.order, None)
        if candidate is None:
            return
        right = run - 1
        self._drafted += supposed
        self._steps += 1
        for position in range(right):
            self._accepted[position] += 1
        self._price.confirmed(candidate, supposed, right)

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._asked.pop(sequence.order, None)
        for drafter in self._drafters:
            drafter.forget(sequence)

    def stats(self) -> DraftStats:
        return DraftStats(self._steps, self._drafted, sum(self._accepted))


def open_drafting(choice: DraftChoice, keeps: Iterable[KeptShape]) -> Drafting | None:
    """None where nobody drafts. `keeps`: what each layer keeps of a text."""
    if choice.method in (DraftMethod.OFF, DraftMethod.AUTO):
        return None
    if any(isinstance(shape, StateShape) for shape in keeps):
        log.warning(
            "--draft %s rests: this model has layers with a recurrent state, which cannot go back",
            choice.method,
        )
        return None
    found: Drafter = SuffixDrafter() if choice.method is DraftMethod.SUFFIX else NgramDrafter()
    return Drafting([ForcedDrafter(), found], FixedPrice(), choice.most)
