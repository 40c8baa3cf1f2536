"""FFNs as several families' config.json describe them, and the stack of layers that they make with attention."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from afserve.config_json import ConfigFields
from afserve.config_ranges import LAYER_COUNT, LIMIT, MOST_LAYERS
from afserve.families.reading.layers import layer_numbers, layer_types
from afserve.spec_parts import BOUNDED_SWIGLU, CLAMPED_SWIGLU, AttentionSpec, DenseSpec, LayerSpec, MoeSpec

EXPERT_FIELDS = "n_routed_experts, num_experts, num_local_experts or moe_num_experts"
TOP_K_FIELDS = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k")


def routed(
    fields: ConfigFields,
    *experts: str,
    scoring: str,
    top_k: str = "num_experts_per_tok",
    inner: str = "intermediate_size",
    shared_inner: int = 0,
    **more: Any,
) -> MoeSpec:
    """Experts whose number is the first of these fields; `top_k` and `inner` are fields too, `more` is MoeSpec's."""
    sizes = fields.integer(*experts), fields.integer(top_k), fields.integer(inner)
    return MoeSpec(*sizes, shared_inner, scoring, **{"activation": activation(fields), **more})


def stack(
    fields: ConfigFields,
    attention: AttentionSpec | Sequence[AttentionSpec],
    moe: MoeSpec,
    moe_ids: Collection[int] | None = None,
    dense_inner: int | None = None,
) -> tuple[LayerSpec, ...]:
    """Layers with one attention, or one for each: those of `moe_ids` (None: all) with experts, the others with a dense
    FFN of `dense_inner` (None: `intermediate_size`), which has biases where the shared expert does."""
    layers = fields.integer("num_hidden_layers")
    if moe_ids is None:
        moe_ids, dense_inner = range(layers), 0
    elif dense_inner is None:
        dense_inner = fields.optional("intermediate_size") or 0
    if not moe_ids:
        raise fields.error(
            f"no MoE layer at all is left of num_hidden_layers {layers} by first_k_dense_replace, mlp_layer_types, "
            "mlp_only_layers, moe_layer_freq, decoder_sparse_step, moe_layer_start_index, moe_layer_end_index, "
            "moe_layer_interval, moe_layers or interleave_moe_layer_step; afserve serves Mixture-of-Experts models",
            "num_hidden_layers",
        )
    if len(moe_ids) < layers and not dense_inner:
        raise fields.error("intermediate_size: missing, for layers without experts", "intermediate_size")
    check_top_k(fields, moe)
    ffn = DenseSpec(dense_inner, moe.activation, moe.shared_bias)
    if moe.activation == CLAMPED_SWIGLU:
        ffn = replace(ffn, alpha=moe.alpha, limit=moe.limit)
    each = (attention,) * layers if isinstance(attention, AttentionSpec) else attention
    return tuple(LayerSpec(one, moe if layer in moe_ids else ffn) for layer, one in enumerate(each))


def within(
    fields: ConfigFields,
    layers: Sequence[LayerSpec],
    routed_limits: str,
    shared_limits: str,
    *,
    which: str = "mlp_layer_types or first_k_dense_replace",
) -> tuple[LayerSpec, ...]:
    """The same layers, experts and shared ones within the limits of two lists, a number a layer, 0 for none. `which`
    fields say what layers have experts."""
    limits, shared = (
        layer_numbers(fields, name, LIMIT) or (0.0,) * len(layers) for name in (routed_limits, shared_limits)
    )
    if any(limit for one, limit in zip(layers, shared, strict=True) if one.moe is None):
        why = f"is not 0 for a layer without experts ({which}), which is not supported"
        raise fields.refuse(shared_limits, why)
    each = zip(layers, limits, shared, strict=True)
    return tuple(
        replace(one, ffn=_limited(one.moe, limit, own)) if one.moe else one for one, limit, own in each
    )


def _limited(moe: MoeSpec, limit: float, shared: float) -> MoeSpec:
    kind = BOUNDED_SWIGLU if limit else moe.activation
    return replace(moe, activation=kind, limit=limit or None, shared_limit=shared or None)


def check_top_k(fields: ConfigFields, moe: MoeSpec) -> None:
    if moe.top_k > moe.experts:
        names = [name for name in TOP_K_FIELDS if fields.has(name)]
        raise fields.error(
            f"{', '.join(names)}: {moe.top_k} is more than the {moe.experts} of {EXPERT_FIELDS}", names[-1]
        )


def dense_then_moe(fields: ConfigFields, default: int) -> range:
    """The MoE layers, where the first few of all are dense."""
    fields.known_only("moe_layer_freq", 1)
    first = fields.integer("first_k_dense_replace", default=default)
    return range(first, fields.integer("num_hidden_layers"))


