"""Which guessed tokens are verified in a step: those that raise the expected tokens per second. Values in, values out.

A row at the expert nodes costs everybody whose rows are in the same calls; a row at this node costs this node alone. So
what is maximised is the expected tokens of all who wait for these calls, over the seconds of a step, where seconds that
only this node loses count by its share of the tokens.
"""

from collections.abc import Sequence as Many
from typing import NamedTuple


class RowPrices(NamedTuple):
    """Of a step without drafts the `seconds`, and what a further row adds: `own` at this node, `shared` in the experts'
    calls, and `expert` for each distinct expert that it is the first to choose. `untouched` experts of a layer are
    chosen by no row yet, in the mean; of these a further row leaves the share `kept`. All seconds; `expert` is over all
    layers."""

    seconds: float
    own: float
    shared: float
    expert: float
    untouched: float
    kept: float

    def added(self, rows: int) -> float:
        """Seconds by which `rows` further ones make this node's step longer."""
        touched = self.untouched * (1.0 - self.kept**rows)
        return rows * (self.own + self.shared) + self.expert * touched


class Others(NamedTuple):
    """Who is in the same calls: rows that they would have without drafts, and tokens that they make in a step."""

    rows: float = 0.0
    tokens: float = 0.0


NOBODY = Others()


def allot(survivals: Many[Many[float]], rows: int, others: Others, room: int, prices: RowPrices) -> list[int]:
    """The length for each draft. `survivals` has for each token the probability that it and all before it are right,
    so it never rises within a draft.

    The step has `rows` tokens without drafts, and may have `room`. Sorts once: n log n of the tokens.
    """
    ranked = sorted(
        ((chance, index) for index, draft in enumerate(survivals) for chance in draft),
        key=lambda one: -one[0],
    )[: max(0, room - rows)]
    own = prices.own * (rows / (rows + others.rows) if rows else 1.0)
    tokens, seconds, untouched = rows + others.tokens, prices.seconds, prices.untouched
    best, taken = tokens / seconds, 0
    least = own + prices.shared  # what any further row costs at least
    for count, (chance, _) in enumerate(ranked, 1):
        if chance <= best * least or chance <= 0.0:
            break
        left = untouched * prices.kept
        seconds += least + prices.expert * (untouched - left)
        tokens, untouched = tokens + chance, left
        if tokens / seconds > best:
            best, taken = tokens / seconds, count
    lengths = [0] * len(survivals)
    for _, index in ranked[:taken]:
        lengths[index] += 1
    return lengths
