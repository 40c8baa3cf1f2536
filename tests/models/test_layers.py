"""A layer is what its spec says: no field is passed over, layers may differ, and what cannot run is refused."""

from dataclasses import fields, replace
from functools import cache

import pytest
import torch

from afserve.config import EngineConfig, ModelSource
from afserve.engine.build import layout_for
from afserve.errors import CheckpointError
from afserve.families import limits
from afserve.families.pattern.naming import Naming
from afserve.kernels.ops import open_ops
from afserve.kernels.paged import PagedBatch
from afserve.models.decoder import AttentionModel
from afserve.models.experts import ExpertBank
from afserve.models.router import rule_of
from afserve.models.weights import DummyCheckpoint
from afserve.spec import ModelSpec, distinct
from afserve.spec_parts import (
    NO_ATTENTION,
    NO_FFN,
    AttentionSpec,
    DenseSpec,
    GateSpec,
    IndexerSpec,
    LayerSpec,
    MoeSpec,
    RopeSpec,
)

TOKENS = 24
ROPE = RopeSpec(
    "yarn", 1e4, 16, False, 4.0, 64, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=0.8
)
GQA = AttentionSpec("gqa", 4, 2, 16, 16, ROPE)
MLA = AttentionSpec(
    "mla", 4, 1, 28, 16, replace(ROPE, interleaved=True), q_lora_rank=12, kv_lora_rank=20, nope_dim=12, rope_dim=16
)  # fmt: skip
INDEXED = replace(MLA, indexer=IndexerSpec(4, 24, 4))
BLOCKS = replace(GQA, indexer=IndexerSpec(2, 24, 2, block=4, local=1))
GATE = GateSpec("heads")
GATED = replace(GQA, gate=GATE)
DELTA = AttentionSpec("linear", 4, 2, 12, 20, taps=4)
CHANNEL = AttentionSpec("linear", 4, 4, 12, 12, taps=4, rule="channel")
CONV = AttentionSpec("conv", 20, 1, 1, 1, taps=3)
LLAMA3 = replace(GQA, rope=replace(ROPE, kind="llama3", low_freq_factor=2.0, high_freq_factor=8.0))
LONGROPE = replace(
    GQA, rope=replace(ROPE, kind="longrope", original_max=8, short_factor=(1.0,) * 8, long_factor=(2.0,) * 8)
)
PROPORTIONAL = replace(GQA, rope=replace(ROPE, kind="proportional", partial=0.5))
SHORT = replace(LONGROPE, rope=replace(LONGROPE.rope, original_max=64))
MOE = MoeSpec(8, 2, 24, 16, "softmax", groups=2, top_groups=1, selection="group_max", renormalise=True)
CLAMPED = replace(MOE, shared_inner=0, activation="clamped_swiglu", alpha=1.5, limit=1.0)
CLAMPED_DENSE = DenseSpec(40, "clamped_swiglu", alpha=1.5, limit=1.0)
MIXED = replace(MOE, scoring="sparse_mixer", jitter=0.01)
DENSE = DenseSpec(40)
REFUSED = "refused"


