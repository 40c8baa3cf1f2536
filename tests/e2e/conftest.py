"""A served model as a real process, and what must be gone when it has ended."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

import httpx
import psutil
import pytest

from tests.e2e.names import named
from tests.e2e.ports import free_port
from tests.e2e.streams import begun, texts
from tests.patching import patch_library
from tests.warm.interpreter import ROOT, WARM, Forked

DEADLINE = 120.0
T = TypeVar("T")


class Up:
    """One `afserve up`. `stop` ends it and returns (exit code, everything it printed)."""

    def __init__(
        self, *flags: str, output: IO[bytes] | None = None, command: tuple[str, ...] = (), cold: bool = False
    ) -> None:
        """`output` in place of a file that `printed` reads; `command` is another module and what comes before `up`. It
        is forked from the warm interpreter, unless it is `cold`."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  lives as long as the process
        words = ["up", "--port", str(self.port), *flags]
        self.process: subprocess.Popen[bytes] | Forked
        if cold:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "afserve", *words],
                stdout=output or self.log,
                stderr=output or self.log,
                cwd=ROOT,
            )
        else:
            self.process = WARM.run([*command, *words], output or self.log)

    def wait_ready(self) -> "Up":
        until = time.monotonic() + DEADLINE
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise AssertionError(f"ended with {self.process.returncode}: {self.printed()}")
            try:
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"not ready after {DEADLINE} s: {self.printed()}")

    def status(self) -> dict[str, int]:
        """Node name -> pid."""
        nodes = httpx.get(f"{self.url}/status", timeout=DEADLINE).json()["nodes"]
        return {node["name"]: node["pid"] for node in nodes}

    def folder(self) -> Path:
        """The run's own folder, where its fork server writes what it has to say."""
        return Path(os.readlink(f"/proc/{self.fork_server().pid}/fd/1")).parent

    def fork_server(self) -> psutil.Process:
        """The first of them, where there are several models."""
        return self.fork_servers()[0]

    def fork_servers(self) -> list[psutil.Process]:
        """A node that begins is called so too, but leads no session."""
        return [child for child in self._children() if _asked(partial(_is_fork_server, child), False)]

    def controller(self) -> psutil.Process | None:
        """None while there is none."""
        return next((c for c in self._children() if _asked(c.name, "") == "afserve-control"), None)

    def _children(self) -> list[psutil.Process]:
        """Those that have not ended."""
        children = psutil.Process(self.process.pid).children()
        return [c for c in children if _asked(c.status, psutil.STATUS_ZOMBIE) != psutil.STATUS_ZOMBIE]

    def family(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def stop(self, number: int = signal.SIGINT) -> tuple[int, str]:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        return self.process.wait(DEADLINE), self.printed()

    def printed(self) -> str:
        self.log.seek(0)
        return self.log.read()


def _is_fork_server(process: psutil.Process) -> bool:
    return process.name() == "afserve-fork" and os.getsid(process.pid) == process.pid


def _asked(what: Callable[[], T], otherwise: T) -> T:
    """Of a process that may have just ended."""
    try:
        return what()
    except (psutil.Error, ProcessLookupError):
        return otherwise


def assert_gone(family: list[psutil.Process], port: int) -> None:
    """No process of the run is left, and its port can be listened on again."""
    _, alive = psutil.wait_procs(family, timeout=15)
    assert not alive, [name for name, _ in named(alive)]
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


@contextmanager
def servers() -> Iterator[Callable[..., Up]]:
    """Starts servers; whatever is left of them at the end is killed and counts as a failure."""
    started: list[tuple[Up, list[psutil.Process], list[Path]]] = []

    def start(
        *flags: str,
        ready: bool = True,
        output: IO[bytes] | None = None,
        command: tuple[str, ...] = (),
        cold: bool = False,
    ) -> Up:
        server = Up(*flags, output=output, command=command, cold=cold)
        started.append((server, [], []))
        if ready:
            server.wait_ready()
            started[-1][1].extend(server.family())
            started[-1][2].append(server.folder())
            assert started[-1][2][0].is_dir()
        return server

    yield start
    for server, family, folders in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait(DEADLINE)
        server.log.close()
        assert_gone(family, server.port)
        until = time.monotonic() + DEADLINE  # a fork server that has just begun sees late that it is alone
        while any(folder.exists() for folder in folders):
            assert time.monotonic() < until
            time.sleep(0.05)
    assert not [name for name in os.listdir("/dev/shm") if "afserve" in name]


@pytest.fixture
def warm_fork_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of deployments that this process starts itself."""
    from afserve.launch.processes import forker

    WARM.address()
    patch_library(monkeypatch, forker, "subprocess", Popen=WARM.fork_server)


@pytest.fixture
def warm_benches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What benches serve and measure."""
    monkeypatch.setattr("bench.served.AFSERVE", WARM.command())


@pytest.fixture(scope="module")
def warm_bench_nodes() -> Iterator[None]:
    """The processes that `afserve bench` starts beside itself, and fork servers of what it serves."""
    from afserve.launch.processes import forker

    with pytest.MonkeyPatch.context() as patch:
        for name in ("exchange", "neighbour", "pipeline_run"):
            patch.setattr(f"afserve.cli.bench.{name}.module", WARM.module)
        patch_library(patch, forker, "subprocess", Popen=WARM.fork_server)
        yield


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """`afserve up` with flags that are refused before anything runs: (exit code, what it printed). It is called in
    this process, which has imported all that a process of its own would import once more."""
    from afserve.cli.main import run
    from afserve.launch.run import up as launched

    def never(*_: object) -> None:
        raise AssertionError("it was not refused")

    for name in ("tolerate_lost_output", "_log"):
        monkeypatch.setattr(launched, name, lambda *_: None)
    monkeypatch.setattr(launched, "Supervisor", never)
    monkeypatch.setattr("afserve.launch.plan.gpus.module", WARM.module)

    def refuse(*flags: str) -> tuple[int, str]:
        capfd.readouterr()
        code = run(["up", "--port", "0", *flags])
        return code, capfd.readouterr().err

    return refuse


@pytest.fixture
def up() -> Iterator[Callable[..., Up]]:
    with servers() as start:
        yield start


@pytest.fixture(scope="module")
def shared_up() -> Iterator[Callable[..., Up]]:
    """One deployment for tests of a file that follow each other, ask for the same flags and leave it whole. It ends
    well before another one starts, and after the last."""
    with servers() as start:
        running: dict[tuple[str, ...], Up] = {}

        def end() -> None:
            for server in running.values():
                assert server.stop()[0] == 0
            running.clear()

        def shared(*flags: str) -> Up:
            if flags not in running:
                end()
                running[flags] = start(*flags)
            return running[flags].wait_ready()

        yield shared
        end()


@pytest.fixture(scope="session")
def undisturbed() -> Callable[[str], dict[str, str]]:
    """What `streams.begun` is answered where nothing happens, by prompt: greedy, so the same from every deployment of
    the bundled model. The first one that is asked says it."""
    known: dict[str, str] = {}

    def texts_of(url: str) -> dict[str, str]:
        if not known:
            known.update(texts(begun(url)))
        return known

    return texts_of
