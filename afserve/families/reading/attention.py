"""Grouped-query attention as several families' config.json describe it.

Field meanings follow transformers' configuration classes of the same `model_type`.
"""

from typing import Literal

from afserve.config_json import ConfigFields
from afserve.families.reading.rope import rope
from afserve.spec_parts import AttentionSpec

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
