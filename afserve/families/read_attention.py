"""Attention as several families' config.json describe it: grouped-query, latent, and rotary embedding.

Field meanings follow transformers' configuration classes of the same `model_type`.
"""

from afserve.config_json import ConfigFields
from afserve.spec_parts import AttentionSpec, RopeSpec


def gqa(
    fields: ConfigFields,
    *,
    theta: float,
    qk_norm: bool = False,
    bias: bool = False,
    window: int | None = None,
) -> AttentionSpec:
    """Grouped-query attention whose projections all have a bias or none has; `theta` where config.json has none."""
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.optional("num_key_value_heads") or heads
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"does not divide the {heads} of num_attention_heads")
    head_dim = fields.optional("head_dim") or fields.integer("hidden_size") // heads
    if not head_dim or head_dim % 2:
        raise fields.error(
            f"head_dim, or hidden_size over num_attention_heads: {head_dim} is not an even size of at least 2; "
            "rotary embedding turns pairs",
            "head_dim",
        )
    return AttentionSpec(
        kind="gqa",
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        rope=rope(fields, head_dim, False, theta),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=qk_norm,
        window=window,
    )


def mla(fields: ConfigFields, *, interleaved: bool) -> AttentionSpec:
    """DeepSeek's multi-head latent attention; `attention_bias` is that of the first projections and the output."""
    nope, rotary = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    if rotary % 2:
        raise fields.refuse("qk_rope_head_dim", "is odd; rotary embedding turns pairs")
    bias = fields.flag("attention_bias", False)
    return AttentionSpec(
        kind="mla",
        heads=fields.integer("num_attention_heads"),
        kv_heads=1,
        head_dim=nope + rotary,
        value_dim=fields.integer("v_head_dim"),
        rope=rope(fields, rotary, interleaved, 10000.0),
        qkv_bias=bias,
        out_bias=bias,
        q_lora_rank=fields.optional("q_lora_rank") or None,
        kv_lora_rank=fields.integer("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rotary,
    )


def rope(fields: ConfigFields, dim: int, interleaved: bool, theta: float) -> RopeSpec:
    """Of `rope_parameters`, or of `rope_scaling` and `rope_theta` in older files. Any `rope_type` is a kind."""
    raw = {**fields.section("rope_scaling"), **fields.section("rope_parameters")}
    inner = fields.inner({k: v for k, v in raw.items() if v is not None}, "rope_parameters")
    kind = str(inner.config.get("rope_type", inner.config.get("type", "default")))
    theta = inner.number("rope_theta", default=fields.number("rope_theta", default=theta))
    if kind not in ("linear", "yarn"):
        return RopeSpec(kind, theta, dim, interleaved)
    longest = fields.integer("max_position_embeddings")
    original = inner.integer("original_max_position_embeddings", default=longest)
    return RopeSpec(
        kind,
        theta,
        dim,
        interleaved,
        factor=inner.number("factor", default=longest / original),
        original_max=original,
        beta_fast=inner.number("beta_fast", default=32.0),
        beta_slow=inner.number("beta_slow", default=1.0),
        attention_factor=inner.number("attention_factor") if inner.has("attention_factor") else None,
        mscale=inner.number("mscale", default=0.0),
        mscale_all_dim=inner.number("mscale_all_dim", default=0.0),
        truncate=inner.flag("truncate", True),
    )


def layer_types(fields: ConfigFields, *known: str) -> tuple[str, ...]:
    """One of `known` for each layer; the first of them for all where config.json has no `layer_types`."""
    layers = fields.integer("num_hidden_layers")
    found = fields.items("layer_types", layers)
    names = tuple(name for name in found if isinstance(name, str) and name in known)
    if found and len(names) < layers:
        raise fields.refuse("layer_types", f"is not one of {', '.join(known)} for each of {layers} layers")
    return names or known[:1] * layers
