"""Suffix decoding (arXiv 2411.04975): what followed the longest end of a text before, in it and in earlier answers.

Of the newest places where that end stood, the token that follows most often is guessed, then the one that most often
follows both, and so on, as a tree that counts suffixes has it. A draft ends where the product of its tokens' shares of
the places is too small.
"""

from collections import Counter
from operator import itemgetter

from afserve.drafts import SuffixOptions
from afserve.engine.draft.drafter import NO_DRAFT, Draft, expected_right
from afserve.engine.draft.earlier_answers import CACHED, END, EarlierAnswers, token_of
from afserve.engine.draft.own_text import OwnTexts
from afserve.engine.draft.places import Found, GramPlaces
from afserve.engine.scheduling.sequence import Sequence

_DEFAULT = SuffixOptions()
# What followed a run of two tokens once follows it again every second time; a longer run, or several places that agree,
# leave less doubt, and where they do not agree it is less than their share. So it is of 61,000 tokens of Python.
_DOUBT = 2


class SuffixDrafter:
    """Of a draft from the text itself and one from earlier answers, that of which more is expected to be right."""

    name = "suffix"

    def __init__(self, options: SuffixOptions = _DEFAULT, cached: int = CACHED) -> None:
        """`cached`: tokens of earlier answers that are kept."""
        self._options, self._own = options, OwnTexts()
        self._earlier = EarlierAnswers(cached) if options.earlier else None

    def guess(self, sequence: Sequence, most: int) -> Draft:
        own = self._followed(*self._own.find(sequence), most)
        if self._earlier is None:
            return own
        return max(
            own,
            self._followed(*self._earlier.find(sequence), most),
            key=lambda draft: expected_right(draft.confidence),
        )

    def _followed(self, places: GramPlaces, found: Found, most: int) -> Draft:
        length, at = found
        most = min(most, int(length * self._options.factor))
        texts = _counted([places.behind(place, most) for place in at])
        tokens: list[int] = []
        confidence: list[float] = []
        product, times = 1.0, len(at)
        for step in range(most):
            best, count = _most_often(texts, step)
            share = count / max(times, 1)
            product *= share
            if not count or product < self._options.least:
                break
            tokens.append(token_of(best))
            doubt = _DOUBT / (length + step + _DOUBT) / count
            confidence.append(share * share * (1.0 - doubt))
            if len(texts) > 1:
                texts = [(text, n) for text, n in texts if len(text) > step and text[step] == best]
            times = count
        return Draft(tokens, confidence) if tokens else NO_DRAFT

    def forget(self, sequence: Sequence) -> None:
        self._own.forget(sequence)
        if self._earlier is not None:
            self._earlier.add(sequence)


Counted = list[tuple[list[int], int]]  # texts, and how many are alike; of alike ones the newest stands first


def _counted(texts: list[list[int]]) -> Counted:
    if len(texts) == 1:
        return [(texts[0], 1)]
    if texts and texts.count(texts[0]) == len(texts):
        return [(texts[0], len(texts))]
    return [(list(text), n) for text, n in Counter(map(tuple, texts)).items()]


def _most_often(texts: Counted, step: int) -> tuple[int, int]:
    """The token that most of them have there, of several the newest text's, and how many; 0 where no text goes on."""
    if len(texts) == 1:
        text, count = texts[0]
        return (text[step], count) if step < len(text) and text[step] != END else (END, 0)
    counts: dict[int, int] = {}
    for text, count in texts:
        if step < len(text) and text[step] != END:
            counts[text[step]] = counts.get(text[step], 0) + count
    return max(counts.items(), key=itemgetter(1), default=(END, 0))
