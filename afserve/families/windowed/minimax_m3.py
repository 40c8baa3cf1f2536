"""MiniMax M3 (`MiniMaxM3SparseForConditionalGeneration`) without its vision part: layers that attend the blocks of keys
which an indexer chooses for each key head, and a clamped SwiGLU in all FFNs. transformers turns what
`partial_rotary_factor` says and passes over `rotary_dim`; here that counts where the former is absent."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.config_ranges import MOST_LAYERS, Range
from afserve.families.pattern.family import Family, beside_vision
from afserve.families.pattern.naming import Naming
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import routed, sparse_layers, stack
from afserve.families.reading.layers import FULL, by_type
from afserve.spec_parts import CLAMPED_SWIGLU, Around, IndexerSpec, LayerSpec

_SPARSE = "minimax_m3_sparse"
_PUBLISHED = {  # in `sparse_attention_config`
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    fields = _unfolded(fields)
    full = gqa(fields, theta=5e6, qk_norm="head")
    names = "index_n_heads", "index_head_dim", "index_topk_blocks", "index_block_size", "index_local_blocks"
    heads, dim, top, block, local = (fields.integer(name) for name in names)
    chosen = replace(full, indexer=IndexerSpec(heads, dim, top, block=block, local=local))
    fields.known_only("scoring_func", "sigmoid")
    moe = routed(
        fields,
        "num_local_experts",
        scoring="sigmoid",
        shared_inner=fields.integer("shared_intermediate_size"),
        renormalise=True,
        correction_bias=True,
        scale=fields.number("routed_scaling_factor"),
        activation=CLAMPED_SWIGLU,
        alpha=fields.number("swiglu_alpha"),
        limit=fields.number("swiglu_limit"),
    )
    dense = fields.optional("dense_intermediate_size")
    return stack(fields, by_type(fields, {FULL: full, _SPARSE: chosen}), moe, sparse_layers(fields, 0), dense)


def _unfolded(fields: ConfigFields) -> ConfigFields:
    """Published files have a section for the indexer, and 0 or 1 for each layer; transformers writes lists of types."""
    inner = fields.inner(fields.section("sparse_attention_config"), "sparse_attention_config")
    found = {new: inner.config[old] for new, old in _PUBLISHED.items() if inner.has(old)}
    for (new, names), (of, old) in {
        ("layer_types", (FULL, _SPARSE)): (inner, "sparse_attention_freq"),
        ("mlp_layer_types", ("dense", "sparse")): (fields, "moe_layer_freq"),
    }.items():
        if not fields.has(new) and isinstance(of.config.get(old), list):
            found[new] = [names[mark] for mark in of.integers(old, Range(0, 1), MOST_LAYERS)]
    return fields.view({**found, **({"moe_layer_freq": None} if "mlp_layer_types" in found else {})})


def _around(fields: ConfigFields) -> Around:
    return Around(norm_less_one=True)


_TEXT = Family(
    _layers,
    Naming("block_sparse_moe", gate="w1", up="w3", down="w2", correction_bias="e_score_correction_bias"),
    _around,
    defaults={
        "index_n_heads": 4, "index_head_dim": 128, "index_block_size": 128, "index_topk_blocks": 16,
        "index_local_blocks": 1, "routed_scaling_factor": 2.0, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
        "shared_intermediate_size": 3072, "rotary_dim": 64, "head_dim": 128,
    },
)  # fmt: skip
FAMILY = beside_vision(_TEXT, "language_model.model", "language_model.lm_head.weight")