class Asked(DummyCheckpoint):
    """Random weights, large enough to tell layers apart, and which were asked for."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def tensor(self, name, shape, dtype):
        self.names.add((name, shape))
        made = super().tensor(name, shape, dtype)
        return made if torch.equal(made, torch.ones_like(made)) else made * 15


def spec_of(*layers: LayerSpec) -> ModelSpec:
    kinds, pattern = distinct(layers)
    return ModelSpec("made", 48, 64, 256, 1e-6, False, "float32", None, kinds, pattern, (), ())


def checked(*layers: LayerSpec) -> ModelSpec:
    spec = spec_of(*layers)
    limits.check(spec, "here")
    return spec


def run(spec: ModelSpec, backend: str = "auto"):
    """(names and shapes of tensors that were asked for, routers' rules, logits of one prompt)."""
    ops, source, naming = (
        open_ops("cpu", 1, backend),
        Asked(),
        Naming(after_attention="post_attention_norm.weight"),
    )
    model = AttentionModel(spec, source, naming, ops, torch.float32, 64)
    bank = ExpertBank(spec, spec.experts, ops, source, naming, torch.float32)
    bank.load([(m, e, e) for m in range(spec.moe_layers) for e in range(spec.experts)], lambda done: None)
    x = model.embed(torch.arange(TOKENS) % spec.vocab_size)
    cache = ops.open_cache([layer.keeps for layer in model.layers], 8, 8, torch.float32)
    for layer, attend in zip(model.layers, model.bind(cache.layers), strict=True):
        half = attend(x, one_prompt())
        local = layer.local_ffn(half.normed_TH, x)
        if layer.moe_number is None:
            x += 0 if local is None else local
        else:
            sent = layer.sent(half)
            routed = torch.empty(sent.x_TX.shape)
            bank.forward(layer.moe_number, *sent[:3], routed)
            x += layer.whole_sum(sent.whole(routed), local)
            if local is not None and not layer.adds_at_once:
                x += local
    rules = [rule_of(kind.moe) for kind in spec.kinds if kind.moe]
    return source.names, rules, model.logits(x)


def one_prompt() -> PagedBatch:
    at, ends = torch.arange(TOKENS), torch.tensor([0, TOKENS], dtype=torch.int32)
    table = torch.arange(TOKENS // 8, dtype=torch.int32)[None]
    return PagedBatch(at, at, ends, ends[1:], table, TOKENS, TOKENS, (0, TOKENS), (TOKENS,))


def same(one, other) -> bool:
    return one[:2] == other[:2] and torch.equal(one[2], other[2])


# What one field is changed to; where the engine cannot run it, REFUSED beside it.
OF_ROPE = {
    "kind": "default", "theta": 1e5, "dim": 8, "interleaved": True, "factor": 2.0,
    "original_max": 512, "beta_fast": 1.5, "beta_slow": 0.1, "attention_factor": 1.5, "mscale": 0.5,
    "mscale_all_dim": 0.4, "truncate": False, "learned": True,
}  # fmt: skip
OF_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 20.0}
OF_LONGROPE = {"long_factor": ((3.0,) * 8, ""), "long_mscale": 1.5}
OF_PROPORTIONAL = {"partial": 0.25}
OF_SHORT = {"short_factor": ((3.0,) * 8, ""), "short_mscale": 1.5}
OF_GQA = {
    "rule": ("sum", REFUSED),
    "kind": ("linear", REFUSED), "heads": 2, "kv_heads": 1, "head_dim": 32, "value_dim": 8,
    "rope": None, "qkv_bias": True, "out_bias": True, "qk_norm": "head", "window": 5, "chunk": 8,
    "clip": 0.3, "scale": 0.5, "out_scale": 0.5, "temperature": ((4, 0.5, 1), ""), "sinks": True,
    "gate": GateSpec("query"), "normed": True, "value_norm": True, "value_of_key": True,
    "q_lora_rank": (8, REFUSED), "kv_lora_rank": (8, REFUSED),
    "nope_dim": (8, REFUSED), "rope_dim": (8, REFUSED), "indexer": (IndexerSpec(2, 8, 4), REFUSED),
    "latent_eps": (0.5, REFUSED), "log_scaled": (True, REFUSED), "source": (0, REFUSED),
    "latent_scale": (2.0, REFUSED), "taps": (4, REFUSED), "direct": (True, REFUSED), "floor": (-5.0, REFUSED),
}  # fmt: skip
OF_MLA = {
    "rule": ("sum", REFUSED),
    "kind": ("mfa", REFUSED), "heads": 2, "kv_heads": (2, REFUSED), "head_dim": (32, REFUSED), "value_dim": 8,
    "rope": (None, REFUSED), "qkv_bias": True, "out_bias": True, "qk_norm": ("head", REFUSED), "window": (5, REFUSED),
    "clip": (0.3, REFUSED), "scale": 0.5, "out_scale": (0.5, REFUSED), "temperature": ((4, 0.5, 0), ""),
    "latent_scale": 2.0, "latent_eps": 0.5, "log_scaled": True, "source": (0, REFUSED),
    "chunk": (8, REFUSED), "sinks": (True, REFUSED), "gate": GATE, "normed": True, "q_lora_rank": None,
    "value_norm": (True, REFUSED), "value_of_key": (True, REFUSED),
    "kv_lora_rank": 24, "nope_dim": (8, REFUSED), "rope_dim": (8, REFUSED),
    "indexer": IndexerSpec(2, 24, 4), "taps": (4, REFUSED), "direct": (True, REFUSED), "floor": (-5.0, REFUSED),
}  # fmt: skip
OF_GATE = {"by": "numbers", "softplus": True}
OF_INDEXER = {
    "heads": 3, "dim": 20, "top": 5, "interleaved": True, "reuses": (True, REFUSED), "block": (4, REFUSED),
    "local": (1, REFUSED), "own": True,
}  # fmt: skip
OF_BLOCKS = {
    "heads": (3, REFUSED), "dim": 20, "top": 3, "interleaved": (True, REFUSED), "reuses": (True, REFUSED), "block": 3,
    "local": 2, "own": (True, REFUSED),
}  # fmt: skip
OF_DELTA = {
    "kind": ("gqa", REFUSED), "heads": 8, "kv_heads": 4, "head_dim": 16, "value_dim": 24, "taps": 3,
    "rope": (ROPE, REFUSED), "qkv_bias": (True, REFUSED), "out_bias": (True, REFUSED), "qk_norm": ("head", REFUSED),
    "window": (5, REFUSED), "clip": (0.3, REFUSED), "scale": (0.5, REFUSED), "out_scale": (0.5, REFUSED),
    "temperature": ((4, 0.5, 1), REFUSED), "chunk": (8, REFUSED), "sinks": (True, REFUSED), "gate": (GATE, REFUSED),
    "normed": (True, REFUSED), "value_norm": (True, REFUSED), "value_of_key": (True, REFUSED),
    "q_lora_rank": (8, REFUSED), "kv_lora_rank": (8, REFUSED), "nope_dim": (8, REFUSED), "rope_dim": (8, REFUSED),
    "latent_scale": (2.0, REFUSED), "indexer": (IndexerSpec(2, 8, 4), REFUSED), "rule": "sum",
    "latent_eps": (0.5, REFUSED), "log_scaled": (True, REFUSED), "source": (0, REFUSED),
    "direct": (True, REFUSED), "floor": (-5.0, REFUSED),
}  # fmt: skip
OF_CONV = {
    **{name: value if name in ("temperature", "indexer") else (value[0], REFUSED) for name, value in OF_DELTA.items()
       if isinstance(value, tuple)},
    "kind": ("gqa", REFUSED), "heads": 24, "kv_heads": (2, REFUSED), "head_dim": (2, REFUSED),
    "value_dim": (2, REFUSED), "taps": 4, "qkv_bias": True, "out_bias": True, "rule": ("sum", REFUSED),
}  # fmt: skip
OF_MOE = {
    "experts": 10, "top_k": 3, "inner": 32, "shared_inner": 0, "scoring": "sigmoid", "selection": "plain", "groups": 4,
    "top_groups": 2, "renormalise": False, "epsilon": 0.5, "scale": 2.0, "closed_to_zero": True,
    "correction_bias": True, "router_bias": True, "expert_bias": True, "weigh_input": True,
    "shared_gate": True, "shared_bias": True, "shared_scale": 0.5, "shared_limit": 0.01, "normed": True, "apart": True,
    "activation": ("gelu", REFUSED), "latent": 20, "zero_experts": 3, "late": (True, REFUSED),
}  # fmt: skip
OF_CLAMPED = {"alpha": 1.0, "limit": 0.5}
OF_MIXED = {"jitter": 0.4}
OF_DENSE = {"inner": 48, "activation": ("gelu", REFUSED), "bias": True, "normed": True}
CASES = [
    *((GQA, "rope", name, value) for name, value in OF_ROPE.items()),
    *((GQA, "", name, value) for name, value in OF_GQA.items()),
    (GQA, "", "value_dim", (32, REFUSED)),
    *((MLA, "rope", "interleaved", value) for value in (False,)),
    *((MLA, "", name, value) for name, value in OF_MLA.items()),
    *((GATED, "gate", name, value) for name, value in OF_GATE.items()),
    *((INDEXED, "indexer", name, value) for name, value in OF_INDEXER.items()),
    *((BLOCKS, "indexer", name, value) for name, value in OF_BLOCKS.items()),
    *((BLOCKS, "indexer", "local", value) for value in ((0, REFUSED), (3, REFUSED))),
    (BLOCKS, "indexer", "dim", (14, REFUSED)),
    *((BLOCKS, "", name, value) for name, value in (("window", (5, REFUSED)), ("sinks", (True, REFUSED)))),
    *(
        (INDEXED, "", name, value)
        for name, value in (("q_lora_rank", (None, REFUSED)), ("rope_dim", (26, REFUSED)))
    ),
    *((DELTA, "", name, value) for name, value in OF_DELTA.items()),
    *((DELTA, "", "kv_heads", value) for value in ((3, REFUSED),)),
    *((CHANNEL, "", name, value) for name, value in (("direct", True), ("floor", -5.0), ("floor", 0.0))),
    *((MLA, "", "gate", (value, REFUSED)) for value in (GateSpec("query"), GateSpec("numbers"))),
    (replace(MLA, gate=GATE), "gate", "softplus", True),
    *((CONV, "", name, value) for name, value in OF_CONV.items()),
    (CONV, "", "taps", (1, REFUSED)),
    *((LLAMA3, "rope", name, value) for name, value in OF_LLAMA3.items()),
    *((LONGROPE, "rope", name, value) for name, value in OF_LONGROPE.items()),
    *((SHORT, "rope", name, value) for name, value in OF_SHORT.items()),
    *((PROPORTIONAL, "rope", name, value) for name, value in OF_PROPORTIONAL.items()),
    (PROPORTIONAL, "rope", "factor", 3.0),
    *((GQA, "", "qk_norm", value) for value in ("width", "late", "unit")),
    *((MOE, "", name, value) for name, value in OF_MOE.items()),
    (MOE, "", "activation", "gelu_pytorch_tanh"),
    (MOE, "", "activation", "relu2"),
    (DENSE, "", "activation", "relu2"),
    (DENSE, "", "inner", 0),
    (GQA, "", "kind", ("none", REFUSED)),
    (MOE, "", "activation", ("clamped_swiglu", REFUSED)),
    *((CLAMPED, "", name, value) for name, value in OF_CLAMPED.items()),
    *((MIXED, "", name, value) for name, value in OF_MIXED.items()),
    *((DENSE, "", name, value) for name, value in OF_DENSE.items()),
    *((CLAMPED_DENSE, "", name, value) for name, value in OF_CLAMPED.items()),
    (CLAMPED, "", "shared_inner", 16),
    (CLAMPED_DENSE, "", "limit", (None, REFUSED)),
]


def test_every_field_has_its_case():
    ropes, experts = (
        OF_ROPE | OF_LLAMA3 | OF_LONGROPE | OF_SHORT | OF_PROPORTIONAL,
        OF_MOE | OF_CLAMPED | OF_MIXED,
    )
    parts = (
        (RopeSpec, ropes),
        (IndexerSpec, OF_INDEXER),
        (GateSpec, OF_GATE),
        (AttentionSpec, OF_GQA),
        (AttentionSpec, OF_MLA),
        (MoeSpec, experts),
    )
    for part, cases in (
        *parts,
        (AttentionSpec, OF_DELTA),
        (AttentionSpec, OF_CONV),
        (DenseSpec, OF_DENSE | OF_CLAMPED),
    ):
        assert {field.name for field in fields(part)} == {*cases}


@cache
def unchanged(attention, dense, moe):
    return run(checked(LayerSpec(attention, dense), LayerSpec(attention, moe)))


@pytest.mark.parametrize(("base", "part", "name", "value"), CASES)
def test_no_field_is_passed_over(base, part, name, value):
    """Another value asks for other tensors, gives other logits or another rule of routing, or is refused."""
    value, refused = value if isinstance(value, tuple) else (value, "")
    changed = replace(
        base, **({part: replace(getattr(base, part), **{name: value})} if part else {name: value})
    )
    layers = {type(base): base, AttentionSpec: GQA, MoeSpec: MOE, DenseSpec: DENSE} | {type(base): changed}
    first = LayerSpec(layers[AttentionSpec], layers[DenseSpec])
    second = LayerSpec(layers[AttentionSpec], layers[MoeSpec])
    if refused:
        with pytest.raises(CheckpointError, match=r"here: .* is not supported; supported: .* \(layer [01]\)"):
            checked(first, second)
    else:
        bases = {AttentionSpec: GQA, DenseSpec: DENSE, MoeSpec: MOE} | {type(base): base}
        assert not same(run(checked(first, second)), unchanged(*bases.values()))


@pytest.mark.slow
def test_layers_may_differ():
    """Each layer has its own window, rotation, biases and FFN; a window longer than the prompt changes no number."""
    narrow, long = replace(GQA, window=5), replace(GQA, window=1000)
    turned, biased = replace(GQA, rope=replace(ROPE, theta=1e5)), replace(GQA, out_bias=True)
    made = [
        run(checked(LayerSpec(a, MOE), LayerSpec(b, MOE)))
        for a in (GQA, narrow, turned, biased)
        for b in (GQA, narrow, turned, biased)
    ]
    assert not any(same(one, other) for i, one in enumerate(made) for other in made[:i])
    bounded = run(checked(LayerSpec(narrow, MOE), LayerSpec(long, MOE)))
    assert torch.allclose(bounded[2], made[4][2], atol=1e-5)


def test_biases_are_apart():
    names, _, _ = run(checked(LayerSpec(replace(GQA, out_bias=True), MOE)))
    assert {n for n, _ in names if n.endswith("_proj.bias")} == {"model.layers.0.self_attn.o_proj.bias"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "attention",
    [
        replace(GQA, sinks=True, window=9),
        replace(GQA, qkv_bias=True, gate=GateSpec("query")),
        DELTA,
        replace(CHANNEL, direct=True, floor=-5.0),
        replace(MLA, gate=GATE),
        CONV,
        BLOCKS,
    ],
)
def test_backends_agree(attention):
    spec = checked(LayerSpec(attention, MOE))
    assert torch.allclose(run(spec)[2], run(spec, "torch")[2], atol=1e-4)


def test_mixed_attention_caches_each_layer_by_its_own_size():
    spec = checked(LayerSpec(GQA, DENSE), LayerSpec(MLA, MOE))
    assert spec.kv_bytes_per_token(4) == 4 * (2 * 32 + 20 + 16)
    assert run(spec)[2].isfinite().all()


def test_a_state_costs_no_token_anything():
    spec = checked(LayerSpec(DELTA, DENSE), LayerSpec(GQA, MOE))
    numbers = 4 * 12 * 20 + 3 * (2 * 2 * 12 + 4 * 20)
    assert spec.kv_bytes_per_token(4) == 4 * 2 * 32 and spec.state_bytes() == 4 * numbers
    assert spec.kv_bytes_per_token(4, 8) == 4 * 2 * 32 + 4 * numbers / 8
    assert run(spec)[2].isfinite().all()


def test_what_no_two_layers_may_differ_in():
    with pytest.raises(
        CheckpointError, match=r"MoE layers with different .*\(8, 2, 24, 0, 0\), \(8, 3, 24, 0, 0\)"
    ):
        checked(LayerSpec(GQA, MOE), LayerSpec(GQA, replace(MOE, top_k=3)))


def test_a_shared_expert_may_be_missing_in_a_layer():
    names, _, _ = run(checked(LayerSpec(GQA, MOE), LayerSpec(GQA, replace(MOE, shared_inner=0))))
    assert {n.split(".")[2] for n, _ in names if "shared_experts" in n} == {"0"}


def test_the_first_layers_are_a_model():
    spec = checked(LayerSpec(GQA, DENSE), LayerSpec(GQA, MOE), LayerSpec(replace(GQA, window=5), MOE))
    assert spec.cut(2).moe_layer_ids == (1,) and spec.cut(2).layers == 2
    assert spec.cut(9).fingerprint() == spec.fingerprint() != spec.cut(2).fingerprint()
    assert spec.cut(2).attention_parameters() < spec.attention_parameters()


def test_attention_or_an_ffn_alone():
    """A layer of one of both asks for no tensor of the other, and both kinds change what comes out."""
    names, _, logits = run(checked(LayerSpec(GQA, NO_FFN), LayerSpec(NO_ATTENTION, MOE)))
    first, second = (
        {name for name, _ in names if name.startswith(f"model.layers.{layer}.")} for layer in (0, 1)
    )
    assert not any("mlp" in name or "post_attention_layernorm" in name for name in first)
    assert not any("self_attn" in name or "input_layernorm" in name for name in second)
    for others in ((LayerSpec(NO_ATTENTION, DENSE), LayerSpec(GQA, MOE)), (LayerSpec(NO_ATTENTION, MOE),)):
        assert not torch.equal(run(checked(*others))[2], logits)


def test_rows_for_experts_are_as_wide_as_their_latent():
    spec = checked(LayerSpec(GQA, replace(MOE, latent=20, shared_bias=True)))
    names, _, _ = run(spec)
    asked = dict(names)
    assert (spec.expert_width, spec.expert_parameters()) == (20, 3 * 20 * MOE.inner)
    assert asked["model.layers.0.mlp.fc1_latent_proj.weight"] == (20, 48)
    assert asked["model.layers.0.mlp.fc2_latent_proj.weight"] == (48, 20)
    assert asked["model.layers.0.mlp.experts.0.down_proj.weight"] == (20, 24)
    assert {"model.layers.0.mlp.fc1_latent_proj.bias", "model.layers.0.mlp.fc2_latent_proj.bias"} <= {*asked}
    layout = layout_for(ModelSource("nowhere", "made"), spec, EngineConfig(64, 8), 8)
    assert layout.hidden == 20
