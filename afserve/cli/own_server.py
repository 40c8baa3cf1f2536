"""A server for one command: `afserve up` as a process of its own, on loopback, ended with the command."""

import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from afserve.child import module
from afserve.doors.client import Client
from afserve.errors import DeadlineError, PeerLost

_READY_SECONDS, _END_SECONDS = 1800.0, 60.0


@contextmanager
def own_server(model: str) -> Iterator[str]:
    """Its URL, once it is ready. Raises PeerLost with what it said where it does not start."""
    with tempfile.TemporaryDirectory(prefix="afserve-") as folder:
        log, port = Path(folder, "log"), _free_port()
        command = [*module("afserve"), "up", model, "--port", str(port)]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, process, log)
            yield url
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + _READY_SECONDS
    with Client(url) as client:
        while not client.ready():
            if process.poll() is not None:
                said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise PeerLost("afserve up", "\n".join(said[-5:]) or f"ended with {process.returncode}")
            if time.monotonic() > until:
                raise DeadlineError(f"{url}: not ready after {_READY_SECONDS:g} s")
            time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
