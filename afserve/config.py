"""What a run is configured with: frozen values, checked once at construction, read-only afterwards.

Each object is given only its own section. Errors name the key, the value and the range. Flags and their TOML file are
read by the command line (`cli/`), what they leave open is chosen by `launch/topology`; nothing here looks at the
environment or at the machine.
"""

from dataclasses import dataclass

from afserve.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float32", "float16")
LOAD_FORMATS = ("safetensors", "dummy")
SAMPLES, FULL = "samples", "full"  # how copies of weights are compared: models/identity.py
EXPERT_DTYPES = ("auto", "int8")
WIRE_DTYPES = ("auto", "fp8")
WAITING, MAX_WAITING = 1024, 1 << 20  # requests
BLOCK_SIZE, MAX_BLOCK_SIZE = 16, 1024  # tokens
MAX_MICRO_BATCHES = 4


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Which weights. `layers` cuts a dummy model short; `dtype` auto is the checkpoint's own."""

    path: str
    name: str
    dtype: str = "auto"
    load_format: str = "safetensors"
    layers: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        one_of("load_format", self.load_format, LOAD_FORMATS)
        if self.layers is not None:
            in_range("layers", self.layers, 1, 1 << 12)
            if self.load_format != "dummy":
                raise ConfigError("layers: only a dummy model can be cut short; add --load-format dummy")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One attention node's limits. Sizes are per node; tokens are tokens of KV cache or of a batch.

    `adaptive`: how many of the `micro_batches` are in flight is decided by measuring. `expert_dtype` is what routed
    experts are kept in, auto being the model's dtype, or the checkpoint's FP8 where the kernels multiply it;
    `wire_dtype` is what rows travel to expert nodes in, auto being the model's dtype.
    """

    max_model_len: int
    kv_blocks: int
    block_size: int = BLOCK_SIZE
    max_sequences: int = 256
    max_waiting: int = WAITING
    max_batch_tokens: int = 512
    micro_batches: int = 2
    adaptive: bool = False
    prefix_caching: bool = True
    threads: int = 1
    device: str = "cpu"
    expert_dtype: str = "auto"
    wire_dtype: str = "auto"

    def __post_init__(self) -> None:
        one_of("expert_dtype", self.expert_dtype, EXPERT_DTYPES)
        one_of("wire_dtype", self.wire_dtype, WIRE_DTYPES)
        in_range("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        in_range("kv_blocks", self.kv_blocks, 1, 1 << 31)
        in_range("max_model_len", self.max_model_len, 2, 1 << 24)
        in_range("max_sequences", self.max_sequences, 1, 1 << 16)
        in_range("max_waiting", self.max_waiting, 1, MAX_WAITING)
        in_range("max_batch_tokens", self.max_batch_tokens, 1, 1 << 20)
        in_range("micro_batches", self.micro_batches, 1, MAX_MICRO_BATCHES)
        in_range("threads", self.threads, 1, 1024)


def in_range(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{key}: {value} is outside [{low}, {high}]", param=key)


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}: {value!r} is not one of {', '.join(allowed)}", param=key)
