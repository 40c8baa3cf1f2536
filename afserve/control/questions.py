"""What a gateway asks all attention nodes for: who keeps a request by this id, what their caches keep. Each answers
once, or leaves.

No socket and no clock: streams are told, answers come in, and whoever asked waits for a future.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from afserve.control.attendance import Attending
from afserve.control.wire.keeping import KeptAnswer
from afserve.control.wire.request_values import ToAttention
from afserve.errors import PeerError
from afserve.member import Life

T = TypeVar("T")
Found = Sequence[tuple[Life, T]]


class GivenAwayError(PeerError):
    """Another gateway has taken the request: its client has connected there."""

    def __init__(self) -> None:
        super().__init__("this request goes on at another connection")


@dataclass(slots=True)
class Asking(Generic[T]):
    """One question. `complete`: every node has answered, none has left meanwhile. `enough` says whether more answers
    are waited for."""

    waiting: list[Attending]
    done: "asyncio.Future[None]"
    enough: Callable[[Found[T]], bool]
    found: list[tuple[Life, T]] = field(default_factory=list)
    complete: bool = True

    def answered(self, stream: Attending, answers: Sequence[T]) -> None:
        self.found += [(stream.life, answer) for answer in answers]
        self._settle(stream)
        if self.enough(self.found):
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


class OpenQuestions(Generic[T]):
    """Of one kind."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._open: dict[int, Asking[T]] = {}

    async def ask(
        self,
        question: Callable[[int], ToAttention],
        streams: Sequence[Attending],
        seconds: float,
        enough: Callable[[Found[T]], bool] = lambda found: False,
    ) -> Asking[T]:
        """`question` is given its number. Returns when what was found is enough, all nodes have answered, or the time
        is over."""
        number = next(self._numbers)
        asking = Asking[T](list(streams), asyncio.get_running_loop().create_future(), enough)
        if not streams:
            return asking
        self._open[number] = asking
        for stream in streams:
            stream.send(question(number))
        try:
            await asyncio.wait({asking.done}, timeout=seconds)
        finally:
            del self._open[number]
        asking.complete = asking.complete and not asking.waiting
        return asking

    def heard(self, stream: Attending, number: int, answers: Sequence[T]) -> None:
        if (asking := self._open.get(number)) is not None:
            asking.answered(stream, answers)

    def left(self, stream: Attending) -> None:
        for asking in list(self._open.values()):
            asking.left(stream)


def all_choices(found: Found[KeptAnswer]) -> bool:
    """Whether every sequence of the request is there."""
    return bool(found) and len({a.keep.choice for _, a in found}) == found[0][1].keep.choices
