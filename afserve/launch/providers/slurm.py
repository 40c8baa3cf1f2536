"""Nodes as Slurm jobs, one for each: submitted with `sbatch`, found again by their name with `squeue`.

A node that has been told to go ends, and its job with it, so that only jobs which have not begun are cancelled. It
opens no socket and keeps no list: a new controller of the run finds the jobs of the one before.
"""

import hashlib
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from afserve.errors import ConfigError
from afserve.launch.providers.provider import NodeProvider, ProviderError
from afserve.member import MODEL_ROLES, Role

_PATIENCE = 30.0  # seconds that one of Slurm's commands may take
_TOOLS = ("sbatch", "squeue", "scancel")
_WAITING = "PENDING"


class SlurmNodes(NodeProvider):
    """`options`: what sbatch is given for each job. `token`: a file that all hosts see. `trust`: of `afserve node`.

    Raises ConfigError where Slurm's commands are not on PATH.
    """

    def __init__(self, options: str, token: Path, trust: Sequence[str]) -> None:
        lacking = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if lacking:
            raise ConfigError(
                f"--nodes-from slurm: {lacking[0]} is not on PATH; start afserve on a host of the cluster"
            )
        try:
            self._options = shlex.split(options)
        except ValueError as error:
            raise ConfigError(f"--slurm-options: {error}") from error
        self._token, self._trust = token, trust

    def have_nodes(self, role: Role, count: int, join: str) -> None:
        name = _name(role, join)
        jobs = self._jobs(name)
        for _ in range(count - len(jobs)):
            self._submit(role, name, join)
        waiting = [number for number, state in jobs if state == _WAITING]
        too_many = waiting[max(0, len(waiting) - max(0, len(jobs) - count)) :]
        if too_many:
            self._run("scancel", *too_many)

    def call_off(self, join: str) -> None:
        """Nodes end with their controller; jobs that wait do not."""
        for role in MODEL_ROLES:
            self._run("scancel", "--state=PENDING", f"--name={_name(role, join)}")

    def _jobs(self, name: str) -> list[tuple[str, str]]:
        """(number, state) of those that wait or run, the oldest first."""
        said = self._run("squeue", "--noheader", "--me", f"--name={name}", "--sort=i", "--format=%i %T")
        found = [line.split() for line in said.splitlines() if line.strip()]
        if any(len(words) != 2 for words in found):
            raise ProviderError(f"Slurm: squeue answered {said.strip()[:200]!r}")
        return [(words[0], words[1]) for words in found if words[1] != "COMPLETING"]

    def _submit(self, role: Role, name: str, join: str) -> None:
        words = [
            "afserve",
            "node",
            "--role",
            role,
            "--join",
            join,
            "--token-file",
            str(self._token),
            *self._trust,
        ]
        self._run(
            "sbatch",
            "--parsable",
            f"--job-name={name}",
            "--ntasks=1",
            "--no-requeue",
            *self._options,
            f"--wrap={shlex.join(words)}",
        )

    def _run(self, *words: str) -> str:
        try:
            done = subprocess.run(
                words,
                capture_output=True,
                text=True,
                timeout=_PATIENCE,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ProviderError(f"Slurm: {words[0]}: {error}") from error
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())[:300]
            raise ProviderError(f"Slurm: {words[0]} ended with exit code {done.returncode}: {said}")
        return done.stdout


def _name(role: Role, join: str) -> str:
    """Of the jobs of one run: by where its nodes join."""
    return f"afserve-{role}-{hashlib.sha256(join.encode()).hexdigest()[:8]}"
