"""A running server as benches of faults see it: who serves, how one is broken on purpose, and what the server says."""

import asyncio
import signal
import time
from contextlib import suppress
from typing import Any

import psutil

from afserve.doors.client import Client
from afserve.errors import AfserveError, PeerLost
from bench.served import Served

WHOLE_S = 120.0
FOR_EVER = 3600.0  # seconds that are longer than any case
CONTROLLER = "controller"
_CONTROLLER_PROCESS, _FORK_SERVER = "afserve-control", "afserve-fork"


class Deployment:
    """Asked by HTTP with its admin key, until the end of `with`."""

    def __init__(self, up: Served) -> None:
        self.up = up
        self._client = Client(up.url, api_key=up.key)

    def __enter__(self) -> "Deployment":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    @property
    def url(self) -> str:
        return self.up.url

    @property
    def client(self) -> Client:
        """With the admin key."""
        return self._client

    def status(self) -> Any:
        return self._client.status()

    def break_one(self, node: str, stopped: float | None) -> None:
        """The server does it, which starts the node again without counting how often; but not to its controller."""
        if node == CONTROLLER:
            assert stopped is None, "a controller is only killed"
            psutil.Process(self.controller()).send_signal(signal.SIGKILL)
        elif stopped is None:
            with suppress(PeerLost):  # the gateway that was to answer may be the one that is killed
                self._client.fault(node, "kill")
        else:
            self._client.fault(node, "stop", stopped)

    def fault(self, node: str, kind: str, seconds: float) -> bool:
        """Whether it was there to be broken."""
        try:
            self._client.fault(node, kind, 0.0 if kind == "kill" else seconds)
        except AfserveError:
            return False
        return True

    def model_nodes(self) -> list[str]:
        """Those that hold a part of the model."""
        nodes = self.status()["nodes"]
        return [n["name"] for n in nodes if n["state"] == "ready" and n["role"] in ("attention", "expert")]

    def controller(self) -> int:
        """The pid of the process that has the controller."""
        children = psutil.Process(self.up.process.pid).children()
        pid: int = next(child.pid for child in children if child.name() == _CONTROLLER_PROCESS)
        return pid

    def fork_server(self) -> int:
        """The pid of the process that forks nodes; 0 while there is none."""
        children = psutil.Process(self.up.process.pid).children()
        return next((child.pid for child in children if _name_of(child) == _FORK_SERVER), 0)

    def serving(self) -> dict[str, int]:
        """Name -> pid of all that serve, the controller among them."""
        nodes = {n["name"]: n["pid"] for n in self.status()["nodes"] if n["state"] == "ready"}
        return nodes | {CONTROLLER: self.controller()}

    async def wait_whole(self, not_pid: int | None = None) -> None:
        """Until all nodes serve, none of them in this process."""
        until, status = time.monotonic() + WHOLE_S, None
        while time.monotonic() < until:
            status = await asyncio.to_thread(self.whole)
            if status is not None and not_pid not in status:
                return
            await asyncio.sleep(0.05)
        raise RuntimeError(f"not all nodes serve {WHOLE_S:.0f} s after a fault: {self.status()['nodes']}")

    def whole(self) -> list[int] | None:
        """The pids of all nodes that are wanted; None while one is missing or nobody can say."""
        try:
            status, controller = self.status(), self.controller()
        except (AfserveError, StopIteration, psutil.Error):
            return None
        pids = [node["pid"] for node in status["nodes"] if node["state"] == "ready"]
        return [*pids, controller] if len(pids) == sum(status["wanted"].values()) else None


def _name_of(process: psutil.Process) -> str:
    """Empty where it has just ended."""
    try:
        name: str = process.name()
    except psutil.Error:
        return ""
    return name
