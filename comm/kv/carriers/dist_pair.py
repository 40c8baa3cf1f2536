"""One process group of two attention nodes over gloo: one of them sends, the other receives.

A thread of its own makes the group and then waits for what is under way, since gloo says that bytes have come only to
who waits for them. A wait that takes too long ends all of the group, and so does any other failure: nothing of it is
used again. It knows tensors of bytes and tags, not what they mean.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from afserve.comm.kv.carriers.dist_meeting import PairStore
from afserve.comm.transports.groups import open_gloo

OWNER, READER = 0, 1  # ranks
MEET_SECONDS = 2.0  # until both have said where they are, and then until they are connected
_CONNECTS = 5  # gloo waits for so many of its timeouts
_MOST_WHY = 160
_NOBODYS = 1 << 30  # a tag under which nothing is sent
_MOMENT = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class PairTransfer:
    """To send or to receive these bytes; `number` is whoever's who is told of its end."""

    number: int
    payload_B: Tensor
    tag: int


class Pair(threading.Thread):
    """`say` brings a key and its value to the other end's `meeting`, an empty key when all is over.

    `done` is called once for all that was asked, with why it failed or nothing, when gloo touches its bytes no more.
    `limit` is in seconds, for each of them.
    """

    def __init__(
        self,
        name: bytes,
        rank: int,
        device: Any,
        limit: float,
        say: Callable[[bytes, int, str, bytes], None],
        done: Callable[[int, str], None],
    ) -> None:
        super().__init__(name="kv-dist", daemon=True)
        self.group_name = name
        self._say = partial(say, name, rank)
        self.meeting = PairStore(self._say, MEET_SECONDS)
        self._rank, self._device, self._limit, self._done = rank, device, timedelta(seconds=limit), done
        self._lock = threading.Lock()
        self._group: Any = None
        self._over = ""  # why it has ended
        self._early: list[PairTransfer] = []  # before there is a group
        self._waited: PairTransfer | None = None
        self._under_way: SimpleQueue[tuple[PairTransfer, Any] | None] = SimpleQueue()

    # ---- by the carrier's thread

    def ask(self, asked: PairTransfer) -> str:
        """Why it cannot be done any more, or nothing; then `done` hears of it."""
        with self._lock:
            if not self._over and self._group is None:
                self._early.append(asked)
            else:
                self._post(asked)
            return self._over

    def end(self, why: str) -> None:
        """Takes a hundredth of a second; what is under way fails soon after."""
        with self._lock:
            self._over = self._over or why
            group, early, self._early = self._group, self._early, []
        for one in early:  # gloo does not know their bytes yet
            self._done(one.number, self._over)
        self.meeting.end()
        self._under_way.put(None)
        if group is not None:
            _cut(group, 1 - self._rank)

    # ---- by its own

    def run(self) -> None:
        try:
            self._carry()
        except (RuntimeError, ValueError) as error:  # the latter from what the other end has said of itself
            with self._lock:
                self._over = self._over or _reason(error)
        finally:
            self._finish()

    def _carry(self) -> None:
        """Until it is over. Raises what gloo raises."""
        group = open_gloo(self.meeting, self._rank, MEET_SECONDS / _CONNECTS, self._device)
        with self._lock:
            self._group = group
            while self._early and self._post(self._early[0]):
                self._early.pop(0)
        while (under_way := self._under_way.get()) is not None:
            self._waited, work = under_way
            work.wait(self._limit)
            asked, self._waited = self._waited, None
            self._done(asked.number, "")

    def _finish(self) -> None:
        """Nobody waits any more for what has not been done."""
        with self._lock:
            self._over = self._over or "its thread has failed"
            group, self._group = self._group, None
            left = [*filter(None, [self._waited]), *self._early]
            self._early = []
        while not self._under_way.empty():
            if (under_way := self._under_way.get()) is not None:
                left.append(under_way[0])
            del under_way
        del group  # from here on gloo writes nowhere
        self._say("", b"")
        for asked in left:
            self._done(asked.number, self._over)

    def _post(self, asked: PairTransfer) -> bool:
        """Under the lock. What could not be begun has ended the group, or that had ended."""
        if self._over:
            return False
        act = self._group.send if self._rank == OWNER else self._group.recv
        try:
            work = act([asked.payload_B], 1 - self._rank, asked.tag)
        except RuntimeError as error:
            self._over = _reason(error)
            self._under_way.put(None)
            return False
        self._under_way.put((asked, work))
        return True


def _cut(group: Any, other: int) -> None:
    """gloo has no call that ends a group which somebody waits for. A wait that is too short ends it for all."""
    with suppress(RuntimeError):
        group.recv([torch.empty(1, dtype=torch.uint8)], other, _NOBODYS).wait(_MOMENT)


def _reason(error: Exception) -> str:
    """gloo's own words, without the line of its source and what comes after the first sentence."""
    line = str(error).partition("\n")[0]
    return f"their group has ended: {line.rpartition('] ')[2] if line.startswith('[') else line}"[:_MOST_WHY]
