"""Layers of families that afserve plans for and does not serve, read by the names of their fields alone.

A new family works when its dimensions have names that are among the ones below. Rotary embedding, norms and biases are
not read: they are below a percent of what a plan counts.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from afserve.config_json import Config, ConfigFields
from afserve.config_ranges import LAYER_COUNT, MOST_LAYERS
from afserve.errors import UserError
from afserve.families.reading.ffn import enumerated_layers
from afserve.families.reading.latent import indexer, latent
from afserve.spec_parts import AttentionSpec, DenseSpec, GateSpec, LayerSpec, MoeSpec

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_top_k", "num_experts_per_token")
_WIDTH = ("moe_intermediate_size", "ffn_hidden_size", "intermediate_size")
_DENSE_WIDTH = ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size")
_WHICH_LAYERS = (
    "num_hidden_layers",
    "n_layers",
    "moe_layers_enum",
    "interleave_moe_layer_step",
    "first_k_dense_replace",
    "mlp_only_layers",
    "moe_layer_freq",
)
_RENAMES = {"d_model": "hidden_size", "n_heads": "num_attention_heads", "kv_n_heads": "num_key_value_heads"}
"""DBRX's own names."""


def flat_fields(config: Config, where: str, refusal: type[UserError]) -> ConfigFields:
    """One level: a vision model's `text_config`, DBRX's `attn_config` and `ffn_config`, and DBRX's own names."""
    flat = dict(config)
    for key in ("text_config", "attn_config", "ffn_config"):
        flat.update(ConfigFields(config, where, refusal).section(key))
    called = {new: old for old, new in _RENAMES.items() if old in flat and flat.get(new) is None}
    flat.update((new, flat[old]) for new, old in called.items())
    return ConfigFields(flat, where, refusal, called)


def layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    """Every decoder layer. Raises what `fields` refuses with, naming the missing or odd field."""
    count = fields.integer(_present(fields, ("num_hidden_layers", "n_layers")))
    routed = _moe_layers(fields, count)
    moe = _moe(fields)
    dense = DenseSpec(_dense_width(fields, moe)) if len(routed) < count else None
    return tuple(
        LayerSpec(attention, moe if dense is None or layer in routed else dense)
        for layer, attention in enumerate(_attention(fields, count))
    )


def _present(fields: ConfigFields, names: tuple[str, ...]) -> str:
    found = next((name for name in names if fields.has(name)), None)
    if found is None:
        raise fields.error(
            f"none of {', '.join(names)} is there. The planner needs a Mixture-of-Experts config.json",
            names[0],
        )
    return found


def _moe(fields: ConfigFields) -> MoeSpec:
    width = fields.integer(_present(fields, _WIDTH))
    routed, top_k = _present(fields, _EXPERTS), _present(fields, _TOP_K)
    experts = fields.integer(routed)
    if fields.integer(top_k) > experts:
        raise fields.refuse(top_k, f"is more than the {experts} of {routed}")
    return MoeSpec(experts, fields.integer(top_k), width, _shared_width(fields, width), scoring="softmax")


def _shared_width(fields: ConfigFields, width: int) -> int:
    """The shared expert's intermediate size; 0 without one. Llama 4 has one of the routed experts' width."""
    for key in ("shared_expert_intermediate_size", "share_expert_dim", "shared_intermediate_size"):
        if fields.has(key):
            return fields.integer(key)
    if fields.has("interleave_moe_layer_step"):
        return width
    return width * (fields.optional("n_shared_experts") or 0)


def _dense_width(fields: ConfigFields, moe: MoeSpec) -> int:
    named = next((name for name in _DENSE_WIDTH if fields.has(name)), None)
    return moe.inner if named is None else fields.integer(named)


def _moe_layers(fields: ConfigFields, count: int) -> frozenset[int]:
    found = frozenset(layer for layer in _named_moe_layers(fields, count) if layer < count)
    if not found:
        names = ", ".join(name for name in _WHICH_LAYERS if fields.has(name))
        raise fields.error(f"{names} leave none of {count} layers with experts", names)
    return found


def _named_moe_layers(fields: ConfigFields, count: int) -> Iterator[int]:
    if fields.has("moe_layers_enum"):
        yield from enumerated_layers(fields)
        return
    step = fields.optional("interleave_moe_layer_step")
    if step:
        yield from range(step - 1, count, step)
        return
    if isinstance(fields.config.get("moe_layer_freq"), list):
        named = fields.integers("moe_layer_freq", LAYER_COUNT, MOST_LAYERS)
        yield from (layer for layer in range(count) if layer < len(named) and named[layer])
        return
    dense = frozenset(fields.integers("mlp_only_layers", LAYER_COUNT, MOST_LAYERS))
    first = fields.optional("first_k_dense_replace") or 0
    yield from (layer for layer in range(first, count) if layer not in dense)


