"""Steps that run every op, over meta tensors or a device's: what must neither read a value back nor wait for one.

Meta tensors have shapes and no values, so an op that runs on them has grids and buffers that follow from shapes alone.
"""

from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from afserve.config import ModelSource
from afserve.engine.build import spec_of
from afserve.families.table import naming_of
from afserve.kernels.cache import StateShape
from afserve.kernels.delta import DeltaLayer, DeltaRows, DeltaShape
from afserve.kernels.formats.scaled import FP8, BlockScaled
from afserve.kernels.latent import MlaLayer
from afserve.kernels.layer import GqaLayer
from afserve.kernels.ops import Ops
from afserve.kernels.packed import Gating
from afserve.kernels.paged import PagedBatch
from afserve.kernels.reference import Reference
from afserve.kernels.routing import RouterRule, Scoring
from afserve.models.decoder import AttentionModel
from afserve.models.experts import ExpertBank
from afserve.models.weights import DummyCheckpoint

READS_BACK = ("_local_scalar_dense", "nonzero", "_unique", "masked_select", "equal")


class NoReadBack(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in str(func) for name in READS_BACK), f"{func} would wait for the device"
        return func(*args, **(kwargs or {}))


META = torch.device("meta")
AT_LOAD = {  # called once, before anything is captured
    "pack_linear", "pack_heads", "empty_experts", "set_expert", "put_expert", "set_expert_fp8", "prepare_gqa",
    "pack_linear_fp8", "fp8_maps", "compile_ahead",
    "open_cache", "empty_cache", "empty_kv", "bind_gqa", "explain", "fallbacks", "holds_int8", "holds_int4", "ggml",
    "set_expert_int4", "set_half", "prepare_mla", "bind_mla", "borrow_core", "expert_layers", "isa", "prepare_states",
    "stack_layers", "run_stack",  # on no device
}  # fmt: skip


class Called(Ops):
    """Remembers which ops were called."""

    def __init__(self, backend, device):
        super().__init__(backend, device, 1)
        self.names = set()

    def left_out(self):
        there = {*vars(Ops), *vars(self)} - {"names"}
        return {name for name in there if not name.startswith("_")} - self.names

    def __getattribute__(self, name):
        if not name.startswith("_") and name != "names":
            self.names.add(name)
        return super().__getattribute__(name)


def inherited(backend):
    """What a backend leaves to PyTorch by having no method of its own."""
    kept = {name for name, made in vars(Reference).items() if callable(made) and not name.startswith("_")}
    return {name for name in kept if getattr(backend, name) is getattr(Reference, name)}


def empty(*shape, dtype=torch.bfloat16, device=META):
    return torch.empty(shape, dtype=dtype, device=device)


