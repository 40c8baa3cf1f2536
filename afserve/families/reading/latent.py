"""Latent attention as config.json describes it, and DeepSeek's sparse one: an indexer chooses the rows that are
attended."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.reading.layers import layer_types
from afserve.families.reading.rope import rope
from afserve.spec_parts import AttentionSpec, IndexerSpec, RopeSpec


def latent(fields: ConfigFields) -> AttentionSpec:
    """DeepSeek's multi-head latent attention: its sizes alone."""
    nope, rotary = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    return AttentionSpec(
        kind="mla",
        heads=fields.integer("num_attention_heads"),
        kv_heads=1,
        head_dim=nope + rotary,
        value_dim=fields.integer("v_head_dim"),
        q_lora_rank=fields.optional("q_lora_rank") or None,
        kv_lora_rank=fields.integer("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rotary,
    )


def indexer(fields: ConfigFields, interleaved: bool = False) -> IndexerSpec:
    heads, dim = fields.integer("index_n_heads"), fields.integer("index_head_dim")
    return IndexerSpec(heads, dim, fields.integer("index_topk"), interleaved)


def mla(fields: ConfigFields, *, interleaved: bool | None = None, theta: float = 10000.0) -> AttentionSpec:
    """With what turns, `rope_interleave` of config.json where `interleaved` is None; `attention_bias` is that of the
    first projections and the output. `theta`: where config.json does not say."""
    made, bias = latent(fields), fields.flag("attention_bias", False)
    if made.rope_dim % 2:
        raise fields.refuse("qk_rope_head_dim", "is odd; rotary embedding turns pairs")
    pairs = fields.flag("rope_interleave", True) if interleaved is None else interleaved
    return replace(made, rope=rope(fields, made.rope_dim, pairs, theta), qkv_bias=bias, out_bias=bias)


def still(fields: ConfigFields) -> AttentionSpec:
    """The same without a rotary embedding: what would be turned has an angle of 0."""
    made, bias = latent(fields), fields.flag("attention_bias", False)
    none = RopeSpec("proportional", 1.0, made.rope_dim, False, partial=0.0)
    return replace(made, rope=none, qkv_bias=bias, out_bias=bias)


def indexed(fields: ConfigFields, *, interleaved: bool) -> tuple[AttentionSpec, ...]:
    """DeepSeek's sparse attention, layer by layer: latent attention to the rows that an indexer chooses, the layer's
    own or that of an earlier one. `interleaved` is for a config.json that does not say how index keys are turned."""
    attention = mla(fields)
    layer_types(fields, "indexed_attention")
    if attention.q_lora_rank is None:
        raise fields.error(
            "q_lora_rank: missing; an indexer's queries are made of what it makes", "q_lora_rank"
        )
    own = indexer(fields, fields.flag("indexer_rope_interleave", interleaved))
    if own.dim < attention.rope_dim:
        raise fields.refuse("index_head_dim", f"is less than the {attention.rope_dim} of qk_rope_head_dim")
    return tuple(replace(attention, indexer=replace(own, reuses=one)) for one in reusing(fields))


_CHOICES = {"full": False, "F": False, "shared": True, "S": True}


def reusing(fields: ConfigFields) -> tuple[bool, ...]:
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
        raise fields.refuse(name, f"is not full or shared for each of {layers} layers (num_hidden_layers)")
    return tuple(_CHOICES[one] for one in found)
