"""Whether traffic has a hot set: which share of expert uses memory for 10, 25 or 50 % of the experts would serve.

Least recently used, by layer, whatever memory there really is: the stack distances of Mattson et al., "Evaluation
techniques for storage hierarchies" (IBM Systems Journal 9, 1970), of which only three thresholds are kept. A use costs
a few steps, whatever the number of experts.
"""

from collections.abc import Iterable

SHARES = (0.10, 0.25, 0.50)
"""Of a layer's experts."""


class HotSet:
    """Of one layer. Its slots lie in sections by how lately they were used; the last one has what is in no share."""

    def __init__(self, slots: Iterable[int], shares: tuple[float, ...] = SHARES) -> None:
        left = list(slots)
        ends = [max(1, round(share * len(left))) for share in shares]
        sizes = [end - start for start, end in zip((0, *ends), ends, strict=False)]
        self._sections: list[dict[int, None]] = []  # of each the one used longest ago first
        for size in sizes:
            self._sections.append(dict.fromkeys(reversed(left[:size])))
            left = left[size:]
        self._sections.append(dict.fromkeys(reversed(left)))
        self._of = {slot: at for at, section in enumerate(self._sections) for slot in section}
        self._uses = [0] * len(self._sections)

    def use(self, slot: int) -> None:
        """A slot that nobody had named when this began counts as used longest ago."""
        at = self._of.get(slot, len(self._sections) - 1)
        self._uses[at] += 1
        self._sections[at].pop(slot, None)
        for section in range(at):  # what comes to its head pushes one out at the end
            self._put(section, slot)
            slot = next(iter(self._sections[section]))
            del self._sections[section][slot]
        self._put(at, slot)

    def _put(self, section: int, slot: int) -> None:
        self._sections[section][slot] = None
        self._of[slot] = section

    @property
    def uses(self) -> int:
        return sum(self._uses)

    @property
    def served(self) -> tuple[int, ...]:
        """Uses that memory for each share would have served."""
        return tuple(sum(self._uses[: at + 1]) for at in range(len(self._sections) - 1))
