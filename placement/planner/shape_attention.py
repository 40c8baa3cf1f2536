"""Attention layers of a `config.json`, family by family: what one layer weighs, caches and multiplies.

MLA is counted absorbed in decode (every head works on the latent) and expanded in prefill, as served systems do.
Norms, biases and rotations are left out: they are below a percent. Knows no MoE and no hardware.
"""

from afserve.placement.planner.fields import Fields
from afserve.placement.planner.shape import AttentionLayers


def attention_layers(config: Fields, layers: int) -> tuple[AttentionLayers, ...]:
    """All attention layers of one model, grouped by kind."""
    if config.has("kv_lora_rank"):
        return (_mla(config, layers),)
    if config.has("share_q_dim"):
        return (_mfa(config, layers),)
    full, limited, linear = _layer_kinds(config, layers)
    groups = []
    if full:
        groups.append(_gqa(config, full))
    if limited:
        window = config.integer("attention_chunk_size", 0) or config.integer("sliding_window", 0)
        groups.append(_gqa(config, limited, kind="window", window=window))
    if linear:
        groups.append(_linear(config, linear))
    return tuple(groups)


def _layer_kinds(config: Fields, layers: int) -> tuple[int, int, int]:
    """(full, window or chunk, linear) layers. A `layer_types` list, MiniMax's `attn_type_list` (1 = full), Qwen's
    `full_attention_interval` or Llama 4's `no_rope_layers` (0 = full) say which."""
    for key in ("layer_types", "attn_type_list"):
        if len(config.items(key)) > layers:
            raise config.refuse(key, f"must have at most {layers} entries, one a layer (num_hidden_layers)")
    names = [str(name) for name in config.items("layer_types")]
    if names:
        linear = sum("linear" in name for name in names)
        limited = sum("sliding" in name or "chunked" in name for name in names)
        return layers - linear - limited, limited, linear
    if config.items("attn_type_list"):
        full = sum(kind == 1 for kind in config.items("attn_type_list"))
        return full, 0, layers - full
    if config.has("full_attention_interval"):
        full = layers // config.integer("full_attention_interval", least=1)
        return full, 0, layers - full
    if config.has("attention_chunk_size"):
        full = layers // config.integer("no_rope_layer_interval", 4, least=1)
        return full, layers - full, 0
    return layers, 0, 0


def _mla(config: Fields, layers: int) -> AttentionLayers:
    hidden, heads = config.integer("hidden_size", least=1), config.integer("num_attention_heads", least=1)
    rank, rope = config.integer("kv_lora_rank", least=1), config.integer("qk_rope_head_dim")
    nope, value = config.integer("qk_nope_head_dim"), config.integer("v_head_dim")
    q_rank = config.integer("q_lora_rank", 0)
    query = hidden * q_rank + q_rank * heads * (nope + rope) if q_rank else hidden * heads * (nope + rope)
    weights = query + hidden * (rank + rope) + heads * rank * (nope + value) + heads * value * hidden
    index_heads, index_dim = config.integer("index_n_heads", 0), config.integer("index_head_dim", 0)
    reach = config.integer("index_topk", 0)
    if reach:
        weights += hidden * index_dim + q_rank * index_heads * index_dim + hidden * index_heads
    return AttentionLayers(
        kind="sparse" if reach else "mla",
        layers=layers,
        weight_elems=weights,
        kv_elems=rank + rope + (index_dim if reach else 0),
        pair_flops=2.0 * heads * (2 * rank + rope),
        prefill_pair_flops=2.0 * heads * (nope + rope + value),
        heads=heads,
        kv_heads=1,
        reach=reach,
        scan_elems=index_dim if reach else 0,
        scan_flops=2.0 * index_heads * index_dim if reach else 0.0,
        row_elems=2 * hidden + 2 * (rank + rope) + q_rank + 2 * heads * (nope + 2 * rope + 2 * rank + value),
    )


def _mfa(config: Fields, layers: int) -> AttentionLayers:
    """Multi-matrix factorization attention (Step-3): a low-rank query, one key and one value head."""
    hidden, heads = config.integer("hidden_size", least=1), config.integer("num_attention_heads", least=1)
    dim, shared = config.integer("head_dim", least=1), config.integer("share_q_dim", least=1)
    groups = config.integer("num_attention_groups", 1, least=1)
    weights = hidden * shared + shared * heads * dim + 2 * hidden * groups * dim + heads * dim * hidden
    pair = 4.0 * heads * dim
    crossed = 2 * hidden + 2 * shared + 4 * (heads + groups) * dim
    return AttentionLayers(
        "mfa", layers, weights, 2 * groups * dim, pair, pair, heads, groups, row_elems=crossed
    )


def _gqa(config: Fields, layers: int, *, kind: str = "gqa", window: int = 0) -> AttentionLayers:
    hidden, heads = config.integer("hidden_size", least=1), config.integer("num_attention_heads", least=1)
    kv_heads = config.integer("num_key_value_heads", heads, least=1)
    dim = config.integer("head_dim", 0) or hidden // heads
    if not dim:
        raise config.refuse("num_attention_heads", f"must be at most hidden_size {hidden} without a head_dim")
    query = 2 if config.table.get("attn_output_gate") else 1
    weights = (query + 1) * hidden * heads * dim + 2 * hidden * kv_heads * dim
    pair = 4.0 * heads * dim
    kv = 2 * kv_heads * dim
    crossed = 2 * hidden + 4 * (heads + kv_heads) * dim
    return AttentionLayers(
        kind, layers, weights, kv, pair, pair, heads, kv_heads, reach=window, holds=window, row_elems=crossed
    )


def _linear(config: Fields, layers: int) -> AttentionLayers:
    """Lightning attention or a gated delta net: a state of key x value per head instead of a cache.

    Per token the state is decayed, corrected and read: about six FLOPs per state element.
    """
    hidden = config.integer("hidden_size", least=1)
    heads = config.integer("linear_num_value_heads", config.integer("num_attention_heads", least=1), least=1)
    key_heads = config.integer("linear_num_key_heads", heads, least=1)
    plain = config.integer("head_dim", 0) or hidden // config.integer("num_attention_heads", least=1)
    key = config.integer("linear_key_head_dim", plain)
    value = config.integer("linear_value_head_dim", plain)
    weights = hidden * (2 * key_heads * key + 3 * heads * value)
    state = heads * key * value
    return AttentionLayers(
        kind="linear",
        layers=layers,
        weight_elems=weights,
        kv_elems=0,
        pair_flops=0.0,
        prefill_pair_flops=0.0,
        heads=heads,
        kv_heads=heads,
        scan_flops=6.0 * state,
        state_elems=state,
        row_elems=2 * hidden + 4 * heads * value + 4 * key_heads * key,
    )
