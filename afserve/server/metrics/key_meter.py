"""What each key asked and found, and in which tier: a bounded number of keys by name, all others together."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from afserve.engine.scheduling.request import TokenEvent
from afserve.metrics import MetricFamily, totals

MOST = 24  # keys that are shown by name
KEPT = 10_000  # names that are remembered; a key file that is edited while it is served could bring more
OTHERS = "other keys"  # no key has a name with a space


class KeyCounts(NamedTuple):
    """Prompt tokens that were asked, those of them that were found, and those of these that came from below a cache."""

    asked: int = 0
    found: int = 0
    peer: int = 0
    host: int = 0
    disk: int = 0

    def plus(self, other: "KeyCounts") -> "KeyCounts":
        return KeyCounts(*map(sum, zip(self, other, strict=True)))

    def tiers(self) -> dict[str, int]:
        """Tokens found, by where they were."""
        below = {"peer": self.peer, "host": self.host, "disk": self.disk}
        return {"memory": self.found - sum(below.values()), **below}


def counted(prompt_tokens: int, first: TokenEvent) -> KeyCounts:
    """Of a request with this first event. No more is found in all tiers than the prompt has."""
    left = found = min(first.cached_tokens, prompt_tokens)
    below: list[int] = []
    for tokens in first.found_below:
        below.append(min(tokens, left))
        left -= below[-1]
    return KeyCounts(prompt_tokens, found, *below)


class KeyMeter:
    """Prompt tokens of each key, and those that were found; nothing where no key is asked for. Keys are their names.

    Those that asked the most are shown. A request counts once: for its key where that is shown at the time, else for
    the others. A key makes room for one that has asked 1.25 times as much, and goes on from its own counts when it is
    shown again: no count ever goes down.
    """

    def __init__(self, most: int = MOST, kept: int = KEPT) -> None:
        self._most, self._kept = most, kept
        self._tokens: Counter[str] = Counter()  # of every key that is remembered, shown or not
        self._own: dict[str, KeyCounts] = {}  # what was counted while the key was shown
        self._shown: set[str] = set()
        self._others = KeyCounts()

    def count_first(self, key: str, prompt_tokens: int, first: TokenEvent) -> None:
        """A request of this key has its first token."""
        if not key or not prompt_tokens:
            return
        counts = counted(prompt_tokens, first)
        if self._shows(key, prompt_tokens):
            self._own[key] = self._own.get(key, KeyCounts()).plus(counts)
        else:
            self._others = self._others.plus(counts)

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

    def figures(self) -> Mapping[str, KeyCounts]:
        """Those who asked the most first, the others last."""
        shown = sorted(self._shown, key=lambda key: (-self._own[key].asked, key))
        own = [(key, self._own[key]) for key in shown]
        return dict([*own, *([(OTHERS, self._others)] if self._others.asked else ())])

    def families(self) -> Iterator[MetricFamily]:
        figures = self.figures()
        asked = [((("key", key),), counts.asked) for key, counts in figures.items()]
        yield totals("afserve_key_prompt_tokens", "Prompt tokens that got an answer, by key.", asked)
        found = [
            ((("key", key), ("tier", tier)), tokens)
            for key, counts in figures.items()
            for tier, tokens in counts.tiers().items()
        ]
        yield totals("afserve_key_cached_tokens", "Those of them that were found, by where they were.", found)
