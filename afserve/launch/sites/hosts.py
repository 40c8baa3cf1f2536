"""The hosts of a cluster file as a site: those that are this machine start here, and on the others somebody types a
line, which is printed, or ssh types it.

The nodes there are the membership's business; this starts none of them but by ssh, and says who is missing.
"""

import asyncio
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from afserve.control.controller import Controller
from afserve.control.hosts import CarriedHosts
from afserve.errors import ConfigError, PeerLost
from afserve.launch.plan.cluster import Cluster, read_cluster
from afserve.launch.plan.gpus import Gpus, probe_gpus
from afserve.launch.plan.host_memory import memories, with_own_memory
from afserve.launch.plan.hosts import (
    TOGETHER_SECONDS,
    HostAssignment,
    assign,
    host_command,
    look_up,
    own_addresses,
)
from afserve.launch.plan.machine import this_machine
from afserve.launch.plan.wishes import UpFlags
from afserve.launch.sites.local import LocalSite
from afserve.launch.sites.survey import Survey, check_elsewhere, find_asked
from afserve.settings import flag_of

SAY_SECONDS = 5.0
_END_SECONDS = 10.0  # for hosts to end after the run
_TAIL_LINES = 6
# The token comes by way of ssh's input, so that it is on no command line, and its copy goes with the command.
_THERE = 'umask 077; t=$(mktemp) && trap \'rm -f "$t"\' EXIT && cat > "$t" && {command}'
_IN_FILE = {  # flag -> the key of a cluster file that says the same
    "model": "model",
    "attention": "attention.nodes",
    "experts": "experts.nodes",
    "colocated": "experts.nodes",
    "prefill": "attention.prefill",
    "decode": "attention.prefill",
    "prefill_tokens": "attention.prefill_tokens",
    "prompt_share": "experts.prompt_share",
    "micro_batches": "micro_batches",
    "device": "host.hardware",
}


class HostsSite(LocalSite):
    """Hosts end by themselves with the run, and ssh with them."""

    def __init__(self, token: Path | None, file: Path, certs: Path | None, ssh: str = "") -> None:
        """`ssh` is what is given a host and a line to run there; empty where people type."""
        super().__init__(token)
        self._file, self._ssh = file, ssh
        self._certs = None if certs is None else certs.resolve()  # as other hosts are to find theirs
        self._typing: list[asyncio.subprocess.Process] = []
        self._tasks: list[asyncio.Task[None]] = []

    def survey(self, flags: UpFlags) -> Survey:
        cluster = read_cluster(self._file)
        gpus = Gpus() if all(host.on_cpu for host in cluster.hosts) else probe_gpus()
        flags, assigned = assigned_by(flags, cluster, gpus)
        machine = this_machine()
        shares, every = memories(cluster, assigned, machine, gpus)
        flags = replace(
            flags,
            wishes=replace(
                flags.wishes, hosts=with_own_memory(cluster, assigned, machine), memories=shares, gpus=every
            ),
        )
        found = find_asked(flags.run, self.folder)
        check_elsewhere(flags, assigned, found, self.folder)
        return Survey(flags, found, machine, gpus, assigned, assigned.hosted)

    async def invite(
        self,
        assignment: HostAssignment,
        controller: Controller,
        hosts: CarriedHosts,
        say: Callable[[str], None],
    ) -> None:
        """Raises ConfigError where ssh cannot be started."""
        places = assignment.places
        if not places:
            return
        if self._ssh:
            for place in places:
                process = await self._type(place.name, controller.address)
                say(f"{place.name}: {self._ssh} starts its nodes")
                listening = self._listen(place.name, process, controller, hosts, say)
                self._tasks.append(asyncio.create_task(listening))
        else:
            say(f"waiting {TOGETHER_SECONDS:.0f} s for {len(places)} host{'s' * (len(places) > 1)}:")
            for line in assignment.commands(controller.address, self.token_file, self._certs):
                say(line)
        self._tasks.append(asyncio.create_task(_name_missing(hosts, say)))

    async def dismiss(self) -> None:
        ends = [asyncio.create_task(process.wait()) for process in self._typing]
        if ends:
            await asyncio.wait(ends, timeout=_END_SECONDS)
        for process in self._typing:
            if process.returncode is None:
                process.terminate()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *ends, return_exceptions=True)

    async def _type(self, host: str, join: str) -> asyncio.subprocess.Process:
        """ssh, which has been given the token."""
        line = _THERE.format(command=host_command(join, '"$t"', self._certs))
        try:
            process = await asyncio.create_subprocess_exec(
                *shlex.split(self._ssh),
                host,
                line,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"--ssh-command {self._ssh}: {error.strerror}") from error
        self._typing.append(process)
        assert process.stdin is not None
        process.stdin.write(self.token.encode())
        process.stdin.close()
        return process

    async def _listen(
        self,
        host: str,
        process: asyncio.subprocess.Process,
        controller: Controller,
        hosts: CarriedHosts,
        say: Callable[[str], None],
    ) -> None:
        """What is printed there, with the host's name before it; an end before the run's ends the run."""
        assert process.stdout is not None
        last: list[str] = []
        while line := await process.stdout.readline():
            text = line.decode(errors="replace").rstrip()
            last = [*last[1 - _TAIL_LINES :], text]
            say(f"{host}: {text}")
        code = await process.wait()
        if hosts.missing().get(host):
            words = "\n".join(f"  {text}" for text in last)
            why = f"its ssh ended with exit code {code} before its nodes had joined"
            controller.end_run(PeerLost(f"host {host}", f"{why}; its last words:\n{words}" if words else why))


