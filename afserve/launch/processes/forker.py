"""The fork server that there is now, as its keeper sees it: begun, ready, lost, stopped, and followed by another one.

It knows processes and a socket, and no node.
"""

import json
import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from afserve.child import module
from afserve.clock import AwakeClock
from afserve.launch.processes.endings import ended_with
from afserve.launch.processes.environment import kept_environment
from afserve.launch.processes.orders import Order, pair, receive, send
from afserve.launch.processes.run_folder import RunFolder

log = logging.getLogger("afserve.launch")
HELPER = "fork-server"
TRIES = 5  # to begin the first one
STOPPED_SECONDS = 3.0  # as long as a controller may stand still
STUCK_SECONDS = 30.0  # with an order, and without a word
_PROVEN_SECONDS = 30.0  # whoever was ready for so long has no earlier losses
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 30.0
_LEAVE_SECONDS = 1.0  # from a closed socket to the end of its process


@dataclass(frozen=True, slots=True)
class Loss:
    """`final`: it cannot be begun on this machine, and no other one will be."""

    why: str
    final: bool


class Forker:
    """`watch` and `unwatch` are told of its socket, on which `hear` has something to read."""

    def __init__(
        self,
        warm: bool,
        folder: RunFolder,
        watch: Callable[[socket.socket], None],
        unwatch: Callable[[socket.socket], object],
    ) -> None:
        self._warm, self._folder, self._watch, self._unwatch = warm, folder, watch, unwatch
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._awake = AwakeClock()
        self._has_begun = False  # one of them was ready
        self._final = False
        self._tries, self._again_at = 0, 0.0
        self._ready_at: float | None = None
        self._stopped_since: float | None = None
        self._waits_since: float | None = None
        self._why = ""  # it was killed from here

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def takes_orders(self) -> bool:
        return self._socket is not None

    def start(self) -> None:
        """Raises OSError where no process can be started."""
        ours, theirs = pair()
        self._ready_at = self._stopped_since = self._waits_since = None
        self._why = ""
        arguments = [str(theirs.fileno()), str(os.getpid()), str(int(self._warm)), str(self._folder.path)]
        with theirs, _log_at(self._folder.log_of(HELPER)) as said:
            self._process = subprocess.Popen(
                [*module("afserve.launch.processes.fork_server"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=kept_environment(),
            )
        self._socket = ours
        self._watch(ours)

    def order(self, order: Order, passed: int | None) -> bool:
        """Whether it was taken; never of one that is lost, as `check` will say."""
        assert self._socket is not None
        try:
            return send(self._socket, order.to_line(), passed)
        except OSError:
            return False

    def hear(self) -> Iterator[Mapping[str, object]]:
        """What was said since."""
        while self._socket is not None and (received := receive(self._socket)) is not None:
            line = received[0]
            if not line:
                self._unwatch(self._socket)
                self._socket.close()
                self._socket = None
                return
            said: Mapping[str, object] = json.loads(line)
            self._waits_since = None
            if "ready" in said:
                self._has_begun, self._ready_at = True, time.monotonic()
            yield said

    def check(self, *, waits: bool) -> Loss | None:
        """Begins the next one in time. `waits`: it has been given an order. Returns a loss once."""
        if self._process is None:
            if not self._final and time.monotonic() >= self._again_at:
                self._start_again()
            return None
        if self._socket is None:
            return self._lose(self._process)
        self._check_still(self._process, waits)
        return None

    def _start_again(self) -> None:
        try:
            self.start()
        except OSError as error:
            log.error("no fork server can be started: %s; trying again", error.strerror)
            self._again_at = time.monotonic() + _LONGEST_PAUSE

    def kill_server(self) -> None:
        """Nothing follows. What it said last can still be heard."""
        self._final = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _lose(self, process: "subprocess.Popen[bytes]") -> Loss:
        code = _code_of(process)
        why, now = self._why or ended_with(code), time.monotonic()
        proven = self._ready_at is not None and now - self._ready_at > _PROVEN_SECONDS
        self._tries = 1 if proven else self._tries + 1
        self._process = None
        self._final = not self._has_begun and (code > 0 or self._tries > TRIES)
        pause = 0.0 if self._tries == 1 else _FIRST_PAUSE * 2.0 ** min(self._tries - 2, 30)
        self._again_at = now + min(pause, _LONGEST_PAUSE)
        if not self._final:
            log.warning("the fork server (pid %d): %s; another one starts, nodes go on", process.pid, why)
        return Loss(why, self._final)

    def _check_still(self, process: "subprocess.Popen[bytes]", waits: bool) -> None:
        """No node is its child, so that to kill one that is stopped harms nobody."""
        now = self._awake.now()
        self._stopped_since = (self._stopped_since or now) if _is_stopped(process.pid) else None
        self._waits_since = (self._waits_since or now) if waits and self._ready_at is not None else None
        if self._stopped_since is not None and now - self._stopped_since > STOPPED_SECONDS:
            self._end(process, f"it was stopped for {now - self._stopped_since:.0f} s")
        elif self._waits_since is not None and now - self._waits_since > STUCK_SECONDS:
            self._end(process, f"it has started no process for {now - self._waits_since:.0f} s")

    def _end(self, process: "subprocess.Popen[bytes]", why: str) -> None:
        """Its socket will say so."""
        if not self._why:
            self._why = why
            process.kill()


def _log_at(path: Path) -> BinaryIO:
    try:
        return open(path, "ab")
    except OSError:
        return open(os.devnull, "wb")  # no reason to do without a fork server


def _code_of(process: "subprocess.Popen[bytes]") -> int:
    """Of one that has closed its socket; it ends now, if it has not."""
    try:
        return process.wait(_LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
