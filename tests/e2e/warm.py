"""A warm interpreter: one process that has imported what `afserve up` and its fork server import, and forks both.

The imports are more than three of the four seconds of CPU that a small deployment costs, and the same for all. What is
forked here runs the command line as it is, as a child of its own process group and with its own descriptors and
environment; it forks its fork server in place of starting one, and all that follows is the program's. Tests of the
beginning itself (environment, memory, what is imported) start `python -m afserve`.
"""

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

ROOT = Path(__file__).parents[2]
SECONDS = 120.0  # to import all, and to fork
_MOST = 1 << 20
_STANDARD = 3  # descriptors of a process that has no others


class Forked:
    """A process that somebody else has forked, and waits for: as `subprocess.Popen`, as far as tests ask."""

    def __init__(self, pid: int, end: socket.socket) -> None:
        """`end` says how it ended."""
        self.pid = pid
        self.returncode: int | None = None
        self._end = end

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("afserve", timeout or 0.0)
        return code

    def _look(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._end], [], [], seconds)[0]:
            said = self._end.recv(_MOST)
            assert said, "the warm interpreter has ended"
            self.returncode = json.loads(said)
            self._end.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Warm:
    """It starts with the first order, and ends with `close`, or when whoever gives orders has gone."""

    def __init__(self) -> None:
        self._orders: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, words: Iterable[str], output: IO[Any]) -> Forked:
        """`afserve WORDS` with this process's environment, in the checkout."""
        if self._orders is None:
            self._orders = self._start()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = json.dumps([list(words), dict(os.environ)]).encode()
        with theirs:
            socket.send_fds(self._orders, [order], [theirs.fileno(), output.fileno()])
        assert select.select([ours], [], [], SECONDS)[0], "the warm interpreter says nothing"
        return Forked(json.loads(ours.recv(_MOST)), ours)

    def _start(self) -> socket.socket:
        """NumPy's BLAS starts threads on import, and a process with threads cannot be forked safely."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.warm", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
        return ours

    def close(self) -> None:
        if self._process is not None and self._orders is not None:
            self._orders.close()
            self._process.wait(SECONDS)
        self._process = self._orders = None


# ---- in the process that is warm


def serve(orders: socket.socket) -> None:
    """Until whoever gives orders has gone."""
    ends: dict[int, int] = {}
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select([orders, woken], [], [])[0]
        if woken in ready:
            os.read(woken, _MOST)
            _tell(ends)
        if orders in ready:
            said, (*passed,), _, _ = socket.recv_fds(orders, _MOST, 2)
            if not said:
                return
            _obey(json.loads(said), ends, *passed)


def _obey(order: tuple[list[str], dict[str, str]], ends: dict[int, int], end: int, output: int) -> None:
    pid = os.fork()
    if not pid:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(output, 1)
        os.dup2(output, 2)
        live(lambda: _command(order[0]), order[1], keep=())
    os.write(end, json.dumps(pid).encode())
    ends[pid] = end
    os.close(output)


def _tell(ends: dict[int, int]) -> None:
    for pid in list(ends):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            end = ends.pop(pid)
            with contextlib.suppress(OSError):  # nobody waits for it any more
                os.write(end, json.dumps(os.waitstatus_to_exitcode(status)).encode())
            os.close(end)


def _command(words: list[str]) -> None:
    from afserve.cli.main import main
    from afserve.launch.processes import forker

    seen = {**vars(forker.subprocess), "Popen": ForkServer}
    forker.subprocess = SimpleNamespace(**seen)  # type: ignore[attr-defined]
    sys.argv = ["afserve", *words]
    main()


class ForkServer:
    """As `subprocess.Popen` of `python -m afserve.launch.processes.fork_server`, by a process without threads."""

    def __init__(
        self, command: list[str], *, stdout: IO[bytes], env: Mapping[str, str], pass_fds: list[int], **_: Any
    ):
        from afserve.launch.processes.fork_server import main

        at = command.index("afserve.launch.processes.fork_server")
        descriptor, keeper, is_warm, folder = command[at + 1 :]
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        assert threading.active_count() == 1
        self.pid = os.fork()
        if self.pid:
            return
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(stdout.fileno(), 1)
        os.dup2(stdout.fileno(), 2)
        live(lambda: main(int(descriptor), int(keeper), is_warm == "1", Path(folder)), env, keep=pass_fds)

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG if until else 0)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("fork_server", timeout or 0.0)
            else:
                time.sleep(0.005)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def live(work: Callable[[], None], environment: Mapping[str, str], keep: Iterable[int]) -> NoReturn:
    """A process's whole life after a fork: nothing of its parent is open, and nothing that waits for the parent's end
    is done at this one's."""
    os.environ.clear()
    os.environ.update(environment)
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= _STANDARD and int(name) not in keep:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(int(name))
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    gc.enable()
    os._exit(_code_of(work))


def _code_of(work: Callable[[], None]) -> int:
    """As the interpreter ends: it waits for threads, then does what was left for the end."""
    code = 0
    try:
        work()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def preload() -> None:
    """In the order in which the fork server does, and what the command line imports once it starts a deployment."""
    from afserve.launch.processes import fork_server

    fork_server.preload()
    for name in ("cli.main", "cli.up", "launch.run.up", "launch.sites.choose", "launch.sites.local"):
        import_module(f"afserve.{name}")
    gc.freeze()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    preload()
    serve(socket.socket(fileno=int(sys.argv[1])))
