"""Attention as several families' config.json describe it: grouped-query, latent, and rotary embedding.

Field meanings follow transformers' configuration classes of the same `model_type`.
"""

import math
from dataclasses import replace
from typing import Literal

from afserve.config_json import ConfigFields
from afserve.config_ranges import MOST_LAYERS, ROPE_DIVISOR, Range
from afserve.errors import shown
from afserve.spec_parts import AttentionSpec, IndexerSpec, RopeSpec

QkNorm = Literal["", "head", "width", "late", "unit"]


def gqa(
    fields: ConfigFields,
    *,
    theta: float,
    qk_norm: QkNorm = "",
    bias: bool = False,
    out_bias: bool | None = None,
    window: int | None = None,
    interleaved: bool = False,
    partial: float = 1.0,
) -> AttentionSpec:
    """Grouped-query attention. `theta`, and the `partial` of a head that turns, are for a config.json without them;
    `out_bias` None is `bias`, that of the projections of q, k and v."""
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
        rope=rope(fields, _turned(fields, head_dim, partial), interleaved, theta),
        qkv_bias=bias,
        out_bias=bias if out_bias is None else out_bias,
        qk_norm=qk_norm,
        window=window,
    )


def _turned(fields: ConfigFields, head_dim: int, partial: float) -> int:
    """How many numbers of a head the rotary embedding turns."""
    inner = fields.inner(fields.section("rope_parameters"), "rope_parameters")
    shares = [
        part.number("partial_rotary_factor") for part in (inner, fields) if part.has("partial_rotary_factor")
    ]
    if inner.config.get("rope_type") == "proportional":
        return head_dim
    if shares:
        turned = int(head_dim * shares[0])
    else:
        turned = fields.optional("rotary_dim") or int(head_dim * partial)
    if not turned or turned % 2 or turned > head_dim:
        raise fields.error(
            f"rotary_dim or partial_rotary_factor: {turned} of {head_dim} numbers of a head (head_dim, or hidden_size "
            f"over num_attention_heads) is not an even number from 2 to {head_dim}",
            "partial_rotary_factor",
        )
    return turned


def clip_qkv(fields: ConfigFields) -> float | None:
    return fields.number("clip_qkv") if fields.has("clip_qkv") else None


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


def indexed(fields: ConfigFields, *, interleaved: bool) -> tuple[AttentionSpec, ...]:
    """DeepSeek's sparse attention, layer by layer: latent attention to the rows that an indexer chooses, the layer's
    own or that of an earlier one. `interleaved` is for a config.json that does not say how index keys are turned."""
    attention = mla(fields, interleaved=fields.flag("rope_interleave", True))
    layer_types(fields, "indexed_attention")
    if attention.q_lora_rank is None:
        raise fields.error(
            "q_lora_rank: missing; an indexer's queries are made of what it makes", "q_lora_rank"
        )
    dim = fields.integer("index_head_dim")
    if dim < attention.rope_dim:
        raise fields.refuse("index_head_dim", f"is less than the {attention.rope_dim} of qk_rope_head_dim")
    own = IndexerSpec(
        fields.integer("index_n_heads"),
        dim,
        fields.integer("index_topk"),
        fields.flag("indexer_rope_interleave", interleaved),
    )
    return tuple(replace(attention, indexer=replace(own, reuses=one)) for one in _reusing(fields))


_CHOICES = {"full": False, "F": False, "shared": True, "S": True}


def _reusing(fields: ConfigFields) -> tuple[bool, ...]:
    """Whether a layer attends what an earlier one chose: by a name or a letter for each, or all but every n-th one."""
    layers = fields.integer("num_hidden_layers")
    name = "indexer_types" if fields.has("indexer_types") else "index_topk_pattern"
    given = fields.config.get(name)
    if given is None:
        every = max(1, fields.integer("index_topk_freq", default=1))
        first = fields.integer("index_skip_topk_offset", default=2) - 1
        return tuple(max(layer - first, 0) % every != 0 for layer in range(layers))
    found = list(given) if isinstance(given, str | list) else []
    if len(found) != layers or not all(isinstance(one, str) and one in _CHOICES for one in found):
        raise fields.refuse(name, f"is not full or shared for each of {layers} layers")
    return tuple(_CHOICES[one] for one in found)


