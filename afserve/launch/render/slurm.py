"""A run as a Slurm batch script: a plain job over several hosts, or a component per role where hardware differs.

`srun` starts one task per node of afserve, and each task starts its node again while the run lasts; the membership
takes it in. A lost host ends neither the job nor the other tasks: `--no-kill` everywhere, since options do not carry
over `#SBATCH hetjob`.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from afserve.errors import ConfigError
from afserve.launch.render.layout import HTTP_PORT, NODES_PORT, ClusterLayout, NodePool
from afserve.member import Role

_LEAST = 2  # hosts of a component that survives the loss of one
_SURVIVES = "--no-kill --kill-on-bad-exit=0 --wait=0 --overlap"


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
    pools = layout.pools
    if apart:
        for pool in pools:
            _check(pool.hosts, f"the {pool.role} hosts are a component of their own, of {pool.hosts}")
        heads = [_header(layout, asked, pool.hosts, [pool]) for pool in pools]
    else:
        hosts = sum(pool.hosts for pool in pools)
        _check(hosts, f"the job has {hosts} host")
        heads = [_header(layout, asked, hosts, list(pools))]
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={asked.name}",
        *_joined(heads),
        *_setup(layout, asked, apart),
    ]
    lines += [line for number, pool in enumerate(pools) for line in _role(layout, asked, pool, number, apart)]
    return "\n".join([*lines, *_END]) + "\n"


def _check(hosts: int, what: str) -> None:
    if hosts < _LEAST:
        raise ConfigError(
            f"slurm: {what}; Slurm ends a job whose only host is lost, so write at least {_LEAST} hosts with fewer "
            "devices each",
            param="cluster",
        )


def _header(layout: ClusterLayout, asked: SlurmSettings, hosts: int, pools: list[NodePool]) -> list[str]:
    most = max(pool.per_host for pool in pools)
    lines = [f"--nodes={hosts}", f"--ntasks-per-node={most}", f"--cpus-per-task={layout.sizes.cpus}"]
    lines += [] if pools[0].on_cpu else [f"--gpus-per-node={most}"]
    lines += [f"--time={asked.time}"] if asked.time else []
    lines += ["--no-kill", "--no-requeue", *asked.options.get(pools[0].role, ())]
    return [f"#SBATCH {line}" for line in lines]


def _joined(heads: list[list[str]]) -> list[str]:
    first, *others = heads
    return first + [line for head in others for line in ("#SBATCH hetjob", *head)]


def _setup(layout: ClusterLayout, asked: SlurmSettings, apart: bool) -> list[str]:
    """The controller, HTTP and keys, on the job's first host."""
    words = layout.up("$ADDRESS:$NODES_PORT", *(["--insecure-nodes"] if not layout.certs else []))
    trust = '--certs "$CERTS"' if layout.certs else ""
    return [
        "",
        "# Settings: a folder that every host sees (for keys and logs), and ports.",
        'RUN="${AFSERVE_RUN:-$SLURM_SUBMIT_DIR/afserve-$SLURM_JOB_ID}"',
        *(['CERTS="${AFSERVE_CERTS:?a folder of certificates that every host has}"'] if layout.certs else []),
        f'NODES_PORT="${{AFSERVE_NODES_PORT:-{asked.nodes_port}}}"',
        f'HTTP_PORT="${{AFSERVE_HTTP_PORT:-{asked.http_port}}}"',
        "",
        "umask 077",
        'mkdir -p "$RUN"',
        "for name in token api.key admin.key; do",
        '    [ -s "$RUN/$name" ] || head -c 24 /dev/urandom | base64 | tr -d "+/=" > "$RUN/$name"',
        "done",
        "",
        "# Host names come from scontrol, and so does the address of this host, the first one.",
        *_hosts(layout, apart),
        "ADDRESS=$(scontrol show node -o \"$SLURMD_NODENAME\" | sed 's/.* NodeAddr=\\([^ ]*\\) .*/\\1/')",
        "",
        f'{asked.afserve} {_shell(words)} {trust} --token-file "$RUN/token" \\',
        f'    --node-memory {layout.sizes.memory} --host "$ADDRESS" --port "$HTTP_PORT" \\',
        '    --api-key-file "$RUN/api.key" --admin-key-file "$RUN/admin.key" > "$RUN/up.log" 2>&1 &',
        "UP=$!",
        'echo "http://$ADDRESS:$HTTP_PORT, keys and logs in $RUN"',
    ]


def _hosts(layout: ClusterLayout, apart: bool) -> list[str]:
    if apart:
        return []
    lines = ['mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")']
    begin = 0
    for pool in layout.pools:
        lines.append(f'{pool.role.upper()}=$(IFS=,; echo "${{HOSTS[*]:{begin}:{pool.hosts}}}")')
        begin += pool.hosts
    return lines


def _role(layout: ClusterLayout, asked: SlurmSettings, pool: NodePool, number: int, apart: bool) -> list[str]:
    where = f"--het-group={number}" if apart else f'--nodelist="${pool.role.upper()}"'
    gpus = "" if pool.on_cpu else " --gpus-per-task=1"
    trust = '--certs "$CERTS"' if layout.certs else "--insecure-nodes"
    node = f'{asked.afserve} node --role {pool.role} --join "$ADDRESS:$NODES_PORT" --token-file "$RUN/token" {trust}'
    return [
        "",
        f"export ADDRESS NODES_PORT RUN{' CERTS' if layout.certs else ''}",
        f"srun {_SURVIVES} {where} --nodes={pool.hosts} --ntasks={pool.nodes}{gpus} \\",
        f'    --output="$RUN/{pool.role}-%t.log" bash -c \'',
        f"    until {node}; do sleep 1; done",
        "' &",
    ]


def _shell(words: list[str]) -> str:
    """Quoted, but for the script's own variables."""
    return " ".join(f'"{word}"' if word.startswith("$") else shlex.quote(word) for word in words)


_END = [
    "",
    "# The job lasts as long as the server: `scancel`, or `afserve down` with the admin key, ends it.",
    "trap 'kill -TERM $UP' TERM",
    "wait $UP",
    "code=$?",
    "kill $(jobs -p) 2> /dev/null",
    "wait",
    "exit $code",
]
