"""Every kernel that the Triton backend launches, at the sizes of served models: what `gpu_compile.py` compiles.

Tensors lie on the CPU and are small: a kernel is compiled for its dtypes, constants and alignments, not for how many
rows there are. Groups are what one process compiles.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from afserve.comm.m2n.fused_message import fill
from afserve.comm.m2n.routes import LayerRoutes
from afserve.comm.transport import Header, Kind, Parcel, WireType
from afserve.kernels.delta import DeltaLayer, DeltaRows, DeltaShape
from afserve.kernels.formats.eight_bits import KV_DTYPES
from afserve.kernels.formats.scaled import FP8, BlockScaled, blocks_of
from afserve.kernels.grouped import Groups
from afserve.kernels.latent import MlaLayer
from afserve.kernels.packed import ExpertShape, Gating
from afserve.kernels.paged import PagedBatch
from afserve.kernels.routing import RouterRule, Scoring, Selection
from afserve.kernels.triton.backend import TritonBackend
from afserve.kernels.triton.eight import gather_latents
from afserve.kernels.triton.experts_apart import quantise_places
from afserve.kernels.triton.kv import rope_write_kv
from afserve.kernels.triton.mla_prompts import attend_prompts
from afserve.kernels.triton.near import FetchedRows
from afserve.kernels.triton.permute import RowPlan, plan_rows
from afserve.kernels.triton.state_prompts import move_prompts
from afserve.kernels.triton.states import move_rows

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
Launch = tuple[str, Callable[[], object]]  # what it is for, and the call that launches it
ROWS = (8, 32, 100, 600)  # per expert: one of each class of tiles
DEEPSEEK, GPT_OSS = (7168, 2048), (2880, 2880)  # hidden and inner sizes of an expert
KINDS = ("bf16", "fp8", "int8", "int4", "int4g128", "mxfp4")
V3_ROUTER = RouterRule(8, Scoring.SIGMOID, Selection.GROUP_TOP2_SUM, 8, 4, True, 1e-20, 2.5)


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def batch_of(sequences: int, queries: int, context: int, blocks: int = 8) -> PagedBatch:
    """`queries` new tokens of each sequence, whose contexts are at most `context` long."""
    tokens = sequences * queries
    long, short = (torch.zeros(tokens, dtype=torch.int64) for _ in range(2))
    starts, contexts, table = (
        zeros(*s, dtype=I32) for s in ((sequences + 1,), (sequences,), (sequences, blocks))
    )
    return PagedBatch(long, short, starts, contexts, table, queries, context)


def groups(ops: TritonBackend) -> dict[str, Callable[[], Iterator[Launch]]]:
    """Launches by group; nothing is made before its turn."""
    has_fp8 = ops.holds_fp8(torch.bfloat16)
    kinds = [kind for kind in KINDS if has_fp8 or kind != "fp8"]
    maps = {"linear-fp8": partial(linear_maps, ops)} if has_fp8 else {}
    return {
        **{f"experts-{kind}": partial(experts, ops, kind) for kind in kinds},
        "experts-apart": apart, "plan": partial(plans, ops), "router": partial(routers, ops),
        "small": partial(small, ops), "gqa": partial(gqa, ops), "mla-16": partial(mla, ops, 16),
        "mla-64": partial(mla, ops, 64),
        "mla-prompts": partial(mla_prompts, ops), "kv-eight": partial(eight_bits, ops),
        "choice": partial(choices, ops), "near": near_rows, "states": partial(states, ops),
        "state-prompts": state_prompts, **maps,
    }  # fmt: skip


def experts(ops: TritonBackend, kind: str) -> Iterator[Launch]:
    """DeepSeek-V3's expert, or gpt-oss's in MXFP4, with so many rows for each."""
    hidden, inner = GPT_OSS if kind == "mxfp4" else DEEPSEEK
    for rows in ROWS:
        yield f"experts {kind} rows {rows}", partial(_ffn, ops, kind, hidden, inner, rows)
    if kind == "fp8":
        weights = zeros(2 * inner, hidden), zeros(hidden, inner)
        empty = ops.empty_experts_fp8(ExpertShape(1, hidden, inner, BF16))
        yield "experts fp8 rounded at load", partial(ops.set_expert, empty, 0, *weights)


def _ffn(ops: TritonBackend, kind: str, hidden: int, inner: int, rows: int) -> None:
    plain = ExpertShape(1, hidden, inner, BF16)
    packed = {
        "bf16": lambda: ops.empty_experts(plain),
        "fp8": lambda: ops.empty_experts_fp8(plain),
        "int8": lambda: ops.empty_experts(plain, True),
        "int4": lambda: ops.empty_experts_int4(plain, Groups(32, wide=True)),
        "int4g128": lambda: ops.empty_experts_int4(plain, Groups(128, wide=True)),
        "mxfp4": lambda: ops.empty_experts_int4(
            ExpertShape(1, hidden, inner, BF16, True, Gating(7.0, 1.702)), Groups(32, e2m1=True)
        ),
    }[kind]()
    slot, weight = zeros(rows, 1, dtype=I32), zeros(rows, 1, dtype=F32)
    ops.expert_ffn(zeros(rows, hidden), slot, weight, packed, zeros(rows, hidden, dtype=F32), False)


def linear_maps(ops: TritonBackend) -> Iterator[Launch]:
    """DeepSeek-V3's queries in FP8, and maps of whose columns programs take fewer to fill the chip: out of attention,
    and to latents."""
    for outputs, inputs, several in (
        (24576, 1536, (8, 100, 600)),
        (7168, 16384, (8, 100)),
        (2112, 7168, (8, 100)),
    ):
        blocks = BlockScaled(zeros(outputs, inputs, dtype=FP8), zeros(*blocks_of(outputs, inputs), dtype=F32))
        packed = ops.pack_linear_fp8(blocks, None, BF16)
        for rows in several:
            call = partial(ops.linear, zeros(rows, inputs), packed)
            yield f"linear fp8 {outputs} x {inputs} rows {rows}", call


def apart() -> Iterator[Launch]:
    """What lies around the products of an FP8 expert that a library multiplies."""
    hidden, inner = DEEPSEEK
    places, weight = 512, zeros(8, 8, dtype=F32)
    plan = RowPlan(zeros(places, dtype=I32), zeros(4, dtype=I32), zeros(8, 8, dtype=I32), 128)
    for powers, name in ((False, "float32 scales"), (True, "powers of two")):
        yield f"rows of places, {name}", partial(quantise_places, zeros(8, hidden), plan, 8, None, powers)
        both = zeros(places, 2 * inner)
        yield f"SwiGLU of places, {name}", partial(quantise_places, both, plan, 8, weight, powers)


def plans(ops: TritonBackend) -> Iterator[Launch]:
    """512 rows of 8 choices among the slots of an expert node."""
    for slots in (32, 64, 128, 256, 384, 512):
        yield f"plan {slots} slots", partial(plan_rows, zeros(512, 8, dtype=I32), slots, 16)


def routers(ops: TritonBackend) -> Iterator[Launch]:
    plain = RouterRule(8, Scoring.SIGMOID, Selection.PLAIN, 1, 1, True, 1e-20, 2.5)
    softmax, after = RouterRule(8, Scoring.SOFTMAX, renormalise=True), RouterRule(4, Scoring.TOPK_SOFTMAX)
    for name, hidden, count, gate, bias, rule in (
        ("deepseek-v3", 7168, 256, F32, zeros(256, dtype=F32), V3_ROUTER),
        ("deepseek-v3, bf16 gate", 7168, 256, BF16, zeros(256, dtype=F32), V3_ROUTER),
        ("kimi-k2", 7168, 384, F32, zeros(384, dtype=F32), plain),
        ("qwen3", 4096, 128, F32, None, softmax),
        ("gpt-oss", 2880, 32, BF16, None, after),
    ):
        gate_EH = zeros(count, hidden, dtype=gate)
        yield f"router {name}", partial(ops.route, zeros(4, hidden), gate_EH, bias, rule)


def small(ops: TritonBackend) -> Iterator[Launch]:
    for hidden in (2880, 4096, 7168):
        x, weight = zeros(3, hidden), zeros(hidden)
        yield f"norm {hidden}", partial(ops.rms_norm, x, weight, 1e-6)
        yield f"add and norm {hidden}", partial(ops.add_rms_norm, x, x, weight, 1e-6)
    routes = LayerRoutes(zeros(257, 2, dtype=I32), zeros(257, 1, dtype=F32), 4, 64)
    for wire in (WireType.BFLOAT16, WireType.FLOAT8):
        header, choices = Header(Kind.DISPATCH, 0, 0, 0, 3, wire), zeros(3, 8, dtype=I32)
        scales = zeros(3, 56, dtype=F32) if wire is WireType.FLOAT8 else None
        message = Parcel(header, zeros(3, 7168, dtype=wire.dtype), choices, choices.float(), scales)
        yield (
            f"message in {wire.name.lower()}",
            partial(fill, routes, 1, zeros(3, 7168), choices, choices.float(), message),
        )
    sums, bad = zeros(3, 7168, dtype=F32), zeros(3, dtype=I32)
    for devices in (2, 4):
        yield f"add parts of {devices} devices", partial(ops.add_parts, [zeros(3, 7168, dtype=F32)] * devices)
    yield "add sums", partial(ops.add_sums, zeros(3, 7168), sums, bad, 2)
    maps = ops.pack_linear(zeros(128, 64), None), ops.pack_linear(zeros(64, 64), None)
    yield "silu", partial(ops.mlp, zeros(1, 64), *maps)
    at = zeros(3, dtype=torch.int64)
    angle, cache, latent = zeros(9, 64, dtype=F32), zeros(2, 4, 64, 128), zeros(2, 64, 576)
    q, k, norm = zeros(3, 64, 128), zeros(3, 4, 128), zeros(128)
    yield "rope", partial(ops.rope, q, angle, angle, at, False)
    yield "write kv", partial(ops.write_kv, k, k, cache, cache, at)
    yield "write latent", partial(ops.write_latent, zeros(3, 576), latent, at, 512)
    kept = zeros(3, 2112), latent_layer(ops), latent, batch_of(3, 1, 64)
    yield "keep latents", partial(ops.keep_latents, *kept)
    turned = q, k, k, angle, angle, at, cache, cache, at, False
    yield "rope and write", partial(rope_write_kv, *turned)
    yield "norms, rope and write", partial(rope_write_kv, *turned, norm, norm, 1e-6)


STATES = (  # layers with states of Qwen3-Next, Kimi Linear and Granite 4 (Mamba-2)
    ("qwen3-next", DeltaShape(16, 32, 128, 128, 4, "head")),
    ("kimi-linear", DeltaShape(32, 32, 128, 128, 4, "channel")),
    ("granite-4", DeltaShape(1, 128, 128, 64, 4, "sum")),
)


def rows_of(shape: DeltaShape, tokens: int) -> tuple[DeltaRows, DeltaLayer, Tensor]:
    """With the states of two blocks."""
    adds = shape.rule == "sum"
    bias, skip = (zeros(n, dtype=F32) if adds else None for n in (shape.channels, shape.value_heads))
    layer = DeltaLayer(shape, zeros(4, shape.channels, dtype=F32), bias, skip)
    kept = (zeros(tokens, n, dtype=F32) for n in (shape.decays, shape.value_heads))
    return DeltaRows(zeros(tokens, shape.channels), *kept), layer, zeros(2, shape.numbers, dtype=F32)


def states(ops: TritonBackend) -> Iterator[Launch]:
    """One token of each sequence; and the gate of Qwen3-Next's attention and of its shared expert."""
    at, table = zeros(3, dtype=torch.int64), zeros(3, 8, dtype=I32)
    for name, shape in STATES:
        heads, value = shape.value_heads, shape.value
        yield f"states of {name}", partial(move_rows, *rows_of(shape, 3), table, at, 256)
        told = None if shape.rule == "sum" else zeros(3, heads)
        rates = zeros(shape.decays, dtype=F32), zeros(shape.decays, dtype=F32)
        yield f"decays of {name}", partial(ops.steps.forget_rows, zeros(3, shape.decays), told, *rates, None)
        read, gate = zeros(3, heads, value, dtype=F32), zeros(3, heads * value)
        if shape.rule == "sum":
            given = ops.rms_norm, read, zeros(heads * value), 1e-6, gate, 1
            yield f"gate and norm of {name}", partial(ops.steps.norm_gated, *given)
        else:
            told_norm = ops.rms_norm, read, zeros(value), 1e-6, gate
            yield (
                f"norm and gate of {name}",
                partial(ops.steps.gate_heads, *told_norm, silu=shape.rule == "head"),
            )
    yield "gate of heads", partial(ops.steps.open_rows, zeros(3, 16, 256), zeros(3, 4096))
    yield "gate of a row", partial(ops.steps.open_rows, zeros(3, 1, 2048), zeros(3, 1))


