"""This machine's processes as a site: what is to start, what has ended, and their last words.

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
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afserve.comm.binding import Binding
from afserve.control.wire import channel
from afserve.kinship import adopt_orphans, leave_orphans
from afserve.launch.processes.endings import ended_with, last_lines
from afserve.launch.processes.forker import HELPER
from afserve.launch.processes.keeper import TICK_SECONDS, NodeKeeper
from afserve.launch.processes.orders import MESSAGE_BYTES, Order, Signal, pair, send
from afserve.launch.processes.run_folder import RunFolder
from afserve.launch.sites.node_pids import NodePids
from afserve.launch.sites.site import OnExit, Site
from afserve.member import NodeId, Role

if TYPE_CHECKING:
    from afserve.launch.plan.wishes import UpFlags
    from afserve.launch.sites.survey import Survey

log = logging.getLogger("afserve.launch")
_ROOM_SECONDS = 1.0  # for a keeper that is busy to read what it was told


class LocalSite(Site):
    """Every node runs in a session of its own, away from the terminal's Ctrl-C."""

    def __init__(self, token: Path | None = None, *, warm: bool = True) -> None:
        """`token` is a file with the run's token; a new one is made where none is given.

        `warm`: torch is imported before the first node is asked for; in vain where this machine gets none.
        """
        self._given = token
        self._warm = warm
        self._folder: RunFolder | None = None
        self._token = ""
        self._nodes = NodePids()
        self._keeper: NodeKeeper | None = None
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None
        self._owner = 0  # the process that started it; one that was forked from it may use it, not end it
        self._lent = False
        self._stopping = False

    @property
    def folder(self) -> Path:
        assert self._folder is not None, "start() first"
        return self._folder.path

    @property
    def token(self) -> str:
        return self._token

    @property
    def token_file(self) -> Path:
        """Nodes of this machine are told the token by their keeper."""
        return self.folder / channel.TOKEN_FILE if self._given is None else self._given.absolute()

    @property
    def pids(self) -> dict[str, int]:
        """By the node's name: of its latest process."""
        return self._nodes.pids

    def start(self) -> None:
        self._owner = os.getpid()
        given = None if self._given is None else channel.read_token(self._given)
        self._folder = RunFolder()
        self._token = given or channel.read_token(channel.new_token(self._folder.path))
        adopt_orphans()
        self._socket, theirs = pair()
        self._keeper = NodeKeeper(theirs, self._folder, warm=self._warm)
        self._keeper.start()

    def survey(self, flags: "UpFlags") -> "Survey":
        from afserve.launch.sites.survey import survey_this_machine  # heavy: nodes import torch meanwhile

        return survey_this_machine(flags, self.folder)

    def lend(self) -> NodeKeeper:
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
        binding: Binding | None = None,
    ) -> None:
        """Where a process of this node is left, the keeper kills it first; its end is not reported any more."""
        assert self._folder is not None, "start() first"
        name = str(node)
        self._turn_beside()
        self._nodes.expect(node)
        log_file, folder = str(self._folder.log_of(name)), str(certs or "")
        bound = None if binding is None else asdict(binding)
        order = Order(name, node.role, node.index, join, self.token, log_file, gateway, folder, bound)
        self._send(order.to_line(), None if listening is None else listening.fileno())

    def inherit(self, node: NodeId, pid: int) -> None:
        """The keeper knows whether that is so."""
        self._nodes.inherit(node, pid)

    def pid_of(self, node: NodeId) -> int | None:
        return self._nodes.running(node)

    def names(self) -> tuple[str, ...]:
        """The nodes that have a process now."""
        return self._nodes.names()

    def send_signal(self, node: NodeId, pid: int, number: signal.Signals) -> None:
        if self._socket is not None:
            self._send(Signal(str(node), pid, int(number)).to_line())

    async def watch_nodes(self, on_exit: OnExit) -> None:
        assert self._socket is not None, "start() first"
        self._stopping = False  # of a model that was stopped, and starts again
        self._turn_beside()
        with self._socket.dup() as sock:
            sock.setblocking(False)
            while line := await _next(sock):
                self._note(json.loads(line), on_exit)

    def stop(self) -> None:
        if (keeper := self._taken_back()) is not None:
            keeper.end()
            leave_orphans()

    def kill(self) -> None:
        if (keeper := self._taken_back()) is not None:
            keeper.kill()
            leave_orphans()

    def last_words(self, name: str) -> str:
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
            self._tell(self._nodes.called(str(report["refused"])), str(report["why"]), on_exit)
        elif "started" in report:
            node = NodeId(Role(str(report["role"])), int(str(report["index"])))
            self._nodes.note_start(node, int(str(report["pid"])))
        else:
            ended = self._nodes.note_end(str(report["exited"]), int(str(report["pid"])))
            code = report["code"]
            self._tell(ended, ended_with(code if isinstance(code, int) else None), on_exit)

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
