"""The memory that a model needs: bytes of weights by role, and in words beside what a machine has. All sizes are bytes.

It decides nothing; `topology.py` does.
"""

from importlib.util import find_spec

from afserve.config import AUTO, ModelSource
from afserve.config_texts import libraries_of
from afserve.families.fp8_maps import parameters_in_blocks
from afserve.kernels.devices import scratch
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.wishes import Wishes
from afserve.placement.kv_blocks import block_size
from afserve.placement.node_room import NODE_OVERHEAD, USABLE
from afserve.quantization import NATIVE_FP8_BITS, Quantization
from afserve.spec import BYTES, ModelSpec
from afserve.spec_parts import projections_of

GIB = 1 << 30
INT4_BITS = 4.5  # of a weight: a code and its share of a bfloat16 scale for 32
STORED_BITS = 4  # and a checkpoint's own scales in float32; those of MXFP4 are bfloat16, on GPUs bytes
MXFP4_BITS = 4.25  # on GPUs
_FP8_BITS = 8 + 32 / 128**2  # on GPUs: a byte, and its share of a float32 scale for a block of 128 x 128
_KEPT_BITS = {"fp8": _FP8_BITS, "native fp8": NATIVE_FP8_BITS, "mxfp4": MXFP4_BITS}


def element_bytes(source: ModelSource, spec: ModelSpec) -> int:
    """Bytes of one number once loaded; FP8 is computed in 16 bits, but by experts (`kept_dtype`)."""
    return max(2, BYTES[computed_dtype(spec, source)])


def kernel_bytes(spec: ModelSpec, source: ModelSource, wishes: Wishes) -> int:
    """What attention takes of a GPU beside weights and caches, of which a CPU's takes none, and an encoder of both."""
    element = element_bytes(source, spec)
    seeing = spec.encoder.scratch_bytes(element) if spec.encoder else 0
    if wishes.attention_on == {"cpu"}:
        return seeing
    latents = [layer.attention.kv_width for layer in spec.kinds if layer.attention.kind == "mla"]
    taken = seeing + (scratch.of_prompts(max(latents), element) if latents else 0)
    return taken + sum(scratch.OF_LIBRARIES.get(name, 0) for name in libraries_of(wishes.engine.gpu_kernels))


def kv_element_bytes(source: ModelSource, spec: ModelSpec, kv_dtype: str) -> int:
    """Bytes of one number of a key or a value in the KV cache; scales are apart (`AttentionSpec.kv_bytes`)."""
    return element_bytes(source, spec) if kv_dtype == AUTO else 1


