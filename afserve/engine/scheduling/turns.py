"""Whose turn it is among prompts of one tenant and priority: a short one does not wait for all that came before it.

The turn of a prompt is how many tokens came so far, its own among them, less those that open prompts have beyond its
own length. That is when it would end if every open prompt got one token after the other (processor sharing). So equal
prompts are in the order of arrival, and none goes before an elder one that is as short or shorter.

However many come later, a prompt's wait is bounded. Where it has `own` tokens, finds `found` others and m later ones at
most are open at once, it ends within (found + own) * (2 + 1/2 + 1/3 + ... + 1/(m + 1)) tokens of its tenant and
priority. What is thrown out of the cache and computed again comes on top.
"""

from collections.abc import Iterable

Group = tuple[str, int]
"""A tenant's name and a priority: only within one do lengths matter."""


class Turns:
    """Counts what came, in tokens. Nothing that was computed or cancelled has to be told."""

    def __init__(self) -> None:
        self._came: dict[Group, int] = {}

    def next(self, group: Group, tokens: int, others: Iterable[tuple[Group, int]]) -> int:
        """The turn of a prompt that comes now; the lowest is first. `others` are all open prompts, each with its group
        and the tokens that are not computed yet."""
        left = list(others)
        if group not in self._came:
            still = {other for other, _ in left}
            self._came = {other: came for other, came in self._came.items() if other in still}
        came = self._came[group] = self._came.get(group, 0) + tokens
        return came - sum(rest - tokens for other, rest in left if rest > tokens and other == group)

    def again(self, group: Group, tokens: int) -> None:
        """So many of an open prompt have to be computed once more: it keeps its turn."""
        self._came[group] = self._came.get(group, 0) + tokens
