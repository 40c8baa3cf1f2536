"""What of a model's shape the engine can run, checked when a config.json is read, so that no field is passed over.

Each refusal names the field as config.json calls it, and the layer. Whoever teaches the kernels more takes a line out
here. What only some devices or backends lack, their kernels refuse or replace themselves.
"""

from collections.abc import Iterator
from dataclasses import fields

from afserve.config_ranges import MOST_ROUTED, MOST_SLICE_ROWS
from afserve.errors import CheckpointError, shown
from afserve.families.reading.ffn import EXPERT_FIELDS
from afserve.spec import ModelSpec
from afserve.spec_parts import (
    BOUNDED_SWIGLU,
    CLAMPED_SWIGLU,
    NO_ATTENTION,
    SQUARED_RELU,
    AttentionSpec,
    IndexerSpec,
    LayerSpec,
    RopeSpec,
)

_ROPE_KINDS = ("default", "linear", "yarn", "llama3", "longrope", "proportional")
_ACTIVATIONS = ("silu", SQUARED_RELU, CLAMPED_SWIGLU)
_OF_DELTA = {"kind", "heads", "kv_heads", "head_dim", "value_dim", "taps", "rule"}
_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
_OF_RULE = {
    "head": _OF_DELTA,
    "channel": {*_OF_DELTA, "direct", "floor"},
    "sum": {*_OF_DELTA, "qkv_bias", "out_scale"},
}
_OF_CONV = {"kind", "heads", "taps", "qkv_bias", "out_bias"}
_NO_STATE = AttentionSpec("linear", 1, 1, 1, 1)
_SHARED_ACTIVATIONS = ("silu", "gelu_pytorch_tanh", SQUARED_RELU)
_EXPERT_ACTIVATIONS = (*_SHARED_ACTIVATIONS, BOUNDED_SWIGLU, CLAMPED_SWIGLU)


def check(spec: ModelSpec, where: str) -> None:
    """Raises CheckpointError for the first thing that no kernel of the engine computes."""
    for kind, layer in enumerate(spec.kinds):
        found = next(_not_run(layer), None)
        if found:
            raise CheckpointError(f"{where}: {found} (layer {spec.pattern.index(kind)})")
    indexers = ((n, spec.layer(n).attention.indexer) for n in range(len(spec.pattern)))
    first = next(((n, indexer) for n, indexer in indexers if indexer), None)
    if first and first[1].reuses:
        shared = _unsupported("indexer_types: shared without an earlier full one", "full, then shared")
        raise CheckpointError(f"{where}: {shared} (layer {first[0]})")
    for layer_id in range(len(spec.pattern)):
        if _nothing_shared(spec, layer_id):
            latents = _unsupported(
                "latents of another layer", "those of an earlier one that keeps the same kind"
            )
            raise CheckpointError(f"{where}: kv_source_layers: {latents} (layer {layer_id})")
    late = (n for n in range(len(spec.pattern)) if _nowhere_added(spec, n))
    if (number := next(late, None)) is not None:
        behind = "a next layer with a dense FFN, and plain sums"
        why = _unsupported("experts whose sum is added behind the next layer", behind)
        raise CheckpointError(f"{where}: {why} (layer {number})")
    moes = [layer.moe for layer in spec.kinds if layer.moe]
    sizes = {(m.experts, m.top_k, m.inner, m.latent, m.zero_experts) for m in moes}
    if len(sizes) > 1:
        sized = "experts, top-k, inner size, latent, experts that compute nothing"
        raise CheckpointError(
            f"{where}: MoE layers with different ({sized}) {sorted(sizes)} are not supported"
        )
    if why := _table(spec):
        raise CheckpointError(f"{where}: {why}")
    if sizes and spec.moe_layers * spec.experts > MOST_ROUTED:
        raise CheckpointError(
            f"{where}: num_hidden_layers, {EXPERT_FIELDS}: {spec.moe_layers} layers of {spec.experts} experts "
            f"have more than the {MOST_ROUTED} that afserve can place"
        )


def _table(spec: ModelSpec) -> str:
    """Why rows of its look-up table cannot travel as rows to experts do; empty where they can."""
    if spec.table is None:
        return ""
    rows, numbers = spec.table.slice_rows(spec.experts), spec.table.heads * spec.table.width
    if numbers > spec.expert_width:
        return _unsupported(f"emb_split_num: {numbers} numbers for a token", f"up to {spec.expert_width}")
    if rows > MOST_SLICE_ROWS:
        most = f"up to {MOST_SLICE_ROWS:,}"
        return _unsupported(f"ngram_vocab_size_ratio: {rows:,} rows in each of {spec.experts} slices", most)
    return ""


