"""The process of `afserve up`: it holds what must outlive the controller, and starts the controller's process again.

The HTTP socket, the run's folder, the port that nodes join and the keepers of node processes are here; controller and
gateway run in a child that is forked before any thread or event loop is there. A child that dies while it served is
followed by another, later each time; so is one that is killed
while it starts. One whose event loop stands still is killed first. It opens no stream.
"""

import contextlib
import gc
import json
import logging
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from afserve.clock import AwakeClock
from afserve.control.wire import messages
from afserve.control.wire.values import Failed
from afserve.errors import AfserveError, ConfigError, PeerLost
from afserve.kinship import die_with_parent, name_process
from afserve.launch.processes.endings import ended_with
from afserve.launch.processes.keeper import NodeKeeper, reap_strangers
from afserve.member import AttentionPhase, Role

log = logging.getLogger("afserve.launch")
INSISTED = 130  # the exit code of who was told twice to stop
RESTARTS, PROVEN_SECONDS = 5, 30.0  # how often in a row; whoever served for so long has no earlier losses
FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # nodes end after --orphan-grace without a controller
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}  # no fault of whom it ends
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
BEAT_SECONDS = 0.25  # between two signs of life of a child's event loop
FROZEN_SECONDS = 3.0  # without one, while this process ran: the child is killed
_ENOUGH = 3  # signals after which nobody is waited for
_LINE = 1 << 16


