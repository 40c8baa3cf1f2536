"""What a run is configured with: frozen values, checked once at construction, read-only afterwards.

Each object is given only its own section. Errors name the key, the value and the range. Flags, environment and TOML
file are read by the command line (`cli/`), what they leave open is chosen by `launch/plan/topology`; nothing here looks
at the environment or at the machine.

A new setting of the engine is one field of `EngineSettings` and the code that obeys it.
"""

from dataclasses import KW_ONLY, MISSING, dataclass
from typing import Any, ClassVar

from afserve.config_ranges import Range
from afserve.config_texts import GPU_LIBRARIES, INSTALLED, bytes_of, libraries_of
from afserve.drafts import DEFAULT_DRAFT, DraftChoice
from afserve.errors import ConfigError
from afserve.kv_events_config import kv_events_of
from afserve.member import AttentionPhase
from afserve.settings import check, flag_of, in_range, setting
from afserve.speculative_config import choice_of

DTYPES = ("auto", "bfloat16", "float32", "float16")
LOAD_FORMATS = ("safetensors", "dummy")
SAMPLES, FULL = "samples", "full"  # how copies of weights are compared: models/identity.py
LM_HEADS = ("auto", "checkpoint", "embedding")
EXPERT_DTYPES = ("auto", "int8", "int4")
DENSE_DTYPES = (*EXPERT_DTYPES, "fp8", "model")
WIRE_DTYPES = ("auto", "fp8")
KV_DTYPES = ("auto", "int8", "fp8")
SOCKETS = "sockets"
KV_TRANSPORTS = (SOCKETS, "mooncake", "nixl", "dist")
AUTO, MODEL_DTYPE = "auto", "model"
ISAS = ("amx", "avx512bf16fma", "avx512bf16", "avx512", "avx2", "sve", "neonbf16", "neon", "generic")
"""Instruction sets that the native CPU kernels are compiled for, the best first (kernels/native/isa.cpp)."""
MAX_MICRO_BATCHES = 4
THREADS = Range(1, 1024)
BLOCK_TOKENS = Range(1, 4096)
_SECONDS = Range(0, 3600, whole=False)