def state_prompts() -> Iterator[Launch]:
    """Prompts of layers with states: shapes differ in the grid alone."""
    for name, shape in STATES:
        out, spans = zeros(6, shape.value_heads, shape.value, dtype=F32), [(0, 3)] * 2
        given = *rows_of(shape, 6), batch_of(2, 3, 3), 0, spans, 256, out
        yield f"prompts' states of {name}", partial(move_prompts, *given)


def latent_layer(ops: TritonBackend) -> MlaLayer:
    """What is kept of a token as DeepSeek-V3 keeps it, of one head."""
    norm, angle = zeros(128), zeros(9, 32, dtype=F32)
    return MlaLayer(
        norm, ops.pack_linear(zeros(2112, 64), None), zeros(1536), ops.pack_linear(zeros(64, 1536), None), zeros(512),
        ops.pack_heads(zeros(1, 512, 128)), ops.pack_heads(zeros(1, 128, 512)), angle, angle, True,
        ops.pack_linear(zeros(64, 128), None), norm, None, None, None, None, 1, 128, 64, 1e-6, 1e-6, 0.1,
    )  # fmt: skip


def eight_bits(ops: TritonBackend) -> Iterator[Launch]:
    """A KV cache in 8 bits of Qwen3, DeepSeek-V2-Lite and V3: rows that are kept, and attention over them."""
    at, angle, norm = zeros(3, dtype=torch.int64), zeros(9, 64, dtype=F32), zeros(128)
    q, k = zeros(3, 64, 128), zeros(3, 4, 128)
    for name, kind in KV_DTYPES.items():
        if name == "fp8" and not ops.holds_fp8(BF16):
            continue
        shapes = (2, 4, 64, 136), (2, 4, 64, 128), (2, 64, 584)
        keys, values, latent = (zeros(*shape, dtype=kind) for shape in shapes)
        kept = q, k, k, angle, angle, at, keys, values, at, False, norm, norm, 1e-6
        yield f"norms, rope and write {name}", partial(rope_write_kv, *kept)
        yield f"write kv {name}", partial(ops.write_kv, k, k, keys, values, at)
        yield f"write latent {name}", partial(ops.write_latent, zeros(3, 576), latent, at, 512)
        made = zeros(3, 2112), latent_layer(ops), latent, batch_of(3, 1, 64)
        yield f"keep latents {name}", partial(ops.keep_latents, *made)
        yield f"gather latents {name}", partial(gather_latents, latent, at, 512, BF16)
        for queries, what in ((1, "decode"), (3, "prompt")):
            batch = batch_of(2, queries, 4096)
            call = partial(ops.attend_gqa, zeros(2 * queries, 64, 128), keys, values, batch, 0.1, None)
            yield f"gqa 64 heads of 128 {name} {what}", call
            for heads in (16, 128):
                seen = zeros(2 * queries, heads, 576), latent, 512, batch, 0.1
                yield f"mla {heads} heads {name} {what}", partial(ops.attend_mla, *seen)


