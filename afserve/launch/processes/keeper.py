"""The keeper of the node processes of one machine: their parent, and the one that starts fork servers.

It runs in a process that outlives the controller, does what it is told in orders, and reports what begins and ends. A
fork server that is lost, or stands still, is followed by another one; nodes go on, as they are not its children.
"""

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from afserve.launch.processes.forker import Forker, Loss
from afserve.launch.processes.orders import Order, Signal, close, order_of, receive, report, send
from afserve.launch.processes.run_folder import RunFolder

TICK_SECONDS = 0.25
_TERM_SECONDS = 3.0
_KILL_SECONDS = 1.0  # for what SIGKILL leaves: memory that the next process of the same node needs
_LAST_SECONDS = 5.0  # the same where nothing comes after it
_LOOK_SECONDS = 0.01


@dataclass(slots=True)
class _Asked:
    """A node that is to have a process. `passed` is the descriptor that goes along."""

    order: Order
    passed: int | None
    at: float
    given: bool = False  # to the fork server that there is


@dataclass(frozen=True, slots=True)
class _Node:
    order: Order
    watch: int | None  # readable once the process has ended, where the kernel has that


class NodeKeeper:
    """`start()`, then `turn()` when `fileno()` is readable, and every TICK_SECONDS. `end()` or `kill()` once."""

    def __init__(self, orders: socket.socket, folder: RunFolder, *, warm: bool) -> None:
        """Orders come from `orders`, and reports go there."""
        self.over = False  # whoever gives orders has gone
        self._orders, self._folder = orders, folder
        self._selector = selectors.DefaultSelector()
        self._selector.register(orders, selectors.EVENT_READ, self._hear_orders)
        self._nodes: dict[int, _Node] = {}  # by pid: those that have not been seen to end
        self._asked: dict[str, _Asked] = {}
        self._unsaid: list[bytes] = []
        self._forker = Forker(warm, folder, self._watch, self._selector.unregister)

    def start(self) -> None:
        """The first fork server begins with what takes long. Raises OSError where no process can be started."""
        self._forker.start()

    def fileno(self) -> int:
        return self._selector.fileno()

    def turn(self) -> None:
        """Whatever there is to do; it waits for nothing."""
        for key, _ in self._selector.select(0):
            key.data()
        self._reap()
        loss = self._forker.check(waits=any(asked.given for asked in self._asked.values()))
        if loss is not None:
            self._note_loss(loss)
        self._give_orders()
        self._folder.look()
        while self._unsaid and self._say(self._unsaid[0]):
            self._unsaid.pop(0)

    def owns(self, pid: int) -> bool:
        """Whether this process is its to wait for."""
        return pid in self._nodes or pid == self._forker.pid

    def end_nodes(self) -> None:
        """At once, and what was ordered is forgotten: the run begins again."""
        for name in list(self._asked):
            self._end_asked(name)
        self._signal(signal.SIGKILL)
        self._wait(_LAST_SECONDS)

    def hand_over(self) -> None:
        """Says anew which processes there are, for a controller that follows another one."""
        for pid, node in self._nodes.items():
            self._report_start(node.order, pid)

    def end(self) -> None:
        """Ask every node to go, then make it go."""
        self._end_forker()
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # who is stopped hears nothing
        self._wait(_TERM_SECONDS)
        self.kill()

    def kill(self) -> None:
        """At once."""
        self._end_forker()
        self._signal(signal.SIGKILL)
        self._wait(_LAST_SECONDS)
        for name in list(self._asked):
            self._end_asked(name)
        self._selector.close()
        self._orders.close()
        self._folder.remove()

    # ---- orders

    def _hear_orders(self) -> None:
        while (received := receive(self._orders)) is not None:
            line, passed = received
            if not line:
                self.over = True
                self._selector.unregister(self._orders)
                return
            match order_of(line):
                case Signal() as order:
                    self._pass_on(order)
                case order:
                    if (earlier := self._asked.pop(order.name, None)) is not None:
                        close(earlier.passed)
                    self._asked[order.name] = _Asked(order, passed, time.monotonic())

    def _pass_on(self, order: Signal) -> None:
        """Only here it is certain that the number is still this process's: nobody else reaps it."""
        self._reap()
        node = self._nodes.get(order.pid)
        if node is not None and node.order.name == order.name:
            _kill(order.pid, signal.Signals(order.signal))

    def _give_orders(self) -> None:
        for name, asked in self._asked.items():
            if asked.given or not self._forker.takes_orders or self._is_left(name, asked):
                continue
            asked.given = self._forker.order(asked.order, asked.passed)

    def _is_left(self, name: str, asked: _Asked) -> bool:
        """A node has one process: an earlier one, stopped or stuck, is killed, and its memory waited for."""
        earlier = [pid for pid, node in self._nodes.items() if node.order.name == name]
        for pid in earlier:
            _kill(pid, signal.SIGKILL)
        return bool(earlier) and time.monotonic() - asked.at < _KILL_SECONDS

    # ---- the fork server

    def _watch(self, sock: socket.socket) -> None:
        self._selector.register(sock, selectors.EVENT_READ, self._hear_forker)

    def _hear_forker(self) -> None:
        for said in self._forker.hear():
            if "started" in said:
                self._note_start(str(said["started"]), int(str(said["pid"])))
            elif "refused" in said and str(said["refused"]) in self._asked:
                self._end_asked(str(said["refused"]))
                self._report(dict(said))

    def _note_loss(self, loss: Loss) -> None:
        """What it was given and has not begun is for the next one."""
        for asked in self._asked.values():
            asked.given = False
        if loss.final:
            self._report({"failed": loss.why})

    def _end_forker(self) -> None:
        """Every process that it began is known afterwards: those that tell of them are short-lived."""
        self._forker.kill_server()
        until = time.monotonic() + _KILL_SECONDS
        while self._forker.takes_orders and time.monotonic() < until:
            self._hear_forker()
            time.sleep(_LOOK_SECONDS)

    # ---- nodes

    def _note_start(self, name: str, pid: int) -> None:
        if name not in self._asked:
            _kill(pid, signal.SIGKILL)  # it was forgotten meanwhile
            return
        order, watch = self._end_asked(name).order, _opened(pid)
        self._nodes[pid] = _Node(order, watch)
        if watch is not None:
            self._selector.register(watch, selectors.EVENT_READ, _nothing)
        self._report_start(order, pid)

    def _report_start(self, order: Order, pid: int) -> None:
        self._report({"started": order.name, "role": order.role, "index": order.index, "pid": pid})

    def _end_asked(self, name: str) -> _Asked:
        asked = self._asked.pop(name)
        close(asked.passed)
        return asked

    def _reap(self) -> None:
        for pid in list(self._nodes):
            ended, code = waited(pid)
            if ended:
                node = self._nodes.pop(pid)
                if node.watch is not None:
                    self._selector.unregister(node.watch)
                    os.close(node.watch)
                self._report({"exited": node.order.name, "pid": pid, "code": code})

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._nodes and time.monotonic() < until:
            self._reap()
            time.sleep(_LOOK_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._nodes:
            _kill(pid, number)

    # ---- reports

    def _report(self, what: dict[str, object]) -> None:
        self._unsaid.append(report(what))

    def _say(self, line: bytes) -> bool:
        try:
            return send(self._orders, line)
        except OSError:
            return True  # nobody is there to hear it


def waited(pid: int) -> tuple[bool, int | None]:
    """Whether it has ended, and its exit code, or the negative signal; None where another process is its parent."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return not _kill(pid, 0), None
    return bool(done), os.waitstatus_to_exitcode(status) if done else None


def reap_strangers(is_ours: Callable[[int], bool]) -> None:
    """Waits for adopted processes that have ended and that nobody else will wait for."""
    while (pid := _ended()) is not None and not is_ours(pid):
        os.waitpid(pid, 0)


def _ended() -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid


def _kill(pid: int, number: int) -> bool:
    """Whether it was there."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):  # the number may be another user's by now
        return False
    return True


def _opened(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None  # `turn` looks every TICK_SECONDS


def _nothing() -> None:
    """`turn` reaps after every event."""
