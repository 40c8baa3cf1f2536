"""What the user of `afserve up` sees of other hosts: what to type there, or ssh that types it, and who is missing.

The nodes there are the membership's business; this prints, and starts nothing but ssh.
"""

import asyncio
import shlex
from collections.abc import Callable
from pathlib import Path

from afserve.errors import AfserveError, ConfigError, PeerLost
from afserve.launch.plan.hosts import TOGETHER_SECONDS, host_command
from afserve.launch.run.local_run import LocalRun

SAY_SECONDS = 5.0
_END_SECONDS = 10.0  # for hosts to end after the run
_TAIL_LINES = 6
# The token comes by way of ssh's input, so that it is on no command line, and its copy goes with the command.
_THERE = 'umask 077; t=$(mktemp) && trap \'rm -f "$t"\' EXIT && cat > "$t" && {command}'


class OtherHosts:
    """`say` prints a line. `start` begins, `stop` ends what ssh has begun; hosts end by themselves with the run."""

    def __init__(self, run: LocalRun, token: Path, certs: Path | None, say: Callable[[str], None]) -> None:
        self._run, self._token, self._certs, self._say = run, token, certs, say
        self._ssh: list[asyncio.subprocess.Process] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, ssh: str = "") -> None:
        """`ssh` is what is given a host and a line to run there; empty where people type. Raises ConfigError."""
        places = self._run.assignment.places
        if not places:
            return
        join = self._run.controller.address
        if ssh:
            for place in places:
                await self._type(ssh, place.name, join)
        else:
            self._say(f"waiting {TOGETHER_SECONDS:.0f} s for {len(places)} host{'s' * (len(places) > 1)}:")
            for line in self._run.assignment.commands(join, self._token, self._certs):
                self._say(line)
        self._tasks.append(asyncio.create_task(self._name_missing()))

    async def stop(self) -> None:
        ends = [asyncio.create_task(process.wait()) for process in self._ssh]
        if ends:
            await asyncio.wait(ends, timeout=_END_SECONDS)
        for process in self._ssh:
            if process.returncode is None:
                process.terminate()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *ends, return_exceptions=True)

    async def _type(self, ssh: str, host: str, join: str) -> None:
        words = shlex.split(ssh)
        line = _THERE.format(command=host_command(join, '"$t"', self._certs))
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                host,
                line,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"--ssh-command {ssh}: {error.strerror}", param="ssh_command") from error
        self._ssh.append(process)
        assert process.stdin is not None
        process.stdin.write(self._run.processes.token.encode())
        process.stdin.close()
        self._say(f"{host}: {ssh} starts its nodes")
        self._tasks.append(asyncio.create_task(self._listen(host, process)))

    async def _listen(self, host: str, process: asyncio.subprocess.Process) -> None:
        """What is printed there, with the host's name before it; an end before the run's ends the run."""
        assert process.stdout is not None
        last: list[str] = []
        while line := await process.stdout.readline():
            text = line.decode(errors="replace").rstrip()
            last = [*last[1 - _TAIL_LINES :], text]
            self._say(f"{host}: {text}")
        code = await process.wait()
        if self._run.hosts.missing().get(host):
            words = "\n".join(f"  {text}" for text in last)
            why = f"its ssh ended with exit code {code} before its nodes had joined"
            self._fail(PeerLost(f"host {host}", f"{why}; its last words:\n{words}" if words else why))

    def _fail(self, error: AfserveError) -> None:
        self._run.controller.fail(error)

    async def _name_missing(self) -> None:
        while True:
            await asyncio.sleep(SAY_SECONDS)
            missing = self._run.hosts.missing()
            if not missing:
                return
            for host, nodes in missing.items():
                here = "has joined, its nodes start" if self._run.hosts.has_come(host) else "has not joined"
                self._say(f"waiting for {host}, which {here}: {', '.join(map(str, nodes))}")