class Reports:
    """A child's end of its socket to the supervisor, whose words and end it also hears there. `learnt` is what each
    model's pilot goes by, for that of its next run, in this child or the next one."""

    def __init__(self, sock: socket.socket, learnt: Mapping[str, object]) -> None:
        self._sock, self.learnt = sock, dict(learnt)

    def fileno(self) -> int:
        """Readable once the supervisor has said something, or has gone."""
        return self._sock.fileno()

    def told_to_stop(self) -> int:
        """How often since the last call; 0 where the supervisor has gone."""
        try:
            return len(self._sock.recv(_LINE))
        except OSError:
            return 0

    def serves(self) -> None:
        """Everyone is there: from now on this child is worth another one."""
        self._say({"serves": True})

    def beats(self) -> None:
        """The event loop turns; said every BEAT_SECONDS from the first time on."""
        self._say({"beats": True})

    def wanted(self, model: str, counts: Mapping[Role, int], phases: Mapping[int, AttentionPhase]) -> None:
        """So many nodes of each role compute this model, in these phases, from now on, for the next child to know."""
        by_index = {str(index): phase for index, phase in phases.items()}
        by_role = {str(role): count for role, count in counts.items()}
        self._say({"model": model, "counts": by_role, "phases": by_index})

    def note_learnt(self, model: str, numbers: Mapping[str, list[float]]) -> None:
        if self.learnt.get(model) != numbers:  # in hours without requests nothing is learnt
            self.learnt[model] = numbers
            self._say({"model": model, "learnt": numbers})

    def failed(self, error: AfserveError) -> None:
        """The run ends with this."""
        self._say({"error": messages.encode_from_node(Failed(error)).hex()})

    def _say(self, what: Mapping[str, object]) -> None:
        try:
            self._sock.sendall(json.dumps(what).encode() + b"\n")
        except OSError:
            log.warning("the process that started this one is gone")


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many nodes of each role compute a model by now, and in which phases attention nodes are."""

    counts: Mapping[Role, int]
    phases: Mapping[int, AttentionPhase]


@dataclass(frozen=True, slots=True)
class Term:
    """What one child is told: which one it is, and what is wanted by now of each model where that has changed."""

    number: int
    wanted: Mapping[str, Wanted]
    reports: Reports


@dataclass(slots=True)
class Supervisor:
    """`live` is a child's whole life; what it raises ends the run. `recovers`: a child that dies is followed.

    A signal to this process ends the run, and is told to the child in words: one to the child alone is a loss.
    """

    live: Callable[[Term], None]
    recovers: bool
    keepers: Sequence[NodeKeeper] = ()
    _wanted: dict[str, Wanted] = field(default_factory=dict)
    _learnt: dict[str, object] = field(default_factory=dict)  # by models' pilots
    _child: int = 0
    _told: socket.socket | None = None  # the child's
    _signals: int = 0
    _serves_since: float | None = None
    _beat_at: float | None = None  # by the awake clock; None before the first
    _frozen: str = ""  # why a child was killed
    _awake: AwakeClock = field(default_factory=lambda: AwakeClock(most=2 * BEAT_SECONDS))
    _error: AfserveError | None = None

    def run(self) -> None:
        """Returns when the user ended it. Raises what else did, KeyboardInterrupt when the user insisted."""
        gc.collect()
        gc.freeze()  # children share these pages
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            self._run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self) -> None:
        number = tries = 0
        while True:
            self._serves_since = self._beat_at = None
            self._frozen = ""
            code = self._one_term(number)
            if self._error is not None:
                raise self._error
            if code == INSISTED:
                raise KeyboardInterrupt
            if code == 0 or self._signals:
                return
            lost = PeerLost("the controller", self._frozen or ended_with(code))
            has_served, is_outside = bool(number) or self._serves_since is not None, -code in _FROM_OUTSIDE
            if not self.recovers or not (has_served or is_outside):
                raise lost
            proven = self._serves_since is not None and time.monotonic() - self._serves_since > PROVEN_SECONDS
            tries = 1 if proven else tries + 1
            if tries > RESTARTS and not (has_served and is_outside):
                raise PeerLost("the controller", f"{lost.reason}; it was started {tries} times")
            log.warning("%s; it is started again%s", lost.message, ", the nodes go on" * has_served)
            self._pause(min(FIRST_PAUSE * 2.0 ** min(tries - 1, 30), _LONGEST_PAUSE))
            if self._signals:
                return
            number += has_served
            for keeper in self.keepers:
                keeper.hand_over() if has_served else keeper.end_nodes()

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._signals:
            self._wait(left)

    def _wait(self, seconds: float, *socks: socket.socket) -> bool:
        """Until one of them can be read, and whether it can; what keepers have to do is done meanwhile."""
        watched = [*(sock.fileno() for sock in socks), *(keeper.fileno() for keeper in self.keepers)]
        ready = select.select(watched, [], [], min(seconds, BEAT_SECONDS))[0]
        for keeper in self.keepers:
            keeper.turn()
        reap_strangers(self._is_ours)
        return any(sock.fileno() in ready for sock in socks)

    def _is_ours(self, pid: int) -> bool:
        return pid == self._child or any(keeper.owns(pid) for keeper in self.keepers)

    # ---- one child

    def _one_term(self, number: int) -> int:
        """Its exit code, or the signal that killed it, negative."""
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until it is clear whose they are
        self._child = self._forked(number)
        if not self._child:
            ours.close()
            os._exit(self._live(parent, Term(number, dict(self._wanted), Reports(theirs, self._learnt))))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        theirs.close()
        with ours:
            self._told = ours
            self._listen(ours)
            self._told = None
        _, status = os.waitpid(self._child, 0)
        self._child = 0
        return os.waitstatus_to_exitcode(status)

    def _forked(self, number: int) -> int:
        """As `os.fork`. A run that has served waits for the memory, or for the place among processes."""
        while True:
            try:
                return os.fork()
            except OSError as error:
                if not number:
                    raise
                log.error("the controller cannot be started: %s; trying again", error.strerror)
                self._pause(_LONGEST_PAUSE)

    def _live(self, parent: int, term: Term) -> int:
        """In the child, out of the terminal's reach: what is typed there comes by way of the supervisor."""
        os.setsid()
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        try:
            die_with_parent(parent, signal.SIGKILL)
            name_process("afserve-control")
            self.live(term)
        except AfserveError as error:
            term.reports.failed(error)
            return error.exit_code
        except SystemExit as left:
            return left.code if isinstance(left.code, int) else 1
        except BaseException:  # noqa: BLE001  nothing of the supervisor's may run here
            traceback.print_exc()
            return 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        return 0

    def _listen(self, sock: socket.socket) -> None:
        """Until the child has ended."""
        pending = b""
        while data := self._receive(sock):
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self._note(json.loads(line))

    def _receive(self, sock: socket.socket) -> bytes:
        try:
            while not self._wait(BEAT_SECONDS, sock):
                self._check_frozen()
            return sock.recv(_LINE)
        except ConnectionError:
            return b""

    def _check_frozen(self) -> None:
        """A child that is stopped, or hangs, holds the ports that the next one needs. Nothing of it outlives this."""
        now = self._awake.now()
        if not self.recovers or self._serves_since is None or self._beat_at is None or self._frozen:
            return
        if now - self._beat_at > FROZEN_SECONDS:
            self._frozen = f"its event loop stood still for {now - self._beat_at:.1f} s (pid {self._child})"
            self._send(signal.SIGKILL)

    def _note(self, said: dict[str, object]) -> None:
        if "beats" in said:
            self._beat_at = self._awake.now()
        if "serves" in said:
            self._serves_since = time.monotonic()
        counts, phases = said.get("counts"), said.get("phases")
        if isinstance(counts, dict) and isinstance(phases, dict):
            self._wanted[str(said["model"])] = Wanted(
                {Role(role): int(count) for role, count in counts.items()},
                {int(index): AttentionPhase(phase) for index, phase in phases.items()},
            )
        if "learnt" in said:
            self._learnt[str(said["model"])] = said["learnt"]
        if isinstance(error := said.get("error"), str):
            failed = messages.decode_from_node(bytes.fromhex(error))
            assert isinstance(failed, Failed)
            self._error = failed.error

    # ---- signals

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals >= _ENOUGH:
            self._send(signal.SIGKILL)
        elif self._beat_at is None or self._told is None:
            self._send(signal.Signals(number))  # it has nothing to end yet, and does not listen
        else:
            with contextlib.suppress(OSError):
                self._told.send(b".")

    def _send(self, number: signal.Signals) -> None:
        if self._child:
            os.kill(self._child, number)


def keep_port(host: str, port: int) -> socket.socket:
    """A socket that keeps the port where nodes join for every controller of the run; 0 takes a free one.

    It does not listen: only whoever does, by the same user and with leave to share, is reached. Raises ConfigError.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(
        socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
    )  # connections of an earlier run may still linger
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen for nodes on {host}:{port}; is the port taken?") from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return sock