def sparse_layers(fields: ConfigFields, default: int) -> Collection[int]:
    """The MoE layers by `mlp_layer_types`, or all but the first few, which are dense."""
    if not fields.has("mlp_layer_types"):
        return dense_then_moe(fields, default)
    types = layer_types(fields, "dense", "sparse", field="mlp_layer_types")
    return frozenset(layer for layer, name in enumerate(types) if name == "sparse")


def enumerated_layers(fields: ConfigFields) -> tuple[int, ...]:
    """Step-3's list of layers, as text with commas or as numbers."""
    value = fields.config["moe_layers_enum"]
    if not isinstance(value, str):
        return fields.integers("moe_layers_enum", LAYER_COUNT, MOST_LAYERS)
    parts = [part.strip() for part in value.split(",", MOST_LAYERS + 1) if part.strip()]
    if not all(part.isdecimal() and len(part) < 6 for part in parts):
        raise fields.refuse("moe_layers_enum", "is not a list of layers with commas between")
    return tuple(map(int, parts))


def sparse_steps(fields: ConfigFields) -> frozenset[int]:
    """Qwen's MoE layers: every `decoder_sparse_step`-th one that `mlp_only_layers` does not name."""
    step = fields.integer("decoder_sparse_step", default=1)
    dense = frozenset(fields.integers("mlp_only_layers", LAYER_COUNT, MOST_LAYERS))
    layers = range(fields.integer("num_hidden_layers"))
    return frozenset(i for i in layers if i not in dense and (i + 1) % step == 0)


def softmax(fields: ConfigFields, *, renormalise: bool) -> MoeSpec:
    """Qwen3's experts; `renormalise`: where the config.json does not say."""
    renormalise = fields.flag("norm_topk_prob", renormalise)
    experts = ("num_experts", "num_local_experts")
    return routed(fields, *experts, inner="moe_intermediate_size", scoring="softmax", renormalise=renormalise)


def beside_shared(fields: ConfigFields, scoring: str, **more: Any) -> MoeSpec:
    """Experts beside a shared one of another width; `more` is MoeSpec's."""
    shared = fields.integer("shared_expert_intermediate_size")
    more = {"inner": "moe_intermediate_size", "shared_inner": shared, **more}
    return routed(fields, "num_experts", scoring=scoring, **more)


def gated_shared(fields: ConfigFields, *, renormalise: bool) -> MoeSpec:
    """Qwen's, where the shared one has a gate; `renormalise`: where the config.json does not say."""
    renormalise = fields.flag("norm_topk_prob", renormalise)
    return beside_shared(fields, "softmax", shared_gate=True, renormalise=renormalise)


def activation(fields: ConfigFields) -> str:
    """Any name; swish is silu."""
    name = fields.config.get("hidden_act", "silu")
    if not isinstance(name, str):
        raise fields.refuse("hidden_act", "is not the name of an activation")
    return "silu" if name == "swish" else name


def shared_inner(fields: ConfigFields) -> int:
    """Of DeepSeek's shared experts, which are one FFN of their widths together."""
    return fields.integer("moe_intermediate_size") * (fields.optional("n_shared_experts") or 0)


def sigmoid_groups(fields: ConfigFields, *also: str) -> MoeSpec:
    """DeepSeek-V3's router, which others took over: sigmoid scores with a bias that selects only, groups by their two
    best. `also`: other names that a family has for this `scoring_func`."""
    fields.known_only("scoring_func", "sigmoid", *also)
    fields.known_only("topk_method", "noaux_tc")
    moe = routed(
        fields,
        *("n_routed_experts", "num_local_experts"),
        inner="moe_intermediate_size",
        shared_inner=shared_inner(fields),
        scoring="sigmoid",
        selection="group_top2_sum",
        groups=fields.integer("n_group", default=1),
        top_groups=fields.integer("topk_group", default=1),
        renormalise=fields.flag("norm_topk_prob", True),
        epsilon=1e-20,
        scale=fields.number("routed_scaling_factor", default=1.0),
        correction_bias=True,
    )
    check_groups(fields, moe, least=2)
    return moe


def check_groups(fields: ConfigFields, moe: MoeSpec, least: int) -> None:
    """Groups of `least` experts or more divide all of them, and the chosen groups hold enough."""
    if moe.experts % moe.groups:
        raise fields.refuse("n_group", f"does not divide the {moe.experts} experts of {EXPERT_FIELDS}")
    if moe.groups > 1 and moe.experts // moe.groups < least:
        raise fields.refuse("n_group", f"leaves fewer than {least} of {EXPERT_FIELDS} in a group")
    if moe.top_groups > moe.groups:
        raise fields.refuse("topk_group", f"is more than the {moe.groups} groups of n_group")
    left = moe.top_groups * (moe.experts // moe.groups)
    if left < moe.top_k:
        raise fields.refuse(
            "topk_group",
            f"of n_group leave {left} of {EXPERT_FIELDS}, fewer than num_experts_per_tok {moe.top_k}",
        )