def gqa(ops: TritonBackend) -> Iterator[Launch]:
    """Heads, groups and head sizes of Qwen3, gpt-oss (a window, sinks), GLM-4.5 and Qwen3-Next."""
    for heads, kv_heads, size, window in (
        (64, 4, 128, None), (64, 8, 64, 128), (96, 8, 128, None), (16, 2, 256, None),
    ):  # fmt: skip
        cache, sink = zeros(2, kv_heads, 64, size), zeros(heads) if window else None
        for queries, name in ((1, "decode"), (3, "prompt")):
            q, batch = zeros(2 * queries, heads, size), batch_of(2, queries, 4096)
            call = partial(ops.attend_gqa, q, cache, cache, batch, 0.1, window, sink)
            yield f"gqa {heads} heads of {size} {name}", call


def choices(ops: TritonBackend) -> Iterator[Launch]:
    """DeepSeek-V3.2's index heads, GLM-5's, and a few of float32."""
    for heads, kind in ((64, BF16), (32, BF16), (16, F32)):
        q, weight, keys = (
            zeros(2, heads, 128, dtype=kind),
            zeros(2, heads, dtype=F32),
            zeros(8, 64, 128, dtype=kind),
        )
        name = "bf16" if kind is BF16 else "float32"
        yield (
            f"choice {heads} heads {name}",
            partial(ops.choose_rows, q, weight, keys, batch_of(2, 1, 4096), 2048),
        )


