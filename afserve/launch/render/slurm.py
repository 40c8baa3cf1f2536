"""A run as a Slurm batch script: a plain job over several hosts, or a component per role where hardware differs.

`srun` starts one task per node of afserve, and each task starts its node again while the run lasts; the membership
takes it in. A lost host ends neither the job nor the other tasks: `--no-kill` everywhere, since options do not carry
over `#SBATCH hetjob`.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from afserve.errors import ConfigError
from afserve.launch.render.layout import HTTP_PORT, NODES_PORT, ClusterLayout
from afserve.member import Role

_LEAST = 2  # hosts of a component that survives the loss of one
_JOB = Environment(  # noqa: S701  a script of bash
    loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True
).get_template("job.sh.jinja")


@dataclass(frozen=True, slots=True)
class SlurmSettings:
    """`time` is Slurm's limit, empty for the partition's. `options` are further #SBATCH options of a role's hosts."""

    name: str = "afserve"
    time: str = ""
    options: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)
    http_port: int = HTTP_PORT
    nodes_port: int = NODES_PORT
    afserve: str = "afserve"


def script(layout: ClusterLayout, asked: SlurmSettings) -> str:
    """Raises ConfigError where the loss of a host would end the job."""
    apart = layout.mixed or len(set(map(tuple, asked.options.values()))) > 1
    components = [[pool] for pool in layout.pools] if apart else [list(layout.pools)]
    for pools in components:
        hosts = sum(pool.hosts for pool in pools)
        if hosts < _LEAST:
            lone = f"the {pools[0].role} hosts are a component of their own, of {hosts}"
            raise ConfigError(
                f"slurm: {lone if apart else f'the job has {hosts} host'}; Slurm ends a job whose only "
                f"host is lost, so write at least {_LEAST} hosts with fewer devices each",
                param="cluster",
            )
    words = layout.up("$ADDRESS:$NODES_PORT", *(["--insecure-nodes"] if not layout.certs else []))
    up = " ".join(f'"{word}"' if word.startswith("$") else shlex.quote(word) for word in words)
    return _JOB.render(layout=layout, asked=asked, components=components, apart=apart, up=up) + "\n"
