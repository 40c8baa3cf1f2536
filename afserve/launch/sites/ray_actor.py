"""What runs inside a Ray actor: it looks at its host, and starts one `afserve node` after another.

Only text and numbers go in and come out; structures are JSON. It imports no Ray: `ray_helper.py` makes an actor of it.
All calls run in one event loop, hence in one thread, which the kernel takes for the parent of the node's process.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
from dataclasses import asdict
from pathlib import Path

from afserve import __version__
from afserve.child import module
from afserve.launch.plan.gpus import probe_gpus
from afserve.launch.plan.machine import this_machine

_MOST_LINES = 1000  # kept for whoever asks next; older ones are dropped
_LINE = 1 << 16
_KILLED_SECONDS = 5.0


class NodeHost:
    """One node's place on a host. `start` may be called again; the earlier process is killed first."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._lines: list[str] = []
        self._news = asyncio.Event()

    async def look(self, model: str, gpus: bool) -> str:
        """What a launcher wants to know of this host, and whether the checkpoint's folder is here. JSON."""
        found = await asyncio.to_thread(probe_gpus) if gpus else None
        return json.dumps(
            {
                "name": socket.gethostname(),
                "version": __version__,
                "has_model": (Path(model) / "config.json").is_file(),
                "machine": asdict(this_machine()),
                "gpus": None if found is None else asdict(found),
            }
        )

    async def start(self, role: str, index: int, join: str, token: str, certs: str, insecure: bool) -> int:
        """Returns the pid of `afserve node`. The token is in no file, argument or variable."""
        await self.kill()
        secret = os.memfd_create("afserve-token")
        try:
            os.write(secret, token.encode())
            node = ["node", "--role", role, "--index", str(index), "--join", join]
            node += ["--certs", certs] * bool(certs) + ["--insecure-nodes"] * insecure
            self._process = await asyncio.create_subprocess_exec(
                *[*module("afserve.kinship"), str(os.getpid())],
                *[*node, "--token-file", f"/dev/fd/{secret}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[secret],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                limit=_LINE,
            )
        finally:
            os.close(secret)
        self._reading = asyncio.create_task(self._read(self._process))
        return self._process.pid

    async def heard(self, pid: int, seconds: float) -> str:
        """JSON: the lines that the process `pid` wrote since the last call, and its exit code once it has ended.

        Waits at most `seconds` for news.
        """
        process = self._process
        if process is None or process.pid != pid:
            return json.dumps({"lines": [], "code": -int(signal.SIGKILL)})
        try:
            await asyncio.wait_for(self._news.wait(), seconds)
        except TimeoutError:
            return json.dumps({"lines": [], "code": None})
        self._news.clear()
        lines, self._lines = self._lines, []
        ended = self._reading.done()
        return json.dumps({"lines": lines, "code": await process.wait() if ended else None})

    async def send_signal(self, pid: int, number: int) -> None:
        """Nothing where that process has ended."""
        if self._process is not None and self._process.pid == pid and self._process.returncode is None:
            self._process.send_signal(number)

    async def kill(self) -> None:
        """What is left of a process."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await asyncio.wait_for(self._reading, _KILLED_SECONDS)
        self._process, self._lines = None, []
        self._news.clear()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Until it has ended and said everything."""
        assert process.stdout is not None
        while line := await _line_of(process.stdout):
            self._lines = [*self._lines[-_MOST_LINES:], line.decode(errors="replace").rstrip()]
            self._news.set()
        await process.wait()
        self._news.set()


async def _line_of(stream: asyncio.StreamReader) -> bytes:
    """The next line, or a part of one that is longer than anybody reads."""
    try:
        return await stream.readline()
    except ValueError:  # asyncio dropped what was longer than its limit
        return b"(a line that was too long)\n"
