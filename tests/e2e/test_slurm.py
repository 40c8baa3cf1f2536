"""The rendered job on a real Slurm of this machine: one controller and several hosts' daemons, each host a name here.

Skipped where Slurm is not installed (Debian: slurm-wlm).
"""

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.long,
    pytest.mark.skipif(
        shutil.which("slurmctld") is None or shutil.which("slurmd") is None,
        reason="Slurm is not installed: slurm-wlm",
    ),
    pytest.mark.timeout(600),
]
HOSTS = 4
CONF = """
ClusterName=afserve
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
SlurmctldPort={ctld}
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/d-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/d-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=4
MessageTimeout=10
TCPTimeout=2
KillWait=2
WaitTime=0
SlurmdParameters=config_overrides
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = (
    "NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 Sockets=1 CoresPerSocket=4 "
    "ThreadsPerCore=1 RealMemory=2000"
)
CLUSTER = """
micro_batches = 2
[model]
name = "nano"
[attention]
nodes = 2
tensor_parallel = 1
batch = 64
[experts]
nodes = 2
[[host]]
address = "attention-0.example"
role = "attention"
hardware = "cpu-host"
devices = 1
[[host]]
address = "attention-1.example"
role = "attention"
hardware = "cpu-host"
devices = 1
[[host]]
address = "experts-0.example"
role = "experts"
hardware = "cpu-host"
devices = 1
[[host]]
address = "experts-1.example"
role = "experts"
hardware = "cpu-host"
devices = 1
"""


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports: list[int] = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def until(condition: Callable[[], object], seconds: float = 150.0, said: Callable[[], str] = str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, said()
        time.sleep(0.2)


class Slurm:
    def __init__(self, folder: Path) -> None:
        self.folder, host = folder, socket.gethostname()
        ctld, *ports = free_ports(HOSTS + 1)
        for name in ("state", *(f"spool-n{n}" for n in range(1, HOSTS + 1))):
            (folder / name).mkdir()
        nodes = "\n".join(NODE.format(n=n, host=host, port=port) for n, port in enumerate(ports, 1))
        conf = CONF.format(host=host, user=getpass.getuser(), ctld=ctld, folder=folder, nodes=nodes)
        (folder / "slurm.conf").write_text(conf)
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons = {"ctld": self._daemon("slurmctld", "-D", "-i")}
        for n in range(1, HOSTS + 1):
            self.daemons[f"n{n}"] = self._daemon("slurmd", "-D", "-N", f"n{n}")
        until(lambda: self("sinfo", "-h", "-o", "%D %t").strip() == f"{HOSTS} idle", 60)

    def _daemon(self, *words: str) -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        return subprocess.Popen(words, env=self.env, stdout=quiet, stderr=quiet, start_new_session=True)

    def __call__(self, *words: str) -> str:
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    def tasks(self, host: str | None = None) -> list[psutil.Process]:
        """The processes of jobs of this Slurm, on one of its hosts or on all."""
        found = []
        for process in psutil.process_iter():
            try:
                env = process.environ()
            except psutil.Error:
                continue
            ours = env.get("SLURM_CONF") == self.env["SLURM_CONF"] and "SLURM_JOB_ID" in env
            if ours and host in (None, env.get("SLURMD_NODENAME")):
                found.append(process)
        return found

    def lose(self, host: str) -> None:
        """The daemon, its step managers and their tasks, together."""
        lost = self.daemons.pop(host)
        daemon = psutil.Process(lost.pid)
        tasks = self.tasks(host)
        parents = [parent for task in tasks if (parent := task.parent()) and parent.name() == "slurmstepd"]
        assert tasks
        for process in {daemon, *daemon.children(recursive=True), *parents, *tasks}:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        lost.wait(30)

    def stop(self) -> None:
        for process in self.daemons.values():
            os.killpg(process.pid, signal.SIGTERM)
        for process in self.daemons.values():
            process.wait(30)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    found = Slurm(tmp_path)
    yield found
    try:
        left = found.tasks()
        assert not left, [process.cmdline() for process in left]
    finally:
        for process in found.tasks():
            process.kill()
        found.stop()


def test_a_job_serves_loses_a_host_and_is_cancelled(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    command = f"{sys.executable} -m afserve"
    words = ["render", "slurm", "--cpus", "1", "--memory", "1", "--insecure-nodes", "--command", command]
    made = subprocess.run(
        [sys.executable, "-m", "afserve", *words, str(tmp_path / "cluster.toml"), "--", "--expert-copies", "2"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (tmp_path / "job.sh").write_text(made.stdout)
    nodes, http = free_ports(2)
    run = tmp_path / "run"
    slurm.env |= {"AFSERVE_RUN": str(run), "AFSERVE_NODES_PORT": str(nodes), "AFSERVE_HTTP_PORT": str(http)}
    job = slurm("sbatch", "--parsable", f"--output={tmp_path}/job.log", str(tmp_path / "job.sh")).strip()

    url = f"http://127.0.0.1:{http}"

    def is_ready() -> bool:
        try:
            return httpx.get(f"{url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def logs() -> str:
        return "\n".join(
            f"== {path}\n{path.read_text()}" for path in [tmp_path / "job.log", *run.glob("*.log")]
        )

    until(is_ready, said=logs)
    key = {"Authorization": f"Bearer {(run / 'api.key').read_text().strip()}"}
    with httpx.Client(base_url=url, timeout=120, headers=key) as client:
        alone = client.post("/v1/completions", json=BODY)
        assert alone.status_code == 200, alone.text
        expected = alone.json()["choices"][0]["text"]
        assert streamed(client, lambda: slurm.lose(f"n{HOSTS}")) == expected
        until(lambda: f"Node failure on n{HOSTS}" in (tmp_path / "job.log").read_text(), 60, logs)
        assert slurm("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING"
        assert streamed(client, lambda: None) == expected

    slurm("scancel", job)
    until(lambda: not slurm("squeue", "-h", "-j", job), 60)
    until(lambda: not slurm.tasks(), 60)


BODY = {"prompt": "def main():", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


def streamed(client: httpx.Client, meanwhile: Callable[[], None]) -> str:
    """The text; `meanwhile` happens once it has begun."""
    text = ""
    with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                if not text:
                    meanwhile()
                text += json.loads(line[6:])["choices"][0]["text"]
    return text