async def _name_missing(hosts: CarriedHosts, say: Callable[[str], None]) -> None:
    """Every few seconds, until all have come."""
    while True:
        await asyncio.sleep(SAY_SECONDS)
        missing = hosts.missing()
        if not missing:
            return
        for host, nodes in missing.items():
            here = "has joined, its nodes start" if hosts.has_come(host) else "has not joined"
            say(f"waiting for {host}, which {here}: {', '.join(map(str, nodes))}")


def assigned_by(flags: UpFlags, cluster: Cluster, gpus: Gpus) -> tuple[UpFlags, HostAssignment]:
    """What a cluster file says, as flags, and who runs where. Raises ConfigError where a flag says otherwise."""
    assignment = assign(cluster, flags.run.listen, look_up, own_addresses())
    _check_cuda(cluster, assignment, gpus)
    wishes = flags.wishes
    engine = replace(
        wishes.engine,
        device=cluster.device,
        prefill_tokens=cluster.prefill_tokens or wishes.engine.prefill_tokens,
        prompt_share=cluster.prompt_share or wishes.engine.prompt_share,
    )
    found = replace(
        flags,
        run=replace(flags.run, model=cluster.model),
        wishes=replace(
            wishes,
            attention=cluster.attention,
            prefill=cluster.prefill or wishes.prefill,
            decode=cluster.decode_nodes or wishes.decode,
            experts=cluster.experts or None,
            colocated=not cluster.experts,
            micro_batches=str(cluster.micro_batches),
            engine=engine,
            prefill_device=cluster.prefill_device,
            expert_device=cluster.expert_device,
            batch=cluster.batch,
            hosts=assignment.node_counts(),
            expert_hosts=assignment.expert_hosts(),
        ),
    )
    asked, wanted = _in_file(flags), _in_file(found)
    for name, key in _IN_FILE.items():
        if name in flags.given and asked[name] != wanted[name]:
            flag = flag_of(name) if name == "colocated" else f"{flag_of(name)} {asked[name]}"
            raise ConfigError(
                f"{flag}: {cluster.file} has {key} = {_as_written(cluster, name)}; drop the flag or edit the file",
                param=name,
            )
    return found, assignment


def _in_file(flags: UpFlags) -> dict[str, object]:
    """What a cluster file says too, by the flags' names."""
    wishes = flags.wishes
    return {
        "model": flags.run.model,
        "attention": wishes.attention,
        "experts": wishes.experts,
        "colocated": wishes.colocated,
        "prefill": wishes.prefill,
        "decode": wishes.decode,
        "prefill_tokens": wishes.engine.prefill_tokens,
        "prompt_share": wishes.engine.prompt_share,
        "micro_batches": wishes.micro_batches,
        "device": wishes.engine.device,
    }


def _as_written(cluster: Cluster, flag: str) -> str:
    if flag == "device":
        return cluster.decode_hardware
    return str(getattr(cluster, {"colocated": "experts", "decode": "prefill"}.get(flag, flag)))


def _check_cuda(cluster: Cluster, assignment: HostAssignment, gpus: Gpus) -> None:
    """Of the hosts that are this machine; the others' nodes say it themselves."""
    for mine in assignment.here:
        if mine.device != "cpu" and int(mine.device.partition(":")[2]) >= len(gpus):
            kind = next(h.hardware for h in cluster.hosts if h.address == mine.host)
            raise ConfigError(
                f"--cluster {cluster.file}: host {mine.host}: {kind} needs {mine.device}, but this machine has "
                f'{len(gpus)} CUDA devices; hardware = "cpu-host" runs it on the CPU'
            )
