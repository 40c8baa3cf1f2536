"""Where the last tokens of a text stood before: hash chains over a window of tokens, as Lempel-Ziv coders have them.

A suffix tree has a node for each of 24 depths of each token, which are some kilobytes in Python; here a token takes 32
bytes beside itself, the oldest leave by themselves, and a look-up walks a bounded chain of places.
"""

from array import array

DEPTH = 24  # tokens of a run that are compared
WALK = 16  # places that are looked at, the newest
_SPANS = (4, 2)  # runs that are looked up, the longer first; what is found is compared

Found = tuple[int, list[int]]
"""How many of the last tokens stood here before, and behind which places, the newest first; 0 and none if not two."""


class GramPlaces:
    """Of `tokens`, which grow at their end and are read by whoever owns them; the last `size` of those that were read
    are found. A place is the number of tokens before it, counted from the first that there ever was."""

    def __init__(self, tokens: list[int], size: int, known: int = 0) -> None:
        """What stands before `known` is never found. `size` is rounded up to a power of two."""
        self._tokens, self.known = tokens, known
        self.size = 1 << max(size - 1, 1).bit_length()
        self._cut = 0  # tokens that were dropped from the list
        self._newest = [array("q", bytes(8 * self.size)) for _ in _SPANS]
        self._before = [array("q", bytes(8 * self.size)) for _ in _SPANS]

    @property
    def end(self) -> int:
        return self._cut + len(self._tokens)

    def read(self, most: int) -> None:
        """Find from now on what is behind so many more tokens, but not the end: nothing follows there."""
        tokens, cut, mask = self._tokens, self._cut, self.size - 1
        (newest, newest_2), (before, before_2) = self._newest, self._before
        stop = min(self.known + most + 1, self.end)
        for place in range(self.known + 1, stop):
            at = place - cut
            slot = hash(tuple(tokens[max(at - 4, 0) : at])) & mask
            before[place & mask] = newest[slot]
            newest[slot] = place
            slot = hash(tuple(tokens[max(at - 2, 0) : at])) & mask
            before_2[place & mask] = newest_2[slot]
            newest_2[slot] = place
        self.known = max(self.known, stop - 1)

    def trim(self) -> None:
        """Drop tokens that are not found any more. For who owns a list that nobody else reads."""
        if len(self._tokens) > 2 * self.size + DEPTH and self.known - self._cut > self.size + DEPTH:
            gone = self.known - self._cut - self.size - DEPTH
            del self._tokens[:gone]
            self._cut += gone

    def find(self, last: list[int]) -> Found:
        """The longest end of `last`, which has at most DEPTH tokens, that stood here."""
        mask, oldest, end = self.size - 1, self.known - self.size, self.end
        for span, newest, before in zip(_SPANS, self._newest, self._before, strict=True):
            if len(last) < span:
                continue
            place = newest[hash(tuple(last[-span:])) & mask]
            longest, found = span, []
            for _ in range(WALK):
                if place <= max(oldest, 0):
                    break
                if place < end:
                    length = self._alike(last, place - self._cut)
                    if length > longest:
                        longest, found = length, [place]
                    elif length == longest:
                        found.append(place)
                place = before[place & mask]
            if found:
                return longest, found
        return 0, []

    def _alike(self, last: list[int], at: int) -> int:
        """How many of the last tokens stand before there."""
        tokens, most = self._tokens, min(len(last), at)
        if tokens[at - most : at] == last[-most:]:
            return most
        length = 0
        while tokens[at - 1 - length] == last[-1 - length]:
            length += 1
        return length

    def behind(self, place: int, most: int) -> list[int]:
        """The tokens that follow a place."""
        at = place - self._cut
        return self._tokens[at : at + most]
