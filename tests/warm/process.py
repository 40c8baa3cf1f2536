"""The process that is warm: `python -m tests.warm.process LISTENER OVER ADDRESS MODULES`.

It takes an order by connection, forks a process for it, and says its pid, and how it ended. A deployment forks its fork
server in place of starting one, and its gateways' text processes are forked here; all that follows is the program's.
"""

import atexit
import contextlib
import ctypes
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from runpy import run_module
from types import SimpleNamespace
from typing import IO, Any, NoReturn

FORK_SERVER, TEXT_PROCESS = "afserve.launch.processes.fork_server", "afserve.server.text.text_process"
OWN_NETWORK = "/proc/self/ns/net"
MOST = 1 << 20
_STANDARD = 3  # descriptors of a process that has no others


def client_of(address: str) -> list[str]:
    return [sys.executable, "-S", "-E", str(Path(__file__).with_name("client.py")), address]


def serve(listener: socket.socket, over: int, address: str) -> None:
    """Until whoever gives orders is gone. A process that nobody waits for any more is told to end."""
    ends: dict[int, socket.socket] = {}
    deserted: set[int] = set()
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        watched = {end: pid for pid, end in ends.items() if pid not in deserted}
        waited_for: list[Any] = [listener, woken, over, *watched]
        ready = select.select(waited_for, [], [])[0]
        if over in ready:
            return
        if woken in ready:
            os.read(woken, MOST)
            _tell(ends)
        for end, pid in watched.items():
            if end in ready and pid in ends:
                deserted.add(pid)
                os.kill(pid, signal.SIGTERM)
        if listener in ready:
            connection = listener.accept()[0]
            said, passed, _, _ = socket.recv_fds(connection, MOST, _STANDARD + 1)
            if said:
                forked = _obey(json.loads(said), connection, passed, address)
                if forked is not None:
                    ends[forked] = connection
                    deserted.discard(forked)
                    continue
            connection.close()  # whoever asked sees that nothing was said


def _obey(
    order: tuple[list[str], dict[str, str], str, str], end: socket.socket, passed: list[int], address: str
) -> int | None:
    """The process that was forked, None where there is room for none."""
    words, environment, folder, network = order
    warm, pid = os.getpid(), None
    try:
        pid = os.fork()
    except OSError as error:
        print(f"the warm interpreter cannot fork: {error}", file=sys.stderr)
    if pid == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for standard, descriptor in enumerate(passed[:_STANDARD]):
            os.dup2(descriptor, standard)
        os.chdir(folder)
        if network and os.stat(network).st_ino != os.stat(OWN_NETWORK).st_ino:
            move_to(network)
        more = passed[_STANDARD:]
        live(lambda: _run(words, more, address, warm), environment, keep=more)
    if pid is not None:
        with contextlib.suppress(OSError):  # whoever asked has gone
            end.send(json.dumps(pid).encode())
    for descriptor in passed:
        os.close(descriptor)
    return pid


def move_to(network: str) -> None:
    """This thread, and what it starts from now on, is in the network of a namespace's file."""
    with open(network, "rb") as namespace:
        moved = ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0)
    assert moved == 0, os.strerror(ctypes.get_errno())


def _tell(ends: dict[int, socket.socket]) -> None:
    for pid in list(ends):
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None:
            code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            with ends.pop(pid) as end, contextlib.suppress(OSError):  # nobody waits for it any more
                end.send(json.dumps(code).encode())
            os.waitpid(pid, 0)  # told first: until then its pid is nobody else's


def _run(words: list[str], passed: list[int], address: str, parent: int) -> None:
    if words[0] == FORK_SERVER:
        _serve_forks(passed[0], words[1:])
    elif words[0] == TEXT_PROCESS:
        from afserve.server.text.text_process import main as prepare

        os.setsid()
        prepare(parent)
    else:
        _fork_what_it_starts(address)
        _program(words)


def _fork_what_it_starts(address: str) -> None:
    from afserve.launch.processes import forker
    from afserve.server.text import text_pool

    seen = {**vars(subprocess), "Popen": ForkServer}
    vars(forker)["subprocess"] = SimpleNamespace(**seen)
    text_pool.module = lambda name: [*client_of(address), name]  # type: ignore[attr-defined]


def _program(words: list[str]) -> None:
    """A module, as `python -m` runs it, or a command of `afserve`."""
    if "." in words[0]:
        sys.argv = words
        sys.modules.pop(words[0], None)
        run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        from afserve.cli.main import main

        sys.argv = ["afserve", *words]
        main()


def _serve_forks(descriptor: int, arguments: list[str]) -> None:
    from afserve.launch.processes.fork_server import main

    keeper, is_warm, folder = arguments
    os.setsid()
    main(descriptor, int(keeper), is_warm == "1", Path(folder))


def arguments_of(command: Sequence[str]) -> list[str]:
    return list(command[list(command).index(FORK_SERVER) + 1 :])


class ForkServer:
    """As `subprocess.Popen` of `python -m afserve.launch.processes.fork_server`, by a process without threads."""

    def __init__(
        self, command: list[str], *, stdout: IO[bytes], env: Mapping[str, str], pass_fds: list[int], **_: Any
    ):
        descriptor, *rest = arguments_of(command)
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        assert threading.active_count() == 1
        self.pid = os.fork()
        if self.pid:
            return
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(stdout.fileno(), 1)
        os.dup2(stdout.fileno(), 2)
        live(lambda: _serve_forks(int(descriptor), rest), env, keep=pass_fds)

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
    os._exit(code_of(work))


def code_of(work: Callable[[], None]) -> int:
    """As the interpreter ends, in what tests look at: it waits for threads, then does what was left for the end.
    Modules are not taken down, and a SystemExit with words says none of them."""
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


def preload(modules: Sequence[str]) -> None:
    """Of a deployment in the order in which the fork server does, and what the command line imports to start one."""
    if not modules:
        from afserve.launch.processes import fork_server

        fork_server.preload()
        modules = [
            f"afserve.{name}" for name in ("cli.main", "cli.up", "launch.run.up", "launch.sites.choose")
        ]
        modules += ["afserve.launch.sites.local", TEXT_PROCESS]
    for name in modules:
        import_module(name)
    gc.freeze()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    preload(sys.argv[4:])
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
