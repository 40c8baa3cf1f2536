"""What each key asked and found in the caches: a bounded number of keys by name, all others together."""

from collections import Counter
from collections.abc import Iterator, Mapping

from afserve.metrics import MetricFamily, totals

MOST = 24  # keys with counts of their own
OTHERS = "other keys"  # no key has a name with a space


class KeyMeter:
    """Prompt tokens of each key, and those that were found; nothing where no key is asked for. Keys are their names.

    Those that asked the most have counts of their own. One that comes to be among them is counted from then on, and
    what the one had that makes room goes to the others: no count ever goes down.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._tokens: Counter[str] = Counter()  # of every key; a key file has an end
        self._own: dict[str, tuple[int, int]] = {}
        self._others = (0, 0)

    def count_first(self, key: str, prompt_tokens: int, cached_tokens: int) -> None:
        """A request of this key has its first token."""
        if not key:
            return
        self._tokens[key] += prompt_tokens
        counted = prompt_tokens, min(cached_tokens, prompt_tokens)
        if self._has_own(key):
            self._own[key] = _sum(self._own.get(key, (0, 0)), counted)
        else:
            self._others = _sum(self._others, counted)

    def _has_own(self, key: str) -> bool:
        if key in self._own or len(self._own) < self._most:
            return True
        least = min(self._own, key=self._tokens.__getitem__)
        if self._tokens[key] <= self._tokens[least]:
            return False
        self._others = _sum(self._others, self._own.pop(least))
        return True

    def figures(self) -> Mapping[str, tuple[int, int]]:
        """(prompt tokens, those of them that were found), those who asked the most first, the others last."""
        own = sorted(self._own.items(), key=lambda one: -self._tokens[one[0]])
        return dict([*own, *([(OTHERS, self._others)] if self._others[0] else ())])

    def families(self) -> Iterator[MetricFamily]:
        figures = self.figures()
        for at, name, help in (
            (0, "prompt", "Prompt tokens that got an answer, by key."),
            (1, "cached", "Those of them that were found in caches."),
        ):
            samples = [((("key", key),), counts[at]) for key, counts in figures.items()]
            yield totals(f"afserve_key_{name}_tokens", help, samples)


def _sum(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]
