"""Rotary embedding as several families' config.json describe it."""

import math
from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.config_ranges import ROPE_DIVISOR
from afserve.errors import shown
from afserve.spec_parts import RopeSpec


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


def of_type(fields: ConfigFields, name: str) -> ConfigFields:
    """A view whose `rope_parameters` are those for layers of the type `name`, where it has one set for each type."""
    inner = fields.inner(fields.section("rope_parameters"), "rope_parameters")
    if not isinstance(inner.config.get(name), dict):
        return fields
    return fields.view({"rope_parameters": inner.section(name)})


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