def _nothing_shared(spec: ModelSpec, number: int) -> bool:
    """Whether this layer attends the latents of another one, and there are none for it."""
    a = spec.layer(number).attention
    if a.source is None or a.kind != "mla":
        return a.source is not None
    if not 0 <= a.source < number:
        return True
    kept = spec.layer(a.source).attention
    alike = (kept.kind, kept.kv_lora_rank, kept.rope, kept.source) == ("mla", a.kv_lora_rank, a.rope, None)
    return not alike


def _nowhere_added(spec: ModelSpec, number: int) -> bool:
    """Whether no layer behind this one can add the sum of its experts, which is added late."""
    moe, around = spec.layer(number).moe, spec.around
    if moe is None or not moe.late:
        return False
    odd = moe.apart or moe.normed or around.scaled_by_layer or number + 1 >= spec.layers
    return odd or spec.layer(number + 1).moe is not None


def check_layer(layer: LayerSpec, where: str) -> None:
    """The same of one layer that is no part of a model."""
    if found := next(_not_run(layer), None):
        raise CheckpointError(f"{where}: {found}")


def _not_run(layer: LayerSpec) -> Iterator[str]:
    yield from _attention(layer.attention)
    known = _EXPERT_ACTIVATIONS if layer.moe else _ACTIVATIONS
    if layer.ffn.activation not in known:
        yield _unsupported(
            f"hidden_act: {shown(layer.ffn.activation)}",
            *(_SHARED_ACTIVATIONS if layer.moe else _ACTIVATIONS),
        )
    if layer.moe and layer.moe.apart and layer.attention.kind != "gqa":
        yield _unsupported(f"experts with norms apart behind {layer.attention.kind} attention", "gqa")
    limited = (CLAMPED_SWIGLU, BOUNDED_SWIGLU) if layer.moe else (CLAMPED_SWIGLU,)
    if (layer.ffn.limit is None) == (layer.ffn.activation in limited):
        yield _unsupported(f"swiglu_limit: {layer.ffn.limit} with {layer.ffn.activation}", *limited)


def _attention(a: AttentionSpec) -> Iterator[str]:
    if a.kind == "linear":
        yield from _delta(a)
        return
    if a.kind == "conv":
        yield from _convolution(a)
        return
    if a == NO_ATTENTION:
        return
    if a.kind not in ("gqa", "mla"):
        yield _unsupported(f"attention of kind {a.kind}", "gqa", "mla", "linear", "conv", "none")
    if a.rope is not None and a.rope.kind not in _ROPE_KINDS:
        yield _unsupported(f"rope_type {shown(a.rope.kind)}", *_ROPE_KINDS)
    elif a.rope is not None and not _divided(a.rope):
        each = f"one number in each for {a.rope.dim // 2} frequencies"
        yield _unsupported("rope_type 'longrope' with other short_factor and long_factor", each)
    if a.taps:
        yield _unsupported(f"linear_conv_kernel_dim: {a.taps} before {a.kind} attention", "linear attention")
    if a.rule != _NO_STATE.rule:
        yield _unsupported(f"a state that moves by {a.rule} in {a.kind} attention", "linear attention")
    if a.direct or a.floor is not None:
        yield _unsupported(f"decays of a state in {a.kind} attention", "linear attention")
    if a.chunk and a.window:
        yield _unsupported(f"attention_chunk_size: {a.chunk} beside a sliding_window", "one of the two")
    rows = a.kind == "mla" and (a.q_lora_rank is not None or (a.indexer is not None and a.indexer.own))
    of = a.indexer if a.indexer and not (a.indexer.block and a.kind == "gqa") else None
    if of and (not rows or of.dim < a.rope_dim or of.block or of.local):
        yield _no_rows(of)
    yield from _latent(a) if a.kind == "mla" else _grouped(a)


def _no_rows(indexer: IndexerSpec) -> str:
    latent = "latent attention with a q_lora_rank, and an index_head_dim of qk_rope_head_dim or more"
    return _unsupported(f"index_topk: {indexer.top}", latent)


def _of_blocks(a: AttentionSpec, of: IndexerSpec) -> Iterator[str]:
    """What an indexer of blocks of keys does not go with."""
    if of.heads != a.kv_heads or of.reuses or of.own:
        yield _unsupported(f"index_n_heads: {of.heads}", f"num_key_value_heads, {a.kv_heads}")
    if not 0 < of.local <= of.top:
        yield _unsupported(f"index_local_blocks: {of.local}", f"1 to index_topk_blocks, {of.top}")
    if of.dim < (a.rope.dim if a.rope else 0):
        yield _unsupported(f"index_head_dim: {of.dim}", "rotary_dim or more")
    if a.window or a.chunk or a.sinks or of.interleaved or (a.rope and a.rope.interleaved):
        plain = "plain heads turned by halves, without windows, chunks or sinks"
        yield _unsupported(f"index_topk_blocks: {of.top} with these heads", plain)


