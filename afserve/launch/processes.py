"""Starts the node processes of a run on this machine, watches them, and leaves nothing behind.

`fork_server` forks the nodes. It is started early, so that its imports overlap with everything else. This file
knows processes, logs and the run's folder; it does not know what nodes do.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any

from afserve.child import module
from afserve.control.wire import channel
from afserve.errors import ConfigError
from afserve.launch.fork_server import Order, Signal
from afserve.launch.launcher import OnExit
from afserve.member import NodeId

_STOP_SECONDS = 6.0
_TAIL_BYTES = 8192
_TAIL_LINES = 6
HELPER = "fork-server"


class NodeProcesses:
    """`start()` begins, `with` ends. Every node runs in the helper's session, away from the terminal's Ctrl-C."""

    def __init__(self, token: Path | None = None, *, warm: bool = True) -> None:
        """`token` is a file with the run's token; a new one is made where none is given.

        `warm`: torch is imported before the first node is asked for; in vain where this machine gets none.
        """
        self._token = token
        self._warm = warm
        self._folder: Path | None = None
        self._nodes: dict[str, NodeId] = {}  # by name: what the helper reports
        self.pids: dict[str, int] = {}
        self.exited: dict[str, int] = {}
        self._ended: set[int] = set()
        self._helper: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._owner = (
            0  # the process that started the helper; one that was forked from it may use it, not end it
        )
        self._spawned = False
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
        return self._folder

    @property
    def token_file(self) -> Path:
        return self.folder / channel.TOKEN_FILE

    def start(self) -> None:
        self._owner = os.getpid()
        self._folder = Path(tempfile.mkdtemp(prefix="afserve-"))
        channel.new_token(self._folder, None if self._token is None else channel.read_token(self._token))
        self._socket, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), str(os.getpid()), str(int(self._warm)), str(self.folder)]
        with theirs, open(self._log(HELPER), "wb") as log:
            self._helper = subprocess.Popen(
                [*module("afserve.launch.fork_server"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=kept_environment(),
            )

    def lend(self) -> None:
        """Processes that are forked from this one may start nodes from now on; this one ends them."""
        self._spawned = True

    def spawn(
        self,
        node: NodeId,
        join: str,
        gateway: dict[str, Any] | None = None,
        listening: socket.socket | None = None,
        certs: Path | None = None,
    ) -> None:
        """A gateway's options go along, and the socket that it accepts on. `certs` is this host's folder of them.

        Where a process of this node is left, the helper kills it first; its end is not reported any more.
        """
        assert self._socket is not None, "start() first"
        name = str(node)
        self._spawned = True
        self.pids.pop(name, None)
        self._nodes[name] = node
        order = Order(
            name,
            node.role,
            node.index,
            join,
            str(self.token_file),
            str(self._log(name)),
            gateway,
            certs=str(certs or ""),
        )
        try:
            if listening is None:
                self._socket.sendall(order.to_line())
            else:
                _send_with(self._socket, order.to_line(), listening)
        except OSError:
            return  # the helper is gone; `watch` says so, with the reason

    def inherit(self, node: NodeId, pid: int) -> None:
        """It says that it has been there since an earlier controller; the helper knows whether that is so."""
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
            with contextlib.suppress(OSError):  # the helper is gone; `watch` says so, with the reason
                self._socket.sendall(Signal(str(node), pid, int(number)).to_line())

    async def watch(self, on_exit: OnExit) -> None:
        """Report each node's end, with the reason, until all is stopped."""
        assert self._socket is not None, "start() first"
        reader, writer = await asyncio.open_connection(sock=self._socket.dup())
        try:
            while line := await reader.readline():
                self._note(json.loads(line), on_exit)
        except ConnectionError:
            pass
        finally:
            writer.close()
        if not self._stopping:
            on_exit(HELPER, self._helper_end())

    def stop(self) -> None:
        """End everything that is left; asks first, then makes sure. May be called again."""
        self._stopping = True
        if self._is_lent:
            return
        if not self._spawned:
            self.kill()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._socket = None
        if self._helper is not None:
            try:
                self._helper.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        self._clear()

    def kill(self) -> None:
        """At once."""
        self._stopping = True
        if self._is_lent:
            return
        if self._helper is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._helper.pid, signal.SIGKILL)
            self._helper.wait()
        self._clear()

    @property
    def _is_lent(self) -> bool:
        return os.getpid() != self._owner

    def _clear(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _note(self, report: dict[str, object], on_exit: OnExit) -> None:
        if "started" in report:
            self.pids[str(report["started"])] = int(str(report["pid"]))
            self._ended.discard(int(str(report["pid"])))
            return
        name, code = str(report["exited"]), int(str(report["code"]))
        self._ended.add(int(str(report["pid"])))
        if self.pids.get(name) != report["pid"]:
            return  # another process has this node's place by now, or it was started under an earlier controller
        self.exited[name] = code
        if not self._stopping:
            on_exit(self._nodes[name], ended_with(code))

    def _helper_end(self) -> str:
        assert self._helper is not None
        if self._is_lent:
            return "closed its socket"
        try:
            return ended_with(self._helper.wait(1.0))
        except subprocess.TimeoutExpired:
            return "closed its socket"

    def last_words(self, name: str) -> str:
        """The last lines of a node's log, for the one who started it; clients never see them."""
        return last_lines(self._log(name))

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def _send_with(to: socket.socket, line: bytes, passed: socket.socket) -> None:
    """The descriptor travels with the first byte."""
    sent = socket.send_fds(to, [line], [passed.fileno()])
    to.sendall(line[sent:])


def last_lines(path: Path) -> str:
    """Of a log, indented; empty where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])


def ended_with(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code}"
    number = -code
    hint = "; out of memory?" if number == signal.SIGKILL else ""
    return f"its process was killed by {signal.Signals(number).name}{hint}"


# What a node may need of whoever starts it; keys and tokens of the shell are none of its business.
_KEPT = {
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "TZ",
    "TMPDIR",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
}
_KEPT_FAMILIES = {
    "LC",
    "PYTHON",
    "XDG",
    "CUDA",
    "NVIDIA",
    "NCCL",
    "GLOO",
    "TORCH",
    "PYTORCH",
    "TRITON",
    "OMP",
    "MALLOC",
}


def kept_environment(also: Collection[str] = ()) -> dict[str, str]:
    """`also` are further families of variables, by what they begin with.

    NumPy's BLAS starts threads on import, and a process with threads cannot be forked safely.
    """

    def is_kept(name: str) -> bool:
        family = name.rstrip("0123456789").partition("_")[0]
        return name in _KEPT or family in _KEPT_FAMILIES or family in also

    kept = {name: value for name, value in os.environ.items() if is_kept(name)}
    return {**kept, "OPENBLAS_NUM_THREADS": "1"}


def token_at(path: Path | None) -> Path | None:
    """A user's token file, made where there is none. Raises ConfigError where it cannot be."""
    if path is not None and not path.exists():
        try:
            channel.write_token(path)
        except OSError as error:
            raise ConfigError(f"--token-file {path}: {error.strerror}", param="token_file") from error
    return path
