"""Breaks processes of this run on purpose: kills, stops or slows one, for people who want to see what happens then.

Only processes that this run has started are touched, and through the fork server that is their parent: no signal
reaches another process that has got the same number.
"""

import asyncio
import logging
import signal

from afserve.control.wire.change_values import FaultKind
from afserve.errors import ConfigError
from afserve.launch.sites.site import Site
from afserve.member import NodeId

log = logging.getLogger("afserve.incidents")
_AT_REST, _AT_WORK = 0.045, 0.005  # seconds of each turn of a slow node: a tenth of its speed


class Chaos:
    """`stop()` lets everyone go on. Calls come from one event loop."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._running: dict[int, tuple[NodeId, asyncio.Task[None]]] = {}  # by pid

    def begin(self, node: NodeId, kind: FaultKind, seconds: float) -> int:
        """Returns the pid; what lasts goes on by itself. Raises ConfigError for a node that has no process of ours."""
        pid = self._site.pid_of(node)
        if pid is None:
            raise ConfigError(
                f"{node} has no process that was started from here; break another one, or this one when it is back",
                param="node",
            )
        self._end(pid)
        log.warning("%s (pid %d): %s for %g s, as asked", node, pid, kind, seconds)
        if kind is FaultKind.KILL:
            self._site.send_signal(node, pid, signal.SIGKILL)
        else:
            self._site.send_signal(node, pid, signal.SIGSTOP)
            task = asyncio.create_task(self._lasts(node, pid, kind, seconds))
            self._running[pid] = (node, task)
        return pid

    def stop(self) -> None:
        for pid in list(self._running):
            self._end(pid)

    def _end(self, pid: int) -> None:
        if (found := self._running.pop(pid, None)) is not None:
            node, task = found
            task.cancel()
            self._site.send_signal(node, pid, signal.SIGCONT)

    async def _lasts(self, node: NodeId, pid: int, kind: FaultKind, seconds: float) -> None:
        """It has just been stopped."""
        if kind is FaultKind.STOP:
            await asyncio.sleep(seconds)
        else:
            await self._take_turns(node, pid, seconds)
        self._running.pop(pid, None)
        self._site.send_signal(node, pid, signal.SIGCONT)

    async def _take_turns(self, node: NodeId, pid: int, seconds: float) -> None:
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until:
            await asyncio.sleep(_AT_REST)
            self._site.send_signal(node, pid, signal.SIGCONT)
            await asyncio.sleep(_AT_WORK)
            self._site.send_signal(node, pid, signal.SIGSTOP)