def _divided(rope: RopeSpec) -> bool:
    """Whether longrope has a divisor for every frequency; other kinds need none."""
    return rope.kind != "longrope" or len(rope.short_factor) == len(rope.long_factor) == rope.dim // 2


def _grouped(a: AttentionSpec) -> Iterator[str]:
    if a.indexer:
        yield from _of_blocks(a, a.indexer)
    if a.rope and (a.rope.dim > a.head_dim or a.rope.dim % 2):
        even = "an even number of them, up to all"
        yield _unsupported(f"rotary embedding of {a.rope.dim} of {a.head_dim} numbers of a head", even)
    if a.rope is None and a.qk_norm == "late":
        yield _unsupported(
            "norms after the rotary embedding without one", "a rotary embedding in every layer"
        )
    if a.value_dim > a.head_dim:
        yield _unsupported(f"v_head_dim: {a.value_dim} beside a head_dim of {a.head_dim}", "up to that size")
    if a.heads % a.kv_heads:
        yield _unsupported(
            f"num_key_value_heads: {a.kv_heads} for {a.heads} heads", "a divisor of num_attention_heads"
        )
    if a.q_lora_rank or a.kv_lora_rank or a.nope_dim or a.rope_dim:
        yield _unsupported(
            "a low rank with grouped-query attention", "mla, with q_lora_rank and kv_lora_rank"
        )
    if a.latent_scale != 1.0 or a.latent_eps != _NO_STATE.latent_eps or a.log_scaled:
        yield _unsupported("scales or norms of latents, or of queries, with grouped-query attention", "mla")


def _delta(a: AttentionSpec) -> Iterator[str]:
    if a.taps < 2:
        yield _unsupported(
            f"linear attention with a convolution of {a.taps} tokens (linear_conv_kernel_dim, short_conv_kernel_size, "
            "mamba_d_conv or conv_kernel)",
            "gated delta nets, of 2 tokens or more",
        )
    yield from _beyond(a, _OF_RULE[a.rule], "a layer with a state")
    if a.heads % a.kv_heads:
        names = ("mamba_n_groups", "mamba_n_heads") if a.rule == "sum" else _HEADS
        yield _unsupported(f"{names[0]}: {a.kv_heads} for {a.heads} value heads", f"a divisor of {names[1]}")


def _convolution(a: AttentionSpec) -> Iterator[str]:
    if a.taps < 2:
        yield _unsupported(f"conv_L_cache: {a.taps}", "convolutions of 2 tokens or more")
    yield from _beyond(a, _OF_CONV, "a short convolution")


def _beyond(a: AttentionSpec, known: set[str], what: str) -> Iterator[str]:
    others = {field.name for field in fields(a)} - known
    odd = sorted(name for name in others if getattr(a, name) != getattr(_NO_STATE, name))
    if odd:
        yield _unsupported(f"{', '.join(odd)} of {what}", "one without")


def _latent(a: AttentionSpec) -> Iterator[str]:
    turned = a.rope.dim if a.rope else 0
    if turned != a.rope_dim:
        yield _unsupported(f"rotary embedding of {turned} numbers", f"qk_rope_head_dim, {a.rope_dim}")
    if a.kv_heads != 1 or a.head_dim != a.nope_dim + a.rope_dim:
        yield _unsupported(
            f"latent attention of {a.kv_heads} latents and heads of {a.head_dim} numbers",
            f"one latent, and qk_nope_head_dim + qk_rope_head_dim = {a.nope_dim + a.rope_dim}",
        )
    grouped, scaled = "grouped-query attention", a.clip is not None
    for asked, what, instead in (
        (a.window, f"sliding_window: {a.window} with latent attention", "all of the context"),
        (a.sinks, "attention sinks with latent attention", grouped),
        (a.chunk, f"attention_chunk_size: {a.chunk} with latent attention", "all of the context"),
        (scaled or a.out_scale != 1.0, "clipped or scaled latent attention", grouped),
        (a.value_norm or a.value_of_key, "values of keys, or normed, with latent attention", grouped),
        (a.gate and a.gate.by != "heads", "a gate for each number of latent attention", "one for each head"),
        (a.qk_norm, "norms on the heads of latent attention", "norms on its two latents"),
    ):
        if asked:
            yield _unsupported(what, instead)


def _unsupported(what: str, *instead: str) -> str:
    return f"{what} is not supported; supported: {', '.join(instead)}"