def _attention(fields: ConfigFields, count: int) -> list[AttentionSpec]:
    """One a layer. MLA and MFA are those of all layers."""
    if fields.has("kv_lora_rank"):
        return [_mla(fields)] * count
    if fields.has("share_q_dim"):
        return [_mfa(fields)] * count
    read: dict[str, Callable[[ConfigFields], AttentionSpec]] = {
        "full": _gqa,
        "window": lambda fields: _gqa(fields, window=fields.optional("sliding_window")),
        "chunk": lambda fields: _gqa(fields, chunk=fields.integer("attention_chunk_size")),
        "linear": _linear,
    }
    names = list(_layer_kinds(fields, count))
    made = {name: read[name](fields) for name in dict.fromkeys(names)}
    return [made[name] for name in names]


def _layer_kinds(fields: ConfigFields, count: int) -> Iterator[str]:
    """full, window, chunk or linear. A `layer_types` list, MiniMax's `attn_type_list` (1 = full), MiMo's
    `hybrid_layer_pattern` (1 = window), Qwen's `full_attention_interval` or Llama 4's `no_rope_layer_interval` (every
    so many a full one) say which."""
    limited = "chunk" if fields.has("attention_chunk_size") else "window"
    by = "num_hidden_layers"
    types, numbers = fields.items("layer_types", count, by), fields.items("attn_type_list", count, by)
    windows = fields.items("hybrid_layer_pattern", count, by)
    every = fields.optional("full_attention_interval")
    for layer in range(count):
        if types:
            name = str(types[layer]) if layer < len(types) else "full"
            named_limited = "sliding" in name or "chunked" in name
            yield "linear" if "linear" in name else limited if named_limited else "full"
        elif numbers:
            yield "full" if layer < len(numbers) and numbers[layer] == 1 else "linear"
        elif windows:
            yield "window" if layer < len(windows) and windows[layer] == 1 else "full"
        elif every:
            yield "linear" if (layer + 1) % every else "full"
        elif limited == "chunk":
            yield "chunk" if (layer + 1) % fields.integer("no_rope_layer_interval", default=4) else "full"
        else:
            yield "full"


def _gqa(fields: ConfigFields, *, window: int | None = None, chunk: int | None = None) -> AttentionSpec:
    heads, dim = fields.integer("num_attention_heads"), _head_dim(fields)
    kv_heads = fields.optional("num_key_value_heads") or heads
    if window:
        kv_heads = fields.optional("swa_num_key_value_heads") or kv_heads
    value = fields.optional("v_head_dim") or dim
    gate = GateSpec("query") if fields.config.get("attn_output_gate") else None
    return AttentionSpec("gqa", heads, kv_heads, dim, value, window=window, chunk=chunk, gate=gate)


def _head_dim(fields: ConfigFields) -> int:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    dim = fields.optional("head_dim") or hidden // heads
    if not dim:
        raise fields.refuse("num_attention_heads", f"is more than hidden_size {hidden} without a head_dim")
    return dim


def _mla(fields: ConfigFields) -> AttentionSpec:
    sparse = fields.optional("index_topk")
    return replace(latent(fields), indexer=indexer(fields) if sparse else None)


def _mfa(fields: ConfigFields) -> AttentionSpec:
    """Multi-matrix factorization attention (Step-3): a low-rank query, one key and one value head."""
    dim = fields.integer("head_dim")
    groups = fields.integer("num_attention_groups", default=1)
    heads, rank = fields.integer("num_attention_heads"), fields.integer("share_q_dim")
    return AttentionSpec("mfa", heads, groups, dim, dim, q_lora_rank=rank)


def _linear(fields: ConfigFields) -> AttentionSpec:
    """Lightning attention, or Qwen's gated delta net."""
    heads, plain = fields.integer("num_attention_heads"), _head_dim(fields)
    values = fields.optional("linear_num_value_heads") or heads
    return AttentionSpec(
        kind="linear",
        heads=values,
        kv_heads=fields.optional("linear_num_key_heads") or values,
        head_dim=fields.optional("linear_key_head_dim") or plain,
        value_dim=fields.optional("linear_value_head_dim") or plain,
    )
