"""A drafter that was told the answers and spoils some of them, for every node that is built meanwhile."""

import random

import pytest

from afserve.engine.draft.drafter import NO_DRAFT, Draft
from afserve.engine.draft.drafting import Drafting
from afserve.engine.draft.price import FixedPrice


class ToldDrafter:
    """`texts` are prompts with their answers. Every length of a confirmed run is met."""

    name = "told"

    def __init__(self, texts, wrong=0.3):
        self._texts, self._wrong, self._random = texts, wrong, random.Random(3)

    def guess(self, sequence, most):
        length = len(sequence.tokens)
        known = next((text for text in self._texts if text[:length] == tuple(sequence.tokens)), ())
        following = known[length:][: self._random.randint(0, most)]
        if not following:
            return NO_DRAFT
        spoiled = [(t + 1) % 200 if self._random.random() < self._wrong else t for t in following]
        return Draft(spoiled, [0.5] * len(spoiled))

    def forget(self, sequence):
        """It knows nothing of any."""


def tell_nodes(monkeypatch: pytest.MonkeyPatch, texts, most=4):
    """Nodes that are built from now on draft up to `most` tokens."""
    monkeypatch.setattr(
        "afserve.engine.attention_node.open_drafting",
        lambda *_: (Drafting([ToldDrafter(texts)], FixedPrice(), most), None),
    )
