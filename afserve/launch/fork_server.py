"""The fork server: one process that has imported torch and the engine, and forks each node.

The imports cost one to two seconds of CPU, here once instead of once per node. It stays single-threaded until the fork,
reports to its parent when a child ends, and ends all children when its parent is gone. Orders and reports are JSON
lines on one inherited socket.
"""

import ctypes
import faulthandler
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from afserve.control.node.worker import Serve
    from afserve.member import Role

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_TERM_SECONDS = 3.0
_KILL_SECONDS = 1.0  # for what SIGKILL leaves: memory that the next process of the same node needs
_LINE = 1 << 16
_DESCRIPTORS = 64


@dataclass(slots=True)
class Order:
    """Become a node. `log` takes its stdout and stderr. `listening` is known at the receiving end only."""

    name: str
    role: str
    index: int
    join: str
    token_file: str
    log: str
    gateway: dict[str, Any] | None = (
        None  # of a gateway: its options; a listening socket comes with the order
    )
    listening: int | None = None
    certs: str = ""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to this process of a node, if it is still a child."""

    name: str
    pid: int
    signal: int

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


class ForkServer:
    """Forks on order and reaps. `serve()` returns an Order in a child, None in the parent at the end."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self.let_go = False  # the parent has closed its end
        self._children: dict[int, str] = {}
        self._pending = b""
        self._sockets: deque[int] = deque()  # came with orders that have not been read yet
        self._reaper, self._bell = socket.socketpair()
        self._reaper.setblocking(False)
        self._bell.setblocking(False)

    def watch_signals(self) -> None:
        """Signals only ring a bell, which `serve` hears: nothing is ever interrupted half-way."""
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, _noted)
        signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)

    def serve(self) -> Order | None:
        while True:
            readable, _, _ = select.select([self._orders, self._reaper], [], [])
            if self._reaper in readable:
                if signal.SIGTERM in self._reaper.recv(_LINE):
                    return None
                self._reap()
            if self._orders in readable:
                data, descriptors, _, _ = socket.recv_fds(self._orders, _LINE, _DESCRIPTORS)
                self._sockets.extend(descriptors)
                if not data:
                    self.let_go = True
                    return None
                for order in self._lines(data):
                    if isinstance(order, Signal):
                        self._pass_on(order)
                    elif self._fork(order):
                        return order

    def end(self) -> None:
        """Ask every child to go, then make it go."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # who is stopped hears nothing
        deadline = time.monotonic() + _TERM_SECONDS
        while self._children and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.01)
        self._signal(signal.SIGKILL)
        while self._children:
            self._reap()
            time.sleep(0.001)

    def _lines(self, data: bytes) -> Iterator[Order | Signal]:
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            fields = json.loads(line)
            yield Signal(**fields) if "signal" in fields else Order(**fields)

    def _pass_on(self, order: Signal) -> None:
        """Only here it is certain that the number is still this process's: nobody else reaps it."""
        self._reap()
        if self._children.get(order.pid) == order.name:
            os.kill(order.pid, order.signal)

    def _fork(self, order: Order) -> bool:
        order.listening = self._sockets.popleft() if order.gateway is not None else None
        self._end_earlier(order.name)
        pid = os.fork()
        if pid == 0:
            self._leave_server()
            return True
        if order.listening is not None:
            os.close(order.listening)
        self._children[pid] = order.name
        self._report({"started": order.name, "pid": pid})
        return False

    def _end_earlier(self, name: str) -> None:
        """A node has one process: what is left of an earlier one, stopped or stuck, is killed."""
        earlier = [pid for pid, other in self._children.items() if other == name]
        for pid in earlier:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _KILL_SECONDS
        while any(pid in self._children for pid in earlier) and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.001)

    def _leave_server(self) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for end in (self._orders, self._reaper, self._bell):
            end.close()

    def _reap(self) -> None:
        for pid in list(self._children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                name = self._children.pop(pid)
                self._report({"exited": name, "pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _report(self, what: dict[str, object]) -> None:
        try:
            self._orders.sendall(json.dumps(what).encode() + b"\n")
        except OSError:
            return  # the parent is gone; `serve` hears it from the socket

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._children:
            os.kill(pid, number)


def die_with_parent(parent: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel for a signal when the parent goes. Where it cannot (not Linux), the broken stream tells."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            sys.exit(0)


def name_process(name: str) -> None:
    """What `top` and `ps -o comm` show: at most 15 characters."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.replace("attention", "attn").encode()[:15])


def become(order: Order) -> None:
    """The child's whole life."""
    from afserve.control.node.worker import NodeSettings, run_node
    from afserve.errors import AfserveError

    gc.enable()
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    name_process(order.name)
    faulthandler.register(signal.SIGUSR1)  # `kill -USR1` writes where every thread is into the log
    try:
        # Whoever gave the order has looked at what leaves this host, and said so.
        settings = NodeSettings(
            order.role, order.join, order.token_file, order.index, certs=order.certs, insecure=True
        )
        run_node(settings, _roles(order))
    except AfserveError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(error.exit_code)


def _roles(order: Order) -> "Mapping[Role, Serve]":
    from afserve.control.node.worker import default_roles
    from afserve.member import Role

    if order.gateway is None or order.listening is None:
        return default_roles()
    from afserve.launch.gateway_node import gateway_role, inherited
    from afserve.launch.gateway_options import GatewayOptions
    from afserve.logs import configure

    options = GatewayOptions.from_plain(order.gateway)
    configure(options.settings.log_level, options.settings.log_format)
    return {Role.GATEWAY: gateway_role(options, inherited(order.listening))}


def preload() -> None:
    """Without the collector, which takes a sixth of the time; frozen, so that children share the pages."""
    gc.disable()
    import afserve.control.node.attention
    import afserve.control.node.expert
    import afserve.control.node.wiring  # noqa: F401

    gc.freeze()


def main(descriptor: int, parent: int, warm: bool, folder: Path) -> None:
    """`folder` is the run's; it goes with the last process of the run: a parent that is there reads the log in it.

    Not `warm`: each child imports for itself.
    """
    me = os.getpid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = ForkServer(socket.socket(fileno=descriptor))
    server.watch_signals()
    order = None
    try:
        die_with_parent(parent)
        name_process("afserve-fork")
        if warm:
            preload()
        order = server.serve()
    finally:
        if os.getpid() == me:
            server.end()
            if server.let_go or os.getppid() != parent:
                shutil.rmtree(folder, ignore_errors=True)
    if order is not None:
        try:
            die_with_parent(me)
            become(order)
        finally:
            if os.getppid() != me:
                shutil.rmtree(folder, ignore_errors=True)  # nobody else is left to do it


def _noted(number: int, frame: FrameType | None) -> None:
    """The wakeup descriptor has told it."""


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1", Path(sys.argv[4]))
