"""What each key asked and found in the caches: a bounded number of keys by name, all others together."""

from collections import Counter
from collections.abc import Iterator, Mapping

from afserve.metrics import MetricFamily, totals

MOST = 24  # keys that are shown by name
KEPT = 10_000  # names that are remembered; a key file that is edited while it is served could bring more
OTHERS = "other keys"  # no key has a name with a space


class KeyMeter:
    """Prompt tokens of each key, and those that were found; nothing where no key is asked for. Keys are their names.

    Those that asked the most are shown. A request counts once: for its key where that is shown at the time, else for
    the others. A key makes room for one that has asked 1.25 times as much, and goes on from its own counts when it is
    shown again: no count ever goes down.
    """

    def __init__(self, most: int = MOST, kept: int = KEPT) -> None:
        self._most, self._kept = most, kept
        self._tokens: Counter[str] = Counter()  # of every key that is remembered, shown or not
        self._own: dict[str, tuple[int, int]] = {}  # what was counted while the key was shown
        self._shown: set[str] = set()
        self._others = (0, 0)

    def count_first(self, key: str, prompt_tokens: int, cached_tokens: int) -> None:
        """A request of this key has its first token."""
        if not key or not prompt_tokens:
            return
        counted = prompt_tokens, min(cached_tokens, prompt_tokens)
        if self._shows(key, prompt_tokens):
            self._own[key] = _sum(self._own.get(key, (0, 0)), counted)
        else:
            self._others = _sum(self._others, counted)

    def _shows(self, key: str, prompt_tokens: int) -> bool:
        if key not in self._tokens and len(self._tokens) >= self._kept:
            return False
        self._tokens[key] += prompt_tokens
        if key in self._shown:
            return True
        if len(self._shown) >= self._most:
            least = min(self._shown, key=self._tokens.__getitem__)
            if 4 * self._tokens[key] < 5 * self._tokens[least]:
                return False
            self._shown.remove(least)
        self._shown.add(key)
        return True

    def figures(self) -> Mapping[str, tuple[int, int]]:
        """(prompt tokens, those of them that were found), those who asked the most first, the others last."""
        shown = sorted(self._shown, key=lambda key: (-self._own[key][0], key))
        own = [(key, self._own[key]) for key in shown]
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