def _count(default: int | None, help: str, allowed: Range, metavar: str, topic: str = "") -> Any:
    """A number whose range the help text shows."""
    return setting(default, help, allowed, metavar=metavar, shows_range=True, topic=topic)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Which weights. `layers` cuts a dummy model short; `dtype` auto is the checkpoint's own."""

    TOPIC: ClassVar[str] = "model"

    path: str
    name: str
    dtype: str = setting("auto", "auto: the checkpoint's own.", DTYPES, common=True)
    load_format: str = setting("safetensors", "dummy: random weights.", LOAD_FORMATS)
    layers: int | None = setting(None, "With dummy weights: only the first N layers.", metavar="N")
    seed: int = 0

    def __post_init__(self) -> None:
        check(self)
        if self.layers is not None:
            in_range("layers", self.layers, 1, 1 << 12)
            if self.load_format != "dummy":
                raise ConfigError("layers: only a dummy model can be cut short; add --load-format dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What a user sets of the engine and every node is told as it is.

    `expert_dtype` is what routed experts are kept in, auto being the model's dtype, or the checkpoint's FP8 or int4
    where the kernels multiply it; `dense_dtype` is that of all other linear maps, where auto is the model's dtype, or
    the checkpoint's FP8 on GPUs that multiply it; `wire_dtype` is what rows travel to expert nodes in, auto being the
    model's dtype. `kv_dtype` is what the KV cache keeps a number in, wherever its blocks go.
    """

    TOPIC: ClassVar[str] = "nodes"

    device: str = setting(
        "cpu", "cpu, cuda (a GPU for each node while there are enough) or cuda:N.", common=True
    )
    isa: str = setting(
        AUTO,
        "Instruction set of CPU kernels, on all nodes. auto: the best that a host has; `afserve doctor` lists them.",
        (AUTO, *ISAS),
    )
    gpu_kernels: str = setting(
        AUTO,
        f"On GPUs what is right at start of {', '.join(GPU_LIBRARIES)}, or of those {INSTALLED}; not measured yet.",
        metavar="NAMES",
    )
    expert_dtype: str = setting(
        "auto",
        "int8, int4: a byte or half a byte per weight of the routed experts.",
        EXPERT_DTYPES,
        topic="model",
        common=True,
    )
    expert_memory: str = setting(
        "",
        "Memory for the routed experts of a node, on GPUs theirs; others come from host memory or the checkpoint.",
        metavar="SIZE",
        common=True,
    )
    dense_dtype: str = setting(
        "auto",
        "int8, int4: a byte or half a byte per weight of attention, shared experts, dense layers and the LM head, on "
        "CPUs. fp8: as an FP8 checkpoint has them, on GPUs. model: in the model's dtype, whatever it has.",
        DENSE_DTYPES,
        topic="model",
    )
    lm_head: str = setting(
        "auto",
        "Where config.json ties the LM head to the embedding and the checkpoint has another one: which of both.",
        LM_HEADS,
    )
    draft: str = setting(
        "",
        "Guess tokens: auto, ngram:4, mtp, dflash:DIR, model:DIR, off. [CPUs: suffix]",
        metavar="METHOD[:N]",
        topic="model",
        common=True,
    )
    speculative_config: str = setting(
        "",
        'The same in vLLM\'s words, such as \'{"method": "ngram", "num_speculative_tokens": 4}\'.',
        metavar="JSON",
        topic="model",
    )
    wire_dtype: str = setting(
        "auto", "fp8: rows travel in e4m3 with a scale per 128 columns.", WIRE_DTYPES, topic="model"
    )
    kv_dtype: str = setting(
        "auto", "int8, fp8: a byte per number of keys and values.", KV_DTYPES, topic="kv", common=True
    )
    block_size: int | None = _count(
        None,
        "Tokens of a KV block; CPUs read multiples of 16 fastest. 16 unless a block also holds states of layers.",
        BLOCK_TOKENS,
        "TOKENS",
        topic="kv",
    )
    prefix_caching: bool = setting(
        True, "Keep blocks of finished requests for prompts that begin alike.", topic="kv"
    )
    kv_copies: int = _count(
        0,
        "Attention nodes that keep copies of another one's KV, so that what ran there resumes without recomputation.",
        Range(0, 8),
        "N",
        topic="kv",
    )
    kv_transport: str = setting(
        SOCKETS,
        "How KV blocks travel between attention nodes: over sockets, by the library of afserve[mooncake] or "
        "afserve[nixl], or by PyTorch's torch.distributed (dist: gloo).",
        KV_TRANSPORTS,
        topic="kv",
    )
    straight_tokens: int = _count(
        256,
        "With --prefill: prompts of at most so many tokens may be computed by a decode node, where that is faster.",
        Range(0, 1 << 20),
        "TOKENS",
    )
    max_batch_tokens: int | None = _count(
        None, "Tokens of one step of a node without a phase: 512, 2,048 on GPUs.", Range(1, 1 << 20), "TOKENS"
    )
    decode_prompt_tokens: int = _count(
        128,
        "With --decode: prompt tokens of one step of a decode node; its mailboxes stay that small.",
        Range(1, 1 << 20),
        "TOKENS",
    )
    prefill_tokens: int = _count(
        512,
        "With --prefill: prompt tokens of one step of a prefill node; only its own mailboxes grow with it.",
        Range(1, 1 << 20),
        "TOKENS",
    )
    prompt_share: float = setting(
        1 / 16,
        "Of an expert node's time, 0.01 to 0.9: prompts that wait get at least this; in the rest decoding comes first.",
        Range(0.01, 0.9, whole=False),
        metavar="SHARE",
    )
    device_exchange: bool = setting(
        False,
        "Between GPUs of one host, over --transport symm: kernels send and await the rows of all layers of a step by "
        "themselves; a step in which a node fails is run again with messages.",
    )
    step_graphs: bool = setting(
        False,
        "On GPUs: what a decode step launches is recorded for each size and launched as one CUDA graph; with expert "
        "nodes, whose steps are recorded too, it takes --device-exchange. It has not run on a GPU yet.",
    )
    tensor_parallel: int = _count(
        1, "Devices of each attention node: its heads, KV and FFNs are split over them.", Range(1, 8), "N"
    )
    share_cores: bool | None = setting(
        None,
        "With one attention and one expert node of one thread each on this host: the one that waits lends its core. "
        "Where the host has no more cores, unless told otherwise.",
    )
    kv_host: str = setting(
        "",
        "Keep KV that leaves an attention node's cache in so much memory of its host: useful beside a GPU.",
        metavar="SIZE",
        topic="kv",
    )
    kv_near_rows: int = _count(
        0,
        "Where an indexer chooses rows: each layer's lie in the host, so many of them near. 0: all are.",
        Range(0, 1 << 24),
        "ROWS",
        "kv",
    )
    kv_ssd: str = setting(
        "",
        "Keep KV of finished requests in files here, also over a restart.",
        metavar="FOLDER",
        topic="kv",
        common=True,
    )
    kv_ssd_size: str = setting(
        "10GiB", "With --kv-ssd: what each attention node keeps there at most.", metavar="SIZE", topic="kv"
    )
    kv_events: str = setting(
        "",
        "Tell receivers over ZeroMQ which blocks caches keep and drop, as vLLM: tcp://127.0.0.1:5557 for the first "
        "attention node, the ports above for others; or vLLM's JSON. Needs afserve[kv-events].",
        metavar="ENDPOINT|JSON",
        topic="kv",
    )
    max_waiting: int = _count(
        1024,
        "Requests that may wait on an attention node; more are told to come again.",
        Range(1, 1 << 20),
        "N",
        topic="limits",
    )
    stream_grace: float = setting(
        1.0,
        "Seconds that an attention node's broken stream may take to come back; then its requests go on elsewhere.",
        _SECONDS,
        metavar="SECONDS",
        topic="losses",
    )
    orphan_grace: float = setting(
        5.0,
        "Seconds that a node goes on without a controller, and keeps the requests of a gateway that has gone.",
        _SECONDS,
        metavar="SECONDS",
        topic="losses",
    )
    loss_deadline: float = setting(
        30.0,
        "Seconds that a running request waits for a lost expert, or for a node that goes on with it.",
        _SECONDS,
        metavar="SECONDS",
        topic="losses",
    )

    def __post_init__(self) -> None:
        check(self, flag_of)
        self.drafts()
        if self.isa != AUTO and self.device != "cpu":
            told = f"{self.isa} is of the kernels of CPUs, --device {self.device} has others; leave out one"
            raise ConfigError(f"--isa: {told}", param="isa")
        if libraries_of(self.gpu_kernels) and self.device == "cpu":
            told = f"{self.gpu_kernels} is for GPUs, and cpu is none; leave it out, or add --device cuda"
            raise ConfigError(f"--gpu-kernels: {told}", param="gpu_kernels")
        for name in ("kv_copies", "kv_host", "kv_ssd", "kv_events"):
            if getattr(self, name) and not self.prefix_caching:
                told = "blocks are found as prefixes are, and --no-prefix-caching ends that; leave out one"
                raise ConfigError(f"{flag_of(name)}: {told}")
        kv_events_of(self.kv_events)
        if self.kv_ssd:
            bytes_of(flag_of("kv_ssd_size"), self.kv_ssd_size)
        for name in ("kv_host", "expert_memory"):
            if getattr(self, name):
                bytes_of(flag_of(name), getattr(self, name))

    def drafts(self) -> DraftChoice:
        """Raises ConfigError that names what cannot be read."""
        if not self.speculative_config:
            return DraftChoice.parse(self.draft or DEFAULT_DRAFT)
        if self.draft:
            told = f"--speculative-config and --draft {self.draft} both say who drafts; leave out one"
            raise ConfigError(told, param="speculative_config")
        return choice_of(self.speculative_config)

    @property
    def kv_host_bytes(self) -> int:
        """Of each attention node; 0 without."""
        return bytes_of(flag_of("kv_host"), self.kv_host) if self.kv_host else 0

    @property
    def expert_memory_bytes(self) -> int:
        """Of each node with experts; 0: as much as they need."""
        return bytes_of(flag_of("expert_memory"), self.expert_memory) if self.expert_memory else 0


@dataclass(frozen=True, slots=True)
class EngineConfig(EngineSettings):
    """One attention node's limits: the settings, and beside them what was chosen for the model and the machine.

    Sizes are per node; tokens are tokens of KV cache or of a batch. `adaptive`: how many of the `micro_batches` are in
    flight is decided by measuring.
    """

    max_model_len: int = setting(MISSING, "Longest sequence.", Range(2, 1 << 24))
    kv_blocks: int = setting(MISSING, "Blocks of the KV cache.", Range(1, 1 << 31))
    _: KW_ONLY
    window_blocks: int = setting(
        0, "Blocks of layers that see a window; 0: as all layers.", Range(0, 1 << 31)
    )
    max_sequences: int = setting(256, "Sequences in flight.", Range(1, 1 << 16))
    max_batch_tokens: int = setting(512, "Tokens of one step.", Range(1, 1 << 20))
    micro_batches: int = setting(2, "In flight at most.", Range(1, MAX_MICRO_BATCHES))
    adaptive: bool = False
    threads: int = setting(1, "Compute threads.", THREADS)
    numa_nodes: int = setting(1, "NUMA nodes that the nodes of a run are bound to.", Range(1, 1 << 10))
    block_size: int = setting(16, "Tokens of a KV block.", BLOCK_TOKENS)
    share_cores: bool = setting(False, "A node that waits lends its core.")
    experts_in_host: bool = setting(False, "All experts that GPUs hold some of are in the host's memory.")

    def __post_init__(self) -> None:
        check(self)

    def step_rows(self, phase: AttentionPhase) -> int:
        """The most tokens of one step of an attention node in this phase, and so the most rows of its messages.

        A decode node's step holds every sequence that may run in one micro-batch and `decode_prompt_tokens` beside
        them. Micro-batches share the sequences evenly, but for one; adaptive ones may all be in the first.
        """
        if phase is AttentionPhase.PREFILL:
            return self.prefill_tokens
        if phase is AttentionPhase.BOTH:
            return self.max_batch_tokens
        share = self.max_sequences
        if not self.adaptive and self.micro_batches > 1:
            share = min(share, -(-share // self.micro_batches) + 1)
        return min(self.max_batch_tokens, share + self.decode_prompt_tokens)

    @property
    def most_rows(self) -> int:
        """Of a message of any phase: a node's phase may change while it serves."""
        return max(self.step_rows(phase) for phase in AttentionPhase)