def rope(fields: ConfigFields, dim: int, interleaved: bool, theta: float) -> RopeSpec:
    """Of `rope_parameters`, or of `rope_scaling` and `rope_theta` in older files. Any `rope_type` is a kind."""
    raw = {**fields.section("rope_scaling"), **fields.section("rope_parameters")}
    _check_rope_once(fields)
    inner = fields.inner({k: v for k, v in raw.items() if v is not None}, "rope_parameters")
    kind = str(inner.config.get("rope_type", inner.config.get("type", "default")))
    theta = inner.number("rope_theta", default=fields.number("rope_theta", default=theta))
    if (
        kind == "dynamic" and inner.has("alpha") and dim > 2
    ):  # NTK-aware: another base, the same at every length
        return RopeSpec("default", theta * inner.number("alpha") ** (dim / (dim - 2)), dim, interleaved)
    if kind == "proportional":
        share, factor = (
            inner.number("partial_rotary_factor", default=1.0),
            inner.number("factor", default=1.0),
        )
        return RopeSpec(kind, theta, dim, interleaved, factor, partial=share)
    if kind == "longrope":
        return _longrope(fields, inner, RopeSpec(kind, theta, dim, interleaved))
    if kind == "llama3":
        return RopeSpec(
            kind,
            theta,
            dim,
            interleaved,
            factor=inner.number("factor"),
            original_max=inner.integer("original_max_position_embeddings"),
            low_freq_factor=inner.number("low_freq_factor"),
            high_freq_factor=inner.number("high_freq_factor"),
        )
    if kind not in ("linear", "yarn"):
        return RopeSpec(kind, theta, dim, interleaved)
    if not inner.has("factor") and (kind == "linear" or not inner.has("original_max_position_embeddings")):
        raise inner.error(f"factor: missing, for rope_type {kind!r}", "factor")
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


def _check_rope_once(fields: ConfigFields) -> None:
    """A file may say it in both ways, as long as it says the same: somebody who adds one of them means that one."""
    older, newer = fields.section("rope_scaling"), fields.section("rope_parameters")
    if not older or not newer:
        return
    kinds = [part.get("rope_type", part.get("type", "default")) for part in (older, newer)]
    both = [name for name in older if name in newer and older[name] != newer[name]]
    if kinds[0] != kinds[1] or both:
        what = "rope_type" if kinds[0] != kinds[1] else both[0]
        raise fields.error(
            f"rope_scaling: its {shown(what)} is not that of rope_parameters; take one of the two out",
            "rope_scaling",
        )


def layer_marks(fields: ConfigFields, name: str) -> tuple[int, ...]:
    """0 or 1 for each layer; empty where config.json has no such field."""
    layers = fields.integer("num_hidden_layers")
    marks = fields.integers(name, Range(0, 1), MOST_LAYERS)
    if marks and len(marks) != layers:
        raise fields.refuse(name, f"is not 0 or 1 for each layer of num_hidden_layers {layers}")
    return marks


def of_type(fields: ConfigFields, name: str) -> ConfigFields:
    """A view whose `rope_parameters` are those for layers of the type `name`, where it has one set for each type."""
    inner = fields.inner(fields.section("rope_parameters"), "rope_parameters")
    if not isinstance(inner.config.get(name), dict):
        return fields
    view = {**fields.config, "rope_parameters": inner.section(name)}
    return ConfigFields(view, fields.where, fields.refusal, fields.called)


def alternating(fields: ConfigFields, first: str, second: str) -> tuple[str, ...]:
    """The `layer_types` of config.json, or these two in turn."""
    if fields.has("layer_types"):
        return layer_types(fields, first, second)
    return tuple((first, second)[layer % 2] for layer in range(fields.integer("num_hidden_layers")))


def _longrope(fields: ConfigFields, inner: ConfigFields, rope: RopeSpec) -> RopeSpec:
    """A divisor for every frequency, and a factor of cos and sin, for short contexts and for long ones."""
    longest = fields.integer("max_position_embeddings")
    named = fields.integer("original_max_position_embeddings", default=longest)
    original = inner.integer("original_max_position_embeddings", default=named)
    stretch = max(longest / original, 1.0)
    factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 and original > 1 else 1.0
    factor = inner.number("attention_factor", default=factor)
    return replace(
        rope,
        original_max=original,
        short_factor=inner.reals("short_factor", ROPE_DIVISOR, rope.dim // 2),
        long_factor=inner.reals("long_factor", ROPE_DIVISOR, rope.dim // 2),
        short_mscale=inner.number("short_mscale", default=factor),
        long_mscale=inner.number("long_mscale", default=factor),
    )


def layer_types(fields: ConfigFields, *known: str, field: str = "layer_types") -> tuple[str, ...]:
    """One of `known` for each layer; the first of them for all where config.json has no such `field`."""
    layers = fields.integer("num_hidden_layers")
    found = fields.items(field, layers)
    names = tuple(name for name in found if isinstance(name, str) and name in known)
    if found and len(names) < layers:
        raise fields.refuse(field, f"is not one of {', '.join(known)} for each of {layers} layers")
    return names or known[:1] * layers
