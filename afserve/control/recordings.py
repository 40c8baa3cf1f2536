"""What nodes do in the same moment: asked of some of them when somebody looks, and gathered until all have answered.

It knows the numbers of questions and no streams: `tell` carries a question to a node. Who asks while one is under way
gets its answer.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count

from afserve.control.wire.values import Record, Recorded
from afserve.member import MODEL_ROLES, Life
from afserve.tracing.recording import MOST_BYTES

SECONDS = 0.25  # of a recording
MOST_NODES = 8  # of each role
_LATE = 1.0  # seconds that a recording may come after its end; an idle expert node hears within 0.25 s

Tell = Callable[[Life, Record], None]


class Recordings:
    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._numbers = count(1)
        self._number = 0
        self._missing: set[Life] = set()
        self._found: dict[Life, bytes] = {}
        self._complete = asyncio.Event()
        self._taking: asyncio.Task[tuple[bytes, ...]] | None = None

    async def record_nodes(self, serving: Sequence[Life]) -> tuple[bytes, ...]:
        """Of the first MOST_NODES of each role, in this order; those that do not answer in time are left out."""
        if self._taking is None or self._taking.done():
            chosen = [
                each
                for role in MODEL_ROLES
                for each in [m for m in serving if m.node.role is role][:MOST_NODES]
            ]
            self._taking = asyncio.create_task(self._take(chosen))
        return await asyncio.shield(self._taking)

    async def _take(self, chosen: Sequence[Life]) -> tuple[bytes, ...]:
        self._number = next(self._numbers)
        self._missing, self._found = set(chosen), {}
        self._complete.clear()
        for member in chosen:
            self._tell(member, Record(self._number, SECONDS))
        if chosen:
            try:
                await asyncio.wait_for(self._complete.wait(), SECONDS + _LATE)
            except TimeoutError:
                self._missing.clear()
        return tuple(self._found[member] for member in chosen if member in self._found)

    def collect_part(self, member: Life, said: Recorded) -> None:
        """An answer that nobody waits for any more, or that is too large, is nobody's."""
        if said.number == self._number and member in self._missing:
            self._missing.discard(member)
            if len(said.data) <= MOST_BYTES:
                self._found[member] = said.data
            if not self._missing:
                self._complete.set()
