"""What a gateway asks all attention nodes for: who keeps a request by this id. Each answers once, or leaves.

No socket and no clock: streams are told, answers come in, and whoever asked waits for a future.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from afserve.control.attendance import Attending
from afserve.control.wire.keeping import Claim, Claimed, KeptAnswer
from afserve.errors import PeerError
from afserve.member import Life


class GivenAwayError(PeerError):
    """Another gateway has taken the request: its client has connected there."""

    def __init__(self) -> None:
        super().__init__("this request goes on at another connection")


@dataclass(slots=True)
class Asking:
    """One question. `complete`: every node has answered, none has left meanwhile."""

    waiting: list[Attending]
    done: "asyncio.Future[None]"
    found: list[tuple[Life, KeptAnswer]] = field(default_factory=list)
    complete: bool = True

    def answered(self, stream: Attending, answers: Sequence[KeptAnswer]) -> None:
        self.found += [(stream.life, answer) for answer in answers]
        self._settle(stream)
        if self.found and len({a.keep.choice for _, a in self.found}) == self.found[0][1].keep.choices:
            self._finish()

    def left(self, stream: Attending) -> None:
        if stream in self.waiting:
            self.complete = False
            self._settle(stream)

    def _settle(self, stream: Attending) -> None:
        self.waiting = [one for one in self.waiting if one is not stream]
        if not self.waiting:
            self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class Claims:
    def __init__(self) -> None:
        self._numbers = count(1)
        self._open: dict[int, Asking] = {}

    async def ask(self, id: str, streams: Sequence[Attending], seconds: float, *, take: bool) -> Asking:
        """Returns when all sequences are found, all nodes have answered, or the time is over."""
        number = next(self._numbers)
        asking = Asking(list(streams), asyncio.get_running_loop().create_future())
        if not streams:
            return asking
        self._open[number] = asking
        for stream in streams:
            stream.send(Claim(number, id, take))
        try:
            await asyncio.wait({asking.done}, timeout=seconds)
        finally:
            del self._open[number]
        asking.complete = asking.complete and not asking.waiting
        return asking

    def heard(self, stream: Attending, value: Claimed) -> None:
        if (asking := self._open.get(value.query)) is not None:
            asking.answered(stream, value.answers)

    def left(self, stream: Attending) -> None:
        for asking in list(self._open.values()):
            asking.left(stream)