def needs(spec: ModelSpec, source: ModelSource, machine: Machine, wishes: Wishes) -> str:
    """What a model needs by role where it runs as it is asked for, and what there is."""
    own, routed = role_bytes(spec, source, kept_dtype(spec, source, wishes), kept_dense(spec, source, wishes))
    element = kv_element_bytes(source, spec, wishes.engine.kv_dtype)
    kv = spec.kv_bytes_per_token(element, block_size(spec, element, None)) * 1000
    machines = -(-routed // max(1, usable(machine) - NODE_OVERHEAD))
    limited = f" ({machine.limited_by})" if machine.limited_by else ""
    table = spec.table_parameters() * element_bytes(source, spec)
    read = "that expert nodes read from the checkpoint row by row, not loaded"
    rows = f"  table     {gib(table)} {read}\n" if table else ""
    layers = f"{spec.moe_layers} MoE layer{'s' * (spec.moe_layers != 1)}"
    return f"""\
  weights   {gib(own)} on each attention node, {gib(routed)} over all expert nodes ({layers})
{rows}  KV cache  {gib(kv)} per 1,000 tokens, on attention nodes
  memory    {gib(machine.memory)} free of {gib(machine.memory_total)}{limited}
            (the experts alone would fill {machines:,} such)"""


def kept_dtype(spec: ModelSpec, source: ModelSource, wishes: Wishes) -> str:
    """What experts are kept in: as asked for, or, where auto leaves a checkpoint's own codes, `stored` in int4,
    `native fp8`, or on GPUs `fp8` or `mxfp4`."""
    how, asked = spec.quantization, wishes.engine.expert_dtype
    on_gpu = wishes.experts_on != "cpu"
    if asked == AUTO and spec.in_fp8_blocks:
        kept = "fp8" if on_gpu else "native fp8"
        return kept if _stays_fp8(spec, wishes, computed_dtype(spec, source), on_gpu) else asked
    blocks = how is not None and how.gguf and asked == "auto" and wishes.experts_on == "cpu"
    stored = blocks or (how is not None and how.regular and asked != "int8")
    rows = on_gpu or computed_dtype(spec, source) != "float16"
    if not (stored and rows and source.load_format != "dummy"):
        return asked
    return "mxfp4" if on_gpu and how is not None and how.e2m1 else "stored"


def kept_dense(spec: ModelSpec, source: ModelSource, wishes: Wishes) -> str:
    """What all other linear maps are kept in: as asked for, or `fp8` where auto leaves a checkpoint's blocks, which
    `models.dense` asks kernels for."""
    asked, on_gpu = wishes.engine.dense_dtype, wishes.engine.device != "cpu"
    blocks = asked == AUTO and on_gpu and spec.in_fp8_blocks
    return "fp8" if blocks and gpus_multiply_fp8(wishes, computed_dtype(spec, source)) else asked


def gpus_multiply_fp8(wishes: Wishes, computed: str) -> bool:
    """With rows of this dtype."""
    return (wishes.gpus is None or wishes.gpus.fp8) and BYTES[computed] <= 2


def _stays_fp8(spec: ModelSpec, wishes: Wishes, computed: str, on_gpu: bool) -> bool:
    """Whether experts in blocks, or random ones of such a model, stay so where rows are of this dtype: what
    `models.keeping` asks of kernels."""
    if spec.moe.activation != "silu":
        return False
    if on_gpu:
        return gpus_multiply_fp8(wishes, computed)
    return computed not in ("float32", "float16") and find_spec("afserve.kernels._native") is not None


def computed_dtype(spec: ModelSpec, source: ModelSource) -> str:
    """As asked for, or the checkpoint's own."""
    return spec.dtype if source.dtype == "auto" else source.dtype


def role_bytes(
    spec: ModelSpec, source: ModelSource, expert_dtype: str, dense_dtype: str = "auto"
) -> tuple[int, int]:
    """Weights of one attention node and of all expert nodes together."""
    size = element_bytes(source, spec)
    how = spec.quantization if expert_dtype == "stored" else None
    gguf = how if how is not None and how.gguf and dense_dtype == "auto" else None
    blocks = parameters_in_blocks(spec) if dense_dtype == "fp8" else 0
    own = _own_bytes(spec, size, dense_dtype, gguf) - saved_by_blocks(blocks, size)
    routed = spec.routed_parameters()
    if how is not None and how.gguf:
        return own, int(routed * how.expert_bits / 8)
    if expert_dtype in _KEPT_BITS:
        return own, int(routed * _KEPT_BITS[expert_dtype] / 8)
    if expert_dtype in ("int4", "stored"):
        bits = INT4_BITS
        if how is not None and not how.e2m1:
            bits = STORED_BITS + 32 / how.group_for(spec.expert_width, spec.moe.inner)
        return own, int(routed * bits / 8)
    if expert_dtype == "auto":
        return own, routed * size
    maps = projections_of(spec.moe.activation)
    scales = 4 * (
        (maps - 1) * spec.moe.inner + spec.expert_width
    )  # of one expert: float32, one for every output
    return own, routed + spec.moe_layers * spec.experts * scales


def saved_by_blocks(numbers: int, size: int) -> int:
    """Bytes, of so many numbers in FP8 blocks in the place of `size` bytes each."""
    return int(numbers * (size - _FP8_BITS / 8))


def _own_bytes(spec: ModelSpec, size: int, dense_dtype: str, stored: Quantization | None) -> int:
    """Of an attention node's weights; embeddings are never rounded, nor is an encoder, and a head that is tied to them
    is kept apart. `stored`: what says the bits of weights that stay as they are stored."""
    every, encoder = spec.attention_parameters(), spec.encoder_parameters() * size
    bits = {"int8": 8.0, "int4": INT4_BITS}.get(dense_dtype, stored.map_bits if stored else None)
    if bits is None:
        return every * size + encoder
    embeddings = spec.vocab_size * spec.hidden
    maps = every - (0 if spec.tied else embeddings)
    embedding_bits = stored.embedding_bits if stored else 8.0 * size
    return int((embeddings * embedding_bits + maps * bits) / 8) + encoder


def usable(machine: Machine) -> int:
    """Bytes that nodes may take together."""
    return int(machine.memory * USABLE)


def gib(size: float) -> str:
    """Three significant digits, never an exponent."""
    value = size / GIB
    return f"{value:,.0f} GiB" if value >= 100 else f"{value:.3g} GiB"
