"""Keeps a fault of what only advises away from serving: it is logged once, and the adviser rests before it is asked
again.

Balance, statistics, traces, copies and predictions make serving better, and no answer needs them. It knows none of
them; times are passed in.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from afserve.errors import AfserveError

log = logging.getLogger("afserve.adviser")
T = TypeVar("T")

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 300.0  # of a rest: it doubles while each attempt fails
_KEPT = 32  # different faults of one adviser that are told apart


class Adviser:
    """`name` says in the log what is missing while it rests. All calls come from one thread at a time.

    `answers` are errors that it raises as its advice, such as a refusal: they pass.
    """

    def __init__(
        self,
        name: str,
        *answers: type[AfserveError],
        first: float = FIRST_SECONDS,
        longest: float = LONGEST_SECONDS,
    ) -> None:
        self.failures = 0  # in a row
        self._name, self._answers, self._first, self._longest = name, answers, first, longest
        self._until = float("-inf")
        self._known: set[tuple[str, str, int]] = set()

    def rests(self, now: float) -> bool:
        return now < self._until

    def rest_left(self, now: float) -> float:
        """Seconds."""
        return max(0.0, self._until - now)

    def ask(self, now: float, advise: Callable[[], T], otherwise: T) -> T:
        """What `advise` returns, or `otherwise` where it raises or rests."""
        if now < self._until:
            return otherwise
        with self.guarded(now):
            return advise()
        return otherwise

    @contextmanager
    def guarded(self, now: float) -> Iterator[None]:
        """What is raised within the block ends the block, and the adviser rests from `now` on."""
        try:
            yield
        except self._answers:
            self.failures = 0
            raise
        except Exception as error:  # noqa: BLE001  any bug of an adviser is to cost its advice only
            self._failed(error, now)
        else:
            self.failures = 0

    def _failed(self, error: Exception, now: float) -> None:
        pause = min(self._first * 2.0 ** min(self.failures, 30), self._longest)
        self.failures += 1
        self._until = now + pause
        fault = _fault(error)
        if fault not in self._known and len(self._known) < _KEPT:
            self._known.add(fault)
            log.error(
                "%s failed and rests for %g s; serving goes on without it (said once)",
                self._name,
                pause,
                exc_info=error,
            )


def _fault(error: Exception) -> tuple[str, str, int]:
    """The kind of it and where it was raised."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = ("", 0) if frame is None else (frame.tb_frame.f_code.co_filename, frame.tb_lineno)
    return type(error).__name__, *where
