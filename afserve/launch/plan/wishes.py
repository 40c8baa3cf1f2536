"""What the user of `afserve up` or `LLM` asks of a run: the values from which `topology` chooses the rest.

Values only; importing this loads neither torch nor numpy, so that `afserve up --help` answers at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from afserve.config import FULL, SAMPLES, EngineSettings, ModelSource
from afserve.config_ranges import Range
from afserve.control.pilot.settings import PilotSettings
from afserve.errors import ConfigError
from afserve.launch.plan.ray_settings import RaySettings
from afserve.member import MOST_GATEWAYS, MOST_NODES, AttentionPhase
from afserve.server.http.settings import Listening, ServerSettings
from afserve.settings import FileUse, flag_of, in_range, setting

if TYPE_CHECKING:
    from afserve.launch.plan.gpus import Gpus

TRANSPORTS = ("auto", "shm", "tcp", "pairs", "dist", "symm")
PROVIDERS = ("kubernetes", "slurm")
LOG_LEVELS = ("debug", "info", "warning", "error")
RECOVER, END = "recover", "end"
_SILENCE = Range(0.2, 3600.0, whole=False)


@dataclass(frozen=True, slots=True)
class Share:
    """Nodes of one host, or of one memory there: a host's or a GPU's. What is not `here` is taken to be like this
    machine, and refuses for itself, unless `memory` says how many bytes are free for its nodes; then `place` says in
    words whose they are. `device`: the kind, where it is not what all attention nodes have. `own`: a cluster file gives
    them that memory."""

    attention: int
    experts: int
    here: bool = True
    memory: int = 0
    place: str = ""
    device: str = ""
    own: bool = False

    @property
    def total(self) -> int:
        return self.attention + self.experts


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user fixed; None is for `topology` to choose. `micro_batches` may also be "auto".

    Without `hosts` all nodes are on this machine; `expert_hosts[n]` numbers the host of expert node n. `memories` are
    those of a cluster file's hosts. `batch` is what an attention node decodes at once. `gpus` are those that nodes run
    on, this machine's but for hosts.
    """

    TOPIC: ClassVar[str] = "nodes"

    attention: int | None = setting(None, "Attention nodes.", metavar="A", common=True)
    experts: int | None = setting(None, "Expert nodes.", metavar="F", common=True)
    micro_batches: str = setting("auto", "In flight per attention node, 1 to 4.", metavar="M")
    colocated: bool = setting(False, "Experts inside the attention nodes: the baseline.", common=True)
    prefill: int | None = setting(
        None, "Attention nodes that compute prompts for the --decode nodes.", metavar="P", common=True
    )
    decode: int | None = setting(
        None, "Attention nodes that decode what --prefill nodes have computed.", metavar="D", common=True
    )
    kv_tokens: int | None = setting(
        None, "KV cache of each attention node, in tokens.", topic="kv", common=True
    )
    max_model_len: int | None = setting(
        None, "Longest sequence, prompt and answer together.", topic="kv", common=True
    )
    threads: int | None = setting(None, "Compute threads of each node.")
    numa: str = setting(
        "auto",
        "auto: on a machine with several NUMA nodes (sockets), each gets as many nodes as the others, on its cores and "
        "with its memory. off: nothing is bound.",
        ("auto", "off"),
    )
    redundant_experts: int = setting(
        0, "Extra replicas per MoE layer.", metavar="R", topic="placement", common=True
    )
    expert_copies: int = setting(
        1,
        "Expert nodes that hold each expert, on different hosts where there are.",
        metavar="C",
        topic="placement",
    )
    spare_slots: int | None = setting(
        None,
        "Slots per expert node and layer kept empty for a lost node's experts.",
        metavar="S",
        topic="placement",
    )
    most_attention: int | None = setting(
        None,
        "Attention nodes that `scale` may ask for; 8 or twice as many as at first.",
        metavar="A",
        topic="losses",
    )
    gateways: int = setting(
        0,
        "HTTP in N processes of its own, which share the port; 0 serves it in this one.",
        metavar="N",
        topic="http",
        common=True,
    )
    on_loss: str = setting(
        RECOVER,
        "When a node is lost: recover goes on without it, end ends the run.",
        (RECOVER, END),
        topic="losses",
    )
    silence: float = setting(
        1.0,
        "A node that owes others work and says nothing for so long is lost.",
        _SILENCE,
        metavar="SECONDS",
        topic="losses",
    )
    engine: EngineSettings = field(default_factory=EngineSettings)
    rebalance: bool = False
    prefill_device: str | None = None
    expert_device: str | None = None
    batch: int | None = None
    hosts: tuple[Share, ...] = ()
    expert_hosts: tuple[int, ...] = ()
    memories: tuple[Share, ...] = ()
    gpus: "Gpus | None" = None

    def __post_init__(self) -> None:
        in_range("--gateways", self.gateways, 0, MOST_GATEWAYS)
        if self.attention is None and self.prefill and self.decode:
            object.__setattr__(self, "attention", self.prefill + self.decode)

    def check_phases(self) -> None:
        """Raises ConfigError where the attention nodes cannot be as they are asked for together."""
        if self.prefill is None and self.decode is None:
            return
        if self.prefill is None or self.decode is None:
            given, other = ("--prefill", "--decode") if self.decode is None else ("--decode", "--prefill")
            raise ConfigError(
                f"{given}: prefill nodes compute prompts for decode nodes, so there are both or none; add {other} or "
                "use --attention, whose nodes do both",
                param=given[2:],
            )
        for flag, count in (("--prefill", self.prefill), ("--decode", self.decode)):
            in_range(flag, count, 1, MOST_NODES)
        total = self.prefill + self.decode
        if self.attention not in (None, total):
            raise ConfigError(
                f"--attention: {self.attention} nodes, but --prefill {self.prefill} and --decode {self.decode} make "
                f"{total}; leave --attention out"
            )
        if not self.engine.prefix_caching:
            raise ConfigError(
                "--prefill: what another node computed is found as prefixes are, and --no-prefix-caching turns that "
                "off; leave out one"
            )

    @property
    def phases(self) -> dict[int, AttentionPhase]:
        """Of attention nodes by index; none where all do both."""
        first = self.prefill or 0
        kinds = [AttentionPhase.PREFILL] * first + [AttentionPhase.DECODE] * (self.decode or 0)
        return dict(enumerate(kinds))

    @property
    def experts_on(self) -> str:
        """A device; another kind than the engine's where a cluster file gives each role its own."""
        return self.expert_device or self.engine.device

    @property
    def attention_on(self) -> frozenset[str]:
        """Devices; of two kinds where a cluster file gives prefill nodes another than decode nodes."""
        return frozenset({self.engine.device, self.prefill_device or self.engine.device})

    def owns(self, share: Share) -> bool:
        """Whether nobody else uses the memory of these attention nodes."""
        return share.own or (share.device or self.engine.device) != "cpu"

    def memory_shares(self, nodes: Share) -> tuple[Share, ...]:
        """What shares one memory: the nodes of a host, or of a GPU."""
        if self.memories or self.gpus is None or self.hosts:
            return self.memories or self.hosts or (nodes,)
        if self.engine.tensor_parallel > 1:  # none of them shares a GPU
            return (Share(1, 0),) * nodes.attention + (Share(0, 1),) * nodes.experts
        used = 1 if self.engine.device != "cuda" else min(len(self.gpus), nodes.total)
        roles = ["attention"] * nodes.attention + ["experts"] * nodes.experts
        dealt = [roles[number::used] for number in range(used)]
        return tuple(Share(d.count("attention"), d.count("experts")) for d in dealt)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Which model, where it runs, and what the run leaves behind."""

    TOPIC: ClassVar[str] = "cluster"

    model: str = setting(
        "nano", "Bundled name, checkpoint folder, or Hugging Face id.", topic="model", common=True
    )
    revision: str | None = setting(
        None, "Which commit, branch or tag of a Hugging Face id.", metavar="REVISION", topic="model"
    )
    download: bool = setting(False, "Fetch a Hugging Face id first, as `afserve pull` does.", topic="model")
    models: Path | None = setting(
        None,
        "Serve several models, each with its own nodes, as this TOML file says.",
        FileUse.READ,
        metavar="FILE",
        topic="model",
        common=True,
    )
    cluster: Path | None = setting(
        None, "Start what `afserve plan --cluster FILE` wrote.", FileUse.READ, metavar="FILE", common=True
    )
    listen: str | None = setting(
        None,
        "Where nodes on other hosts join, one address: with --cluster, --ray or --elsewhere.",
        metavar="ADDRESS[:PORT]",
    )
    elsewhere: bool = setting(
        False, "Start no node here: all are started by other means and join at --listen."
    )
    nodes_from: str | None = setting(
        None,
        "With --elsewhere: have Kubernetes (in a pod; StatefulSets called as the roles) or Slurm (a job for each node) "
        "bring as many nodes as are wanted.",
        PROVIDERS,
    )
    slurm_options: str = setting(
        "",
        "With --nodes-from slurm: options of sbatch for each node, such as '--cpus-per-task=8 --mem=16G'.",
        metavar="OPTIONS",
    )
    node_memory: float | None = setting(
        None,
        "With --elsewhere: what each node may use of its host or GPU, in GiB; else it is taken to be like this one.",
        Range(0.1, 1e6, whole=False),
        metavar="GIB",
    )
    token_file: Path | None = setting(
        None,
        "The run's token, made where there is none; else a new one for each run.",
        FileUse.WRITTEN,
        metavar="FILE",
    )
    certs: Path | None = setting(
        None,
        "This host's certificates, from `afserve certs issue`: nodes speak TLS.",
        FileUse.FOLDER,
        metavar="FOLDER",
    )
    insecure_nodes: bool = setting(False, "Let nodes of other hosts speak plain text.")
    ssh: bool = setting(False, "Start the other hosts of --cluster by ssh.")
    ssh_command: str = setting(
        "ssh -o BatchMode=yes", "With --ssh: what is given a host and a line to run there.", metavar="COMMAND"
    )
    transport: str = setting(
        "auto",
        "Between nodes: shm on one host, tcp or dist between hosts, pairs for both, symm between GPUs of one host.",
        TRANSPORTS,
    )
    verify: str = setting(
        SAMPLES,
        "How nodes' copies of the checkpoint are compared; full: all bytes.",
        (SAMPLES, FULL),
        topic="model",
    )
    rebalance: str | None = setting(
        None,
        "auto, off, or every so many SECONDS; auto with --redundant-experts.",
        metavar="WHEN",
        topic="placement",
        common=True,
    )
    record_routing: Path | None = setting(
        None, "Write routing counts here at the end.", FileUse.WRITTEN, topic="logs"
    )
    trace: Path | None = setting(
        None, "Write a Perfetto trace of this run here at its end.", FileUse.WRITTEN, topic="logs"
    )
    log_level: str = setting("warning", "", LOG_LEVELS, topic="logs")


@dataclass(frozen=True, slots=True)
class UpFlags:
    """All that `afserve up` was asked, group by group. `given` names what was not left at its default.

    The source's path and name are open until the model is found.
    """

    run: RunSettings
    source: ModelSource
    wishes: Wishes
    listening: Listening
    limits: ServerSettings
    ray: RaySettings = field(default_factory=RaySettings)
    pilot: PilotSettings = field(default_factory=PilotSettings)
    given: frozenset[str] = frozenset()


# what does nothing -> without this, a field of the group that is named
_COMPANIONS: Mapping[str, tuple[str, str]] = {
    "kv_ssd_size": ("engine", "kv_ssd"),
    "ray_attention": ("ray", "ray"),
    "ray_experts": ("ray", "ray"),
    "ray_placement": ("ray", "ray"),
    "ray_wait": ("ray", "ray"),
    "node_memory": ("run", "elsewhere"),
    "nodes_from": ("run", "elsewhere"),
    "slurm_options": ("run", "nodes_from"),
    "ssh_command": ("run", "ssh"),
}


def check_companions(asked: Sequence[UpFlags]) -> None:
    """Options that do nothing without another one: raises ConfigError naming what no model of the run makes use of.

    Where nodes may be given a phase or scaled later, an option has its use then, and is none of these.
    """
    given = frozenset().union(*(flags.given for flags in asked))
    for name, (group, other) in _COMPANIONS.items():
        if name in given and not any(_value(flags, group, other) for flags in asked):
            raise ConfigError(f"{flag_of(name)}: does nothing without {flag_of(other)}; add that, or drop it")


def _value(flags: UpFlags, group: str, name: str) -> object:
    owner = flags.wishes.engine if group == "engine" else getattr(flags, group)
    return getattr(owner, name)
