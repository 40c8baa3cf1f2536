"""Warm interpreters: each is one process that has imported what many processes of tests import, and forks them.

The imports are more than three of the four seconds of CPU that a small deployment costs, and the same for all. What is
forked (`process.py`) runs the program as it is, as a child with its own descriptors, environment and folder. Tests of
the beginning itself (environment, memory, what is imported) start `python -m afserve`.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.warm.process import FORK_SERVER, MOST, TEXT_PROCESS, arguments_of, client_of

ROOT = Path(__file__).parents[2]
SECONDS = 120.0  # to import all, and to fork


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
            said = self._end.recv(MOST)
            assert said, "the warm interpreter has ended"
            self.returncode = json.loads(said)
            self._end.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends, and is not told yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Warm:
    """It starts with the first order, and ends with `close`, or with this process."""

    def __init__(self, *modules: str) -> None:
        """`modules` of afserve are imported; without any, all that a deployment imports."""
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._alive = -1  # the end of a pipe that nobody else has

    def run(
        self, words: Sequence[str], output: IO[Any], errors: IO[Any] | None = None, network: str = ""
    ) -> Forked:
        """`afserve WORDS` with this process's environment, in the checkout, or another module and its arguments;
        `network` is a namespace's file."""
        return self._order(words, os.environ, network, [output.fileno(), (errors or output).fileno()])

    def fork_server(
        self,
        command: Sequence[str],
        *,
        stdout: IO[bytes],
        env: Mapping[str, str],
        pass_fds: list[int],
        **_: Any,
    ) -> Forked:
        """In place of `subprocess.Popen` of one, by a process that may have threads."""
        words = [FORK_SERVER, *arguments_of(command)[1:]]
        return self._order(words, env, "", [stdout.fileno(), stdout.fileno(), *pass_fds])

    def _order(
        self, words: Sequence[str], environment: Mapping[str, str], network: str, passed: list[int]
    ) -> Forked:
        order = json.dumps([list(words), dict(environment), str(ROOT), network]).encode()
        with open(os.devnull, "rb") as nothing:
            descriptors = [nothing.fileno(), *passed]
            try:
                return self._forked(order, descriptors)
            except OSError:
                self._begin_anew_if_ended()
                return self._forked(order, descriptors)

    def _forked(self, order: bytes, passed: list[int]) -> Forked:
        """Raises OSError where nobody takes the order."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(self.address())
            socket.send_fds(connection, [order], passed)
            assert select.select([connection], [], [], SECONDS)[0], "the warm interpreter says nothing"
            if not (said := connection.recv(MOST)):
                raise ConnectionResetError("the warm interpreter has ended, or could not fork")
        except BaseException:
            connection.close()
            raise
        return Forked(json.loads(said), connection)

    def _begin_anew_if_ended(self) -> None:
        """One that cannot fork at the moment has others to look after."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
                self.close()

    def said(self, *words: str, seconds: float = SECONDS) -> "subprocess.CompletedProcess[str]":
        """The same to its end, with what it printed."""
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            code = self.run(words, output, errors).wait(seconds)
            for file in (output, errors):
                file.seek(0)
            return subprocess.CompletedProcess(words, code, output.read(), errors.read())

    def command(self) -> list[str]:
        """What stands in for `python -m afserve` in a shell."""
        return client_of(self.address())

    def module(self, name: str) -> list[str]:
        """In place of `afserve.child.module`."""
        return [*self.command(), name]

    def address(self) -> str:
        """Where orders are taken. NumPy's BLAS starts threads on import, and a process with threads cannot be forked
        safely."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory()
        address = f"{self._folder.name}/orders"
        if self._process is None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(address)
                listener.listen(64)
                over, self._alive = os.pipe()
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "tests.warm.process",
                        str(listener.fileno()),
                        str(over),
                        address,
                        *self._modules,
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[listener.fileno(), over],
                    cwd=ROOT,
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                )
                os.close(over)
        return address

    def close(self) -> None:
        if self._process is not None:
            os.close(self._alive)
            self._process.wait(SECONDS)
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._folder = None


WARM, TEXTS = Warm(), Warm(TEXT_PROCESS)
