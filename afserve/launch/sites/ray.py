"""A Ray cluster as a site: nodes start there, by way of `ray_helper`; gateways stay processes of this machine.

It imports no Ray and knows none: a helper process does, and what they say to each other is JSON. Lines that nodes write
on their hosts are shown here with the node's and the host's name.
"""

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from afserve.child import module
from afserve.comm.binding import Binding
from afserve.errors import ConfigError, PeerLost
from afserve.launch.plan.wishes import UpFlags
from afserve.launch.processes.endings import ended_with, last_lines
from afserve.launch.processes.environment import kept_environment
from afserve.launch.sites.local import LocalSite
from afserve.launch.sites.node_pids import NodePids
from afserve.launch.sites.ray_plan import set_aside
from afserve.launch.sites.site import OnExit
from afserve.launch.sites.survey import Survey, check_elsewhere, find_asked
from afserve.member import NodeId, Role

log = logging.getLogger("afserve.launch")
HELPER = "ray-helper"
_STOP_SECONDS = 15.0
_LINE = 1 << 24


class RaySite(LocalSite):
    """The helper starts with the first survey, once what needs no cluster has been checked."""

    def __init__(self, token: Path | None = None, *, insecure: bool = False) -> None:
        """`insecure`: nodes may speak plain text beyond their hosts."""
        super().__init__(token, warm=False)
        self._insecure = insecure
        self._helper: subprocess.Popen[bytes] | None = None
        self._talk: socket.socket | None = None  # with the helper
        self._pending = b""
        self._there = NodePids()

    def survey(self, flags: UpFlags) -> Survey:
        """Waits for room. Raises ConfigError where Ray is not installed, or has no cluster or no room."""
        for name in ("cluster", "ssh", "elsewhere"):
            if getattr(flags.run, name):
                raise ConfigError(f"--{name}: Ray chooses the hosts; drop it or --ray")
        found = find_asked(flags.run, self.folder)
        self._start_helper()
        plan = set_aside(self.ask_ray, flags.ray, flags.wishes, found, flags.run.listen)
        check_elsewhere(flags, plan.assignment, found, self.folder)
        flags = replace(flags, wishes=plan.wishes)
        return Survey(flags, found, plan.machine, plan.gpus, plan.assignment, plan.devices)

    def _start_helper(self) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("--ray: Ray is not installed here; type: pip install 'afserve[ray]'")
        self._talk, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), str(os.getpid())]
        with theirs, open(self._log(HELPER), "wb") as said:
            self._helper = subprocess.Popen(
                [*module("afserve.launch.sites.ray_helper"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=kept_environment(also=("RAY",)),
            )

    def ask_ray(self, what: Mapping[str, object]) -> Any:
        """Blocks until the helper answers; shows what it waits for. Raises ConfigError for what it refuses."""
        assert self._talk is not None, "survey() first"
        self._talk.sendall(json.dumps(what).encode() + b"\n")
        while True:
            said = self._next_line()
            if "answer" in said:
                return said["answer"]
            if "refused" in said:
                raise ConfigError(said["refused"], param="ray")
            print(said.get("waiting", ""), file=sys.stderr, flush=True)

    def spawn(
        self,
        node: NodeId,
        join: str,
        gateway: dict[str, Any] | None = None,
        listening: socket.socket | None = None,
        certs: Path | None = None,
        binding: Binding | None = None,
    ) -> None:
        if node.role is Role.GATEWAY:
            super().spawn(node, join, gateway, listening, certs)
            return
        self._there.expect(node)
        self._order(
            {
                "start": str(node),
                "role": node.role,
                "index": node.index,
                "join": join,
                "token": self.token,
                "certs": "" if certs is None else str(certs.resolve()),
                "insecure": self._insecure,
            }
        )

    def pid_of(self, node: NodeId) -> int | None:
        return (self._nodes if node.role is Role.GATEWAY else self._there).running(node)

    def inherit(self, node: NodeId, pid: int) -> None:
        """Its actor goes on under the name that it has; the helper knows whether this is its process."""
        (self._nodes if node.role is Role.GATEWAY else self._there).inherit(node, pid)

    def send_signal(self, node: NodeId, pid: int, number: signal.Signals) -> None:
        if node.role is Role.GATEWAY:
            super().send_signal(node, pid, number)
        else:
            self._order({"name": str(node), "pid": pid, "signal": int(number)})

    async def watch_nodes(self, on_exit: OnExit) -> None:
        await asyncio.gather(super().watch_nodes(on_exit), self._watch(on_exit))

    def last_words(self, name: str) -> str:
        return last_lines(self._log(name))

    def stop(self) -> None:
        """The helper ends the nodes and gives back what Ray set aside; then this machine's processes end."""
        super().stop()
        if os.getpid() != self._owner:
            return
        if self._talk is not None:
            with contextlib.suppress(OSError):
                self._talk.shutdown(socket.SHUT_RDWR)
            self._talk.close()
            self._talk = None
        if self._helper is not None:
            try:
                self._helper.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._helper.pid, signal.SIGKILL)
                self._helper.wait()

    # ---- the helper's end

    async def _watch(self, on_exit: OnExit) -> None:
        assert self._talk is not None, "survey() first"
        reader, writer = await asyncio.open_connection(sock=self._talk.dup(), limit=_LINE)
        try:
            while line := await reader.readline():
                self._note_helper(json.loads(line), on_exit)
        except ConnectionError:
            pass
        finally:
            writer.close()
        if not self._stopping:
            on_exit(HELPER, f"it closed its socket; its last words:\n{self.last_words(HELPER)}")

    def _note_helper(self, said: Mapping[str, Any], on_exit: OnExit) -> None:
        if "waiting" in said:
            log.warning("%s", said["waiting"])
        elif "lines" in said:
            self._show(said["node"], said["host"], said["lines"])
        elif "started" in said:
            self._there.note_start(NodeId(Role(said["role"]), said["index"]), said["pid"])
            log.info("%s starts on %s, pid %d", said["started"], said["host"], said["pid"])
        else:
            name, pid = said["exited"], said["pid"]
            # A pid of 0: it had not begun.
            ended = self._there.note_end(name, pid) if pid else self._there.called(name)
            if ended is not None and not self._stopping:
                on_exit(ended, said.get("why") or ended_with(said["code"]))

    def _show(self, name: str, host: str, lines: list[str]) -> None:
        """On this terminal, and in the node's log here."""
        with contextlib.suppress(OSError), open(self._log(name), "a", encoding="utf-8") as kept:
            kept.writelines(f"{line}\n" for line in lines)
        for line in lines:
            print(f"{name}@{host}: {line}", file=sys.stderr, flush=True)

    def _order(self, what: Mapping[str, object]) -> None:
        if self._talk is not None:
            with contextlib.suppress(OSError):  # the helper is gone; `watch` says so, with the reason
                self._talk.sendall(json.dumps(what).encode() + b"\n")

    def _next_line(self) -> Mapping[str, Any]:
        assert self._talk is not None
        while b"\n" not in self._pending:
            try:
                data = self._talk.recv(1 << 16)
            except ConnectionResetError:
                data = b""  # it ended before it read what it was told
            if not data:
                raise PeerLost(HELPER, f"it ended; its last words:\n{self.last_words(HELPER)}")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        found: Mapping[str, Any] = json.loads(line)
        return found

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"
