"""`afserve up` as a process that is ready, for benches that measure it from outside, and ends well or says why not."""

import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.origin import ROOT

AFSERVE = [sys.executable, "-m", "afserve"]
READY_S = 120.0
END_S = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    """`key` is the admin key. `log` has what the processes print."""

    url: str
    key: str
    log: Path
    process: "subprocess.Popen[bytes]"

    @property
    def admin(self) -> dict[str, str]:
        """Headers that prove that the key is known."""
        return {"Authorization": f"Bearer {self.key}"}

    def wait_ready(self, within: float = READY_S) -> "Served":
        """Raises RuntimeError with what it printed where it ends, or is not ready in so many seconds."""
        until = time.monotonic() + within
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise RuntimeError(f"afserve up ended with {self.process.returncode}: {self.printed()}")
            try:
                if httpx.get(f"{self.url}/ready").is_success:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise RuntimeError(f"afserve up was not ready in {within:.0f} s: {self.printed()}")

    def printed(self) -> str:
        return self.log.read_text(errors="replace")


@contextmanager
def served(*flags: str) -> Iterator[Served]:
    """It is ready. Raises RuntimeError where it does not start or end well."""
    with started(*flags) as here:
        yield here.wait_ready()


@contextmanager
def started(*flags: str) -> Iterator[Served]:
    """The same, not yet ready."""
    with tempfile.TemporaryDirectory() as folder:
        log, key = Path(folder, "log"), Path(folder, "key")
        key.touch(mode=0o600)
        key.write_text(secrets.token_hex())
        port = free_port()
        own = ["up", "--port", str(port), "--admin-key-file", str(key)]
        with log.open("wb") as file:
            process = subprocess.Popen([*AFSERVE, *own, *flags], cwd=ROOT, stdout=file, stderr=file)
        here = Served(f"http://127.0.0.1:{port}", key.read_text(), log, process)
        try:
            yield here
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(END_S)
        if code:
            raise RuntimeError(f"afserve up ended with {code}: {here.printed()}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