def meta_batch(sequences, queries, context, block=16):
    tokens = sequences * queries
    at = empty(tokens, dtype=torch.int64)
    starts, contexts, table = (
        empty(*s, dtype=torch.int32)
        for s in ((sequences + 1,), (sequences,), (sequences, -(-context // block)))
    )
    host = tuple(range(0, tokens + 1, queries)), (context,) * sequences
    return PagedBatch(at, at, starts, contexts, table, queries, context, *host)


def host_batch(sequences, queries, context, block=16):
    """The same on the CPU, with blocks that there are."""
    starts = torch.arange(sequences + 1).int() * queries
    blocks = -(-context // block)
    table = torch.arange(sequences * blocks).int().view(sequences, blocks)
    position = torch.arange(context - queries, context).repeat(sequences)
    row = torch.arange(sequences).repeat_interleave(queries)
    slot = table[row, position // block].long() * block + position % block
    return PagedBatch(
        position, slot, starts, torch.full((sequences,), context, dtype=torch.int32), table, queries, context
    )


class Seen:
    """Which public methods of a class are called from outside of it, from now on."""

    def __init__(self, monkeypatch, kind):
        self.names, self._inside = set(), False
        for name in [n for n in vars(kind) if not n.startswith("_") and callable(getattr(kind, n))]:
            monkeypatch.setattr(kind, name, self._watched(name, getattr(kind, name)))

    def _watched(self, name, method):
        def called(*args, **options):
            if self._inside:
                return method(*args, **options)
            self.names.add(name)
            self._inside = True
            try:
                return method(*args, **options)
            finally:
                self._inside = False

        return called


def every_op(ops, batch, *, fp8, dtype=torch.bfloat16):
    """All ops but those of loading, on the batch's sequences."""
    hidden, rule, tokens = 64, RouterRule(2, Scoring.SOFTMAX, renormalise=True), batch.tokens

    def zeros(*shape, dtype=dtype):
        return torch.zeros(shape, dtype=dtype, device=ops.device)

    x, norm, angle = zeros(tokens, hidden), zeros(hidden), zeros(256, 8, dtype=torch.float32)
    head = ops.pack_linear(zeros(100, hidden))
    q, kv, latent = zeros(tokens, 4, 16), zeros(tokens, 2, 16), ops.empty_cache((40, 16, 24), dtype)
    caches = ops.empty_kv(40, 2, 16, (16, 16), dtype)
    gate_up, down = ops.pack_linear(zeros(96, hidden)), ops.pack_linear(zeros(hidden, 48))
    layer = ops.prepare_gqa(
        GqaLayer(
            norm, ops.pack_linear(zeros(128, hidden)), zeros(16), zeros(16), angle, angle,
            ops.pack_linear(zeros(hidden, 64)), norm, zeros(8, hidden), None, rule, 4, 2, 16, 1e-6, 0.25,
        )
    )  # fmt: skip
    experts = ops.empty_experts(8, hidden, 48, dtype, fp8=fp8)
    if fp8:
        blocks = BlockScaled(zeros(96, hidden, dtype=FP8), zeros(1, 1, dtype=torch.float32))
        ops.linear(x, ops.pack_linear_fp8(blocks, zeros(96), dtype))
    ops.rms_norm(x, norm, 1e-6)
    ops.layer_norm(x, norm, norm, 1e-6)
    ops.add_rms_norm(x, x, norm, 1e-6)
    ops.add_sums(x, x.float())
    ops.add_parts([x.float()] * 3)
    ops.add_sums(x, x, zeros(tokens, dtype=torch.int32), 7)
    ops.mlp(x, gate_up, down)
    ops.mlp_part(x, gate_up, down, Gating())
    ops.argmax(ops.logits(ops.linear(x, ops.pack_linear(zeros(hidden, hidden))), head))
    ops.linear_heads(q, ops.pack_heads(zeros(4, 20, 16)))
    ops.steps.open_rows(zeros(tokens, 4, 16), zeros(tokens, 4))
    ops.steps.cap_rows(
        ops.logits(ops.steps.join_rows(Gating(gelu=True), zeros(tokens, 2 * hidden)), head), 9.0
    )
    ops.rope(q, angle, angle, batch.position_T, True)
    ops.write_kv(kv, kv, *caches, batch.kv_slot_T)
    ops.write_latent(zeros(tokens, 24), latent, batch.kv_slot_T)
    net = DeltaShape(2, 4, 8, 8, 4)
    (states,) = ops.open_cache([StateShape(net.numbers)], 40, 16, dtype).layers[0]
    per_head = zeros(tokens, 4, dtype=torch.float32)
    conv = DeltaLayer(net, zeros(4, net.channels, dtype=torch.float32))
    ops.delta(DeltaRows(zeros(tokens, net.channels), per_head, per_head), conv, states, batch)
    ops.attend_gqa(q, *caches, batch, 0.25, window=32)
    ops.attend_mla(zeros(tokens, 4, 24), latent, 16, batch, 0.2)
    weight, index = zeros(tokens, 2, dtype=torch.float32), ops.empty_cache((40, 16, 12), dtype)
    ops.choose_rows(zeros(tokens, 2, 12), weight, index, batch, 9)
    latent_layer = ops.prepare_mla(
        MlaLayer(
            norm, ops.pack_linear(zeros(104, hidden)), None, None, zeros(16), ops.pack_heads(zeros(4, 16, 12)),
            ops.pack_heads(zeros(4, 20, 16)), angle[:, :4], angle[:, :4], True, ops.pack_linear(zeros(hidden, 80)),
            norm, zeros(8, hidden), None, None, rule, 4, 12, 8, 1e-6, 1e-6, 0.2,
        )
    )  # fmt: skip
    bound, bound_latent = ops.bind_gqa(layer, *caches), ops.bind_mla(latent_layer, latent)
    ops.mla_half(x, bound_latent, ops.bind_batch(batch))
    half = ops.gqa_half(x, bound, ops.bind_batch(batch))
    for part in (ops.mla_part(x, bound_latent, batch), ops.gqa_part(x, bound, batch)):
        half = ops.join_half(x, bound, part)
    expert_TK, weight_TK = ops.route(half.normed_TH, zeros(8, hidden), zeros(8, dtype=torch.float32), rule)
    ops.expert_ffn(x, expert_TK, weight_TK, experts, x, add=True)
    _ = ops.holds_fp8(torch.bfloat16), ops.backend_name, ops.device, ops.threads


class Decode:
    """A whole decode step over fixed buffers: embedding, every attention half, router, experts, head."""

    def __init__(self, folder, backend, device, fp8=False):
        source, self.spec = DummyCheckpoint(device=device), spec_of(ModelSource(str(folder), "tiny"))
        if fp8:
            self.spec = replace(self.spec, fp8_block=(128, 128))
        ops, naming = Ops(backend, device, 1), naming_of(self.spec)
        self.model = AttentionModel(self.spec, source, naming, ops, torch.bfloat16, 64)
        self.bank = ExpertBank(self.spec, self.spec.experts, ops, source, naming, torch.bfloat16)
        held = [(layer, e, e) for layer in range(self.spec.moe_layers) for e in range(self.spec.experts)]
        self.bank.load(held, lambda done: None)
        a, shape = self.spec.layer(0).attention, (8, 8)
        if a.kind == "mla":
            self.caches = [(torch.zeros(*shape, a.kv_lora_rank + a.rope_dim, device=device).bfloat16(),)]
        else:
            self.caches = [
                tuple(torch.zeros(8, a.kv_heads, 8, a.head_dim, device=device).bfloat16() for _ in "kv")
            ]
        self.caches = [tuple(c.clone() for c in self.caches[0]) for _ in range(self.spec.layers)]
        self.halves = self.model.bind(self.caches)
        self.token = torch.zeros(3, dtype=torch.int64, device=device)
        lengths = torch.tensor([9, 17, 1], device=device)
        table = torch.arange(9, device=device).view(3, 3) % 8
        at = lengths - 1
        self.batch = PagedBatch(
            at, table.gather(1, at[:, None] // 8)[:, 0] * 8 + at % 8, torch.arange(4, device=device).int(),
            lengths.int(), table.int(), 1, 24, (0, 1, 2, 3), (9, 17, 1),
        )  # fmt: skip

    def __call__(self):
        x = self.model.embed(self.token)
        for layer, attend in zip(self.model.layers, self.halves, strict=True):
            half = attend(x, self.batch)
            local = layer.local_ffn(half.normed_TH, x)
            if local is not None:
                x += local
            if half.expert_TK is not None:
                routed = torch.empty(x.shape, device=x.device)
                self.bank.forward(layer.moe_number, half.normed_TH, half.expert_TK, half.weight_TK, routed)
                x += routed.to(x.dtype)
        return self.model.logits(x)