def near_rows() -> Iterator[Launch]:
    """Latents of DeepSeek-V3.2."""
    near = FetchedRows(zeros(8, 64, 576), 2048, zeros(4, dtype=torch.int64))
    rows = zeros(2048, dtype=torch.bool), *(zeros(2048, dtype=torch.int64) for _ in range(2))
    yield "near rows of 576 bf16", partial(near.copy_rows, *rows)


def mla(ops: TritonBackend, heads: int) -> Iterator[Launch]:
    """Heads of DeepSeek-V2-Lite (16), of GLM-5 and Kimi K2 (64)."""
    for queries, name in ((1, "decode"), (3, "prompt")):
        q, cache = zeros(2 * queries, heads, 576), zeros(2, 64, 576)
        yield (
            f"mla {heads} heads {name}",
            partial(ops.attend_mla, q, cache, 512, batch_of(2, queries, 4096), 0.1),
        )


def mla_prompts(ops: TritonBackend) -> Iterator[Launch]:
    """Latents multiplied up, as DeepSeek-V2, V3, GLM-5 and Kimi K2 have them: heads differ in the grid alone."""
    tile = ops.tiles.mla_prompt(2)
    q, rope, own, latent = zeros(3, 16, 192)[:, :, :128], zeros(3, 16, 64), zeros(4, 8, 128), zeros(8, 576)
    call = partial(
        attend_prompts, q, rope, own, own, latent, 4, zeros(2, 4, dtype=I32), 0.1, tile, zeros(3, 16, 128)
    )
    yield "mla prompt, multiplied up", call
