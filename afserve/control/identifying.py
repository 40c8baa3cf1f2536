"""Reads what this host has of the checkpoint, beside everything else: for a node, and for the controller's own copy.

It compares nothing. Whoever waits for a disk that does not answer is named by the controller, which sees no progress.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future

from afserve.clock import Clock
from afserve.config import ModelSource
from afserve.digest_cache import DigestCache, user_folder
from afserve.errors import DeadlineError
from afserve.models.identity import Identity, Progress, identify

log = logging.getLogger("afserve.verify")
_SAID_AFTER, _SAID_EVERY = 1.0, 2.0  # seconds
STALL_SECONDS = 600.0  # without a byte
Tell = Callable[[Identity], None]
Read = Callable[[bool, Progress], "Future[Identity]"]


def reading(
    source: ModelSource,
    roles: tuple[str, ...],
    *,
    full: bool,
    progress: Progress,
    tell: Tell = lambda found: None,
) -> "Future[Identity]":
    """Of what `source` names, on a thread that does not outlive the process. `tell` is called there, before it is done.

    The future raises CheckpointError where this host's copy cannot be read.
    """
    found: Future[Identity] = Future()

    def work() -> None:
        found.set_running_or_notify_cancel()  # from here on nobody cancels it
        try:
            cache = DigestCache(user_folder())
            identity = identify(source, roles, cache, full=full, progress=_logged(progress, roles))
            tell(identity)
        except BaseException as error:  # noqa: BLE001  whatever it is, it belongs to who waits
            found.set_exception(error)
        else:
            found.set_result(identity)

    threading.Thread(target=work, name="identity", daemon=True).start()
    return found


def unchanged(source: ModelSource, role: str, began: "Future[Identity]", *, full: bool) -> Callable[[], bool]:
    """Whether this host's copy of a role's weights is still what `began` found; read anew at every call. It raises
    CheckpointError where the copy cannot be read."""
    cache = DigestCache(user_folder())

    def same() -> bool:
        return began.done() and identify(source, (role,), cache, full=full) == began.result()

    return same


class OwnCopy:
    """The controller's own copy: read once by samples, and once in all bytes if this run or any node compares those.

    `read` begins to read it (all bytes or not, progress) and `expect` takes what was found, raising where a node has
    said something else.
    """

    def __init__(self, read: Read, expect: Tell, clock: Clock, show_progress: Progress) -> None:
        """`show_progress` is called from the thread that reads."""
        self._read = read
        self._expect = expect
        self._clock = clock
        self._begun: set[bool] = set()
        self._under_way: dict[bool, float] = {}  # all bytes or not -> when something of it was read last
        self._show_progress = show_progress

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    def due(self, full: bool) -> bool:
        """Whether `compare` has something to do; all bytes include the samples."""
        return full not in self._begun and not (self._begun and not full)

    def compare(self, full: bool) -> Coroutine[None, None, None]:
        """Begins at once; what it returns waits. Raises CheckpointError for a broken copy, RendezvousError for a node
        with another one."""

        def progress(done: float) -> None:
            self._under_way[full] = self._clock.now()
            self._show_progress(done)

        self._begun.add(full)
        self._under_way[full] = self._clock.now()
        return self._wait(full, self._read(full, progress))

    async def _wait(self, full: bool, found: "Future[Identity]") -> None:
        try:
            self._expect(await asyncio.wrap_future(found))
        finally:
            del self._under_way[full]

    def check(self, now: float) -> None:
        """Raises DeadlineError where the disk does not answer."""
        if any(now - since > STALL_SECONDS for since in self._under_way.values()):
            raise DeadlineError(
                f"the controller's own copy of the checkpoint was not read within {STALL_SECONDS:.0f} s"
            )


def _logged(progress: Progress, roles: tuple[str, ...]) -> Progress:
    """Also says how far it is, where that takes longer than a second."""
    next_at = time.monotonic() + _SAID_AFTER

    def report(done: float) -> None:
        nonlocal next_at
        progress(done)
        if time.monotonic() >= next_at:
            next_at = time.monotonic() + _SAID_EVERY
            log.info("reading all bytes of the %s weights: %.0f %%", " and ".join(roles), 100 * done)

    return report
