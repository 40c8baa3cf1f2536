"""What a cache could find of the same requests: those of `bench.agent_hour`, played again over other ways to evict.

    python -m bench.agent_replay [--cache 0.333] [--no-disk]

An hour is played as it is, and noted: when each request began and ended, at which node, with which blocks. Then the
same requests come at the same times to a cache without tiers, that evicts otherwise: the least recently used first,
what nobody asks again first (side requests), what a user has to answer before what a tool does, or, knowing the future,
what is asked last (Belady, 1966: no way to evict finds more of blocks that are alike). Its share bounds all others.
"""

import argparse
import heapq
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.agent_hour import Hour, Note, Scene, live_tokens
from bench.agent_hour_node import BLOCK

NEVER = float("inf")


Key = Callable[[int, int, int, "Note"], tuple[float, ...]]
"""Of a block that nobody holds any more: the number of its release, its place in its chain, itself, whose it was. The
block with the lowest key is evicted first."""


class Replay:
    """A cache of so many blocks."""

    def __init__(self, blocks: int, key: Key) -> None:
        self._free, self._key = blocks, key
        self._held: dict[int, int] = {}
        self._idle: dict[int, tuple[float, ...]] = {}
        self._heap: list[tuple[tuple[float, ...], int]] = []
        self._releases = 0

    def begin(self, one: Note) -> tuple[int, list[int]]:
        """How many of its blocks are found, and all that it holds: as many as there is room for."""
        found = 0
        for name in one.names[: one.asked]:
            if name not in self._held and name not in self._idle:
                break
            found += 1
        mine = list(one.names[:found])
        for name in mine:
            self._idle.pop(name, None)
            self._held[name] = self._held.get(name, 0) + 1
        for name in one.names[found:]:
            if name in self._held or name in self._idle:
                self._idle.pop(name, None)
            elif not self._room():
                break
            self._held[name] = self._held.get(name, 0) + 1
            mine.append(name)
        return found, mine

    def _room(self) -> bool:
        if self._free:
            self._free -= 1
            return True
        while self._heap:
            key, name = heapq.heappop(self._heap)
            if self._idle.get(name) == key:
                del self._idle[name]
                return True
        return False

    def end(self, one: Note, mine: Sequence[int]) -> None:
        for place in range(len(mine) - 1, -1, -1):
            name = mine[place]
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name]
                self._releases += 1
                key = self._idle[name] = self._key(self._releases, place, name, one)
                heapq.heappush(self._heap, (key, name))


def play_again(turns: Sequence[Note], blocks: int, key: Key) -> tuple[int, int]:
    """(blocks of prompts that were asked for, those that were found), of conversations."""
    events = [(one.began, 1, at) for at, one in enumerate(turns)] + [
        (one.ended, 0, at) for at, one in enumerate(turns)
    ]
    cache, holds, asked, found = Replay(blocks, key), dict[int, list[int]](), 0, 0
    for _, begins, at in sorted(events):
        one = turns[at]
        if not begins:
            cache.end(one, holds.pop(at))
            continue
        here, holds[at] = cache.begin(one)
        if one.gap is not None:
            asked, found = asked + one.asked, found + here
    return asked, found


def ways(turns: Sequence[Note]) -> Mapping[str, Key]:
    """Ways to evict. One that knows the future looks it up in these turns."""
    uses: dict[int, list[float]] = {}
    for one in turns:
        for name in one.names[: one.asked]:
            uses.setdefault(name, []).append(one.began)

    def next_use(name: int, now: float) -> float:
        known = uses.get(name, [])
        at = bisect_right(known, now)
        return known[at] if at < len(known) else NEVER

    return {
        "least recently used": lambda release, place, name, one: (release,),
        "side requests first": lambda release, place, name, one: (one.gap is not None, release),
        "what waits for a user before tools": lambda release, place, name, one: (
            one.gap is not None,
            not one.by_user,
            release,
        ),
        "the longest gap first (it is known)": lambda release, place, name, one: (
            -NEVER if one.gap is None else -(one.ended + one.gap),
            -place,
        ),
        "what is asked last first (Belady)": lambda release, place, name, one: (
            -next_use(name, one.ended),
            -place,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.agent_replay", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--cache", type=float, default=1 / 3, help="of what is live")
    parser.add_argument("--no-disk", action="store_true", help="nothing below the cache in the hour itself")
    parser.add_argument("--seconds", type=float, default=1200.0, help="of virtual time")
    options = parser.parse_args()
    scene = Scene("replayed", options.cache, disk=not options.no_disk, seconds=options.seconds, ahead=False)
    with tempfile.TemporaryDirectory() as folder:
        hour = Hour(scene, Path(folder))
        outcome, turns = hour.run(), sorted(hour.notes, key=lambda one: one.began)
    blocks = int(options.cache * live_tokens(scene) // BLOCK)
    print(
        f"the hour itself: {outcome.share:6.1%} of {len(outcome.first):,} turns' prompt tokens, {blocks:,} blocks"
    )
    for name, key in ways(turns).items():
        said = []
        for nodes in (range(scene.nodes), None):
            parts = [turns] if nodes is None else [[one for one in turns if one.node == n] for n in nodes]
            pairs = [play_again(part, blocks // len(parts), key) for part in parts]
            said.append(sum(found for _, found in pairs) / max(1, sum(asked for asked, _ in pairs)))
        print(f"{name:36} {said[0]:6.1%} by node, {said[1]:6.1%} in one cache")


if __name__ == "__main__":
    main()
