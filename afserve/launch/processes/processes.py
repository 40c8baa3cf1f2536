"""The node processes of this machine, for the controller: what is to start, what has ended, and their last words.

Their keeper does it (`keeper`): in the supervisor of `afserve up`, else in a thread beside. This file knows the run's
token and folder; it does not know what nodes do.
"""

import asyncio
import json
import logging
import os
import select
import signal
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from afserve.control.wire import channel
from afserve.errors import ConfigError
from afserve.kinship import adopt_orphans, leave_orphans
from afserve.launch.processes.endings import ended_with, last_lines
from afserve.launch.processes.forker import HELPER
from afserve.launch.processes.keeper import TICK_SECONDS, NodeKeeper
from afserve.launch.processes.launcher import OnExit
from afserve.launch.processes.orders import MESSAGE_BYTES, Order, Signal, pair, send
from afserve.launch.processes.run_folder import RunFolder
from afserve.member import NodeId, Role

log = logging.getLogger("afserve.launch")
_ROOM_SECONDS = 1.0  # for a keeper that is busy to read what it was told


class NodeProcesses:
    """`start()` begins, `with` ends. Every node runs in a session of its own, away from the terminal's Ctrl-C."""

    def __init__(self, token: Path | None = None, *, warm: bool = True) -> None:
        """`token` is a file with the run's token; a new one is made where none is given.

        `warm`: torch is imported before the first node is asked for; in vain where this machine gets none.
        """
        self._given = token
        self._warm = warm
        self._folder: RunFolder | None = None
        self.token = ""
        self._nodes: dict[str, NodeId] = {}  # by name: what the keeper reports
        self.pids: dict[str, int] = {}
        self._ended: set[int] = set()
        self._keeper: NodeKeeper | None = None
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None
        self._owner = 0  # the process that started it; one that was forked from it may use it, not end it
        self._lent = False
        self._stopping = False

    def __enter__(self) -> "NodeProcesses":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def folder(self) -> Path:
        """The run's own folder, readable by this user only; gone when the run is."""
        assert self._folder is not None, "start() first"
        return self._folder.path

    @property
    def token_file(self) -> Path:
        """For nodes that somebody else starts; those of this machine are told the token by their keeper."""
        return self.folder / channel.TOKEN_FILE if self._given is None else self._given.absolute()

    def start(self) -> None:
        self._owner = os.getpid()
        given = None if self._given is None else channel.read_token(self._given)
        self._folder = RunFolder()
        self.token = given or channel.read_token(channel.new_token(self._folder.path))
        adopt_orphans()
        self._socket, theirs = pair()
        self._keeper = NodeKeeper(theirs, self._folder, warm=self._warm)
        self._keeper.start()

    def lend(self) -> NodeKeeper:
        """Processes that are forked from this one may start nodes from now on; this one turns their keeper."""
        assert self._folder is not None and self._keeper is not None, "start() first"
        self._lent = True
        self._folder.remember()
        return self._keeper

    def spawn(
        self,
        node: NodeId,
        join: str,
        gateway: dict[str, Any] | None = None,
        listening: socket.socket | None = None,
        certs: Path | None = None,
    ) -> None:
        """A gateway's options go along, and the socket that it accepts on. `certs` is this host's folder of them.

        Where a process of this node is left, the keeper kills it first; its end is not reported any more.
        """
        assert self._folder is not None, "start() first"
        name = str(node)
        self._turn_beside()
        self.pids.pop(name, None)
        self._nodes[name] = node
        log_file, folder = str(self._folder.log_of(name)), str(certs or "")
        order = Order(name, node.role, node.index, join, self.token, log_file, gateway, certs=folder)
        self._send(order.to_line(), None if listening is None else listening.fileno())

    def inherit(self, node: NodeId, pid: int) -> None:
        """It says that it has been there since an earlier controller; the keeper knows whether that is so."""
        if pid not in self._ended:
            self._nodes.setdefault(str(node), node)
            self.pids.setdefault(str(node), pid)

    def running(self, node: NodeId) -> int | None:
        """The pid of its process, or None where it has none that was started from here."""
        pid = self.pids.get(str(node))
        return None if pid in self._ended else pid

    def names(self) -> tuple[str, ...]:
        """The nodes that have a process now."""
        return tuple(name for name, pid in self.pids.items() if pid not in self._ended)

    def send_signal(self, node: NodeId, pid: int, number: signal.Signals) -> None:
        """To this process of a node, by its parent; nothing where it has ended."""
        if self._socket is not None:
            self._send(Signal(str(node), pid, int(number)).to_line())

    async def watch(self, on_exit: OnExit) -> None:
        """Report each node's end, with the reason, until all is stopped."""
        assert self._socket is not None, "start() first"
        self._stopping = False  # of a model that was stopped, and starts again
        self._turn_beside()
        with self._socket.dup() as sock:
            sock.setblocking(False)
            while line := await _next(sock):
                self._note(json.loads(line), on_exit)

    def stop(self) -> None:
        """End everything that is left; asks first, then makes sure. May be called again."""
        if (keeper := self._taken_back()) is not None:
            keeper.end()
            leave_orphans()

    def kill(self) -> None:
        """At once."""
        if (keeper := self._taken_back()) is not None:
            keeper.kill()
            leave_orphans()

    def last_words(self, name: str) -> str:
        """The last lines of a node's log, for the one who started it; clients never see them."""
        assert self._folder is not None, "start() first"
        return last_lines(self._folder.log_of(name))

    def _taken_back(self) -> NodeKeeper | None:
        """Once, and for its owner only."""
        self._stopping = True
        if os.getpid() != self._owner or self._keeper is None:
            return None
        assert self._socket is not None
        self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()
        self._socket.close()
        keeper, self._keeper, self._socket = self._keeper, None, None
        return keeper

    # ---- the keeper

    def _turn_beside(self) -> None:
        """Where no supervisor turns the keeper, a thread does."""
        if self._lent or self._thread is not None or self._keeper is None:
            return
        assert self._folder is not None
        self._folder.remember()
        self._thread = threading.Thread(
            target=_turn, args=(self._keeper,), name="afserve-keeper", daemon=True
        )
        self._thread.start()

    def _send(self, line: bytes, passed: int | None = None) -> None:
        assert self._socket is not None
        try:
            while not send(self._socket, line, passed):
                if not select.select([], [self._socket], [], _ROOM_SECONDS)[1]:
                    log.error("the keeper of this machine's processes hears nothing; an order is lost")
                    return
        except OSError:
            return  # it is gone, and this process goes with it

    def _note(self, report: dict[str, object], on_exit: OnExit) -> None:
        if "failed" in report:
            self._tell(HELPER, str(report["failed"]), on_exit)
        elif "refused" in report:
            self._tell(self._nodes.get(str(report["refused"])), str(report["why"]), on_exit)
        elif "started" in report:
            node = NodeId(Role(str(report["role"])), int(str(report["index"])))
            self._nodes[str(node)], pid = node, int(str(report["pid"]))
            self.pids[str(node)] = pid
            self._ended.discard(pid)
        else:
            self._note_end(str(report["exited"]), int(str(report["pid"])), report["code"], on_exit)

    def _note_end(self, name: str, pid: int, code: object, on_exit: OnExit) -> None:
        self._ended.add(pid)
        if self.pids.get(name) == pid:  # else another process has its place, or it is an earlier controller's
            self._tell(self._nodes.get(name), ended_with(code if isinstance(code, int) else None), on_exit)

    def _tell(self, who: NodeId | str | None, why: str, on_exit: OnExit) -> None:
        if who is not None and not self._stopping:
            on_exit(who, why)


def _turn(keeper: NodeKeeper) -> None:
    """Until whoever gives it orders has gone."""
    while not keeper.over:
        select.select([keeper], [], [], TICK_SECONDS)
        keeper.turn()


async def _next(sock: socket.socket) -> bytes:
    """Nothing at the end."""
    try:
        return await asyncio.get_running_loop().sock_recv(sock, MESSAGE_BYTES)
    except ConnectionError:
        return b""


def token_at(path: Path | None) -> Path | None:
    """A user's token file, made where there is none. Raises ConfigError where it cannot be."""
    if path is not None and not path.exists():
        try:
            channel.write_token(path)
        except OSError as error:
            raise ConfigError(f"--token-file {path}: {error.strerror}", param="token_file") from error
    return path
