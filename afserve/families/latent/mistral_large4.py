"""Mistral Large 4 (`MistralLarge4ForConditionalGeneration`) without its vision part: DeepSeek's sparse attention with
queries of the hidden row, scaled by the logarithm of their position; layers without a rotary embedding, and such as
attend the latents of an earlier one. Names are those that it is published with."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.config_ranges import MOST_LAYERS, Range
from afserve.families.latent.deepseek_v2 import experts
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import LatentNames, Naming
from afserve.families.reading.ffn import check_groups, sparse_layers, stack
from afserve.families.reading.latent import indexer, mla, reusing
from afserve.families.reading.layers import layer_marks, layer_types
from afserve.spec_parts import Around, AttentionSpec, LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    groups, top = fields.integer("n_group", default=1), fields.integer("topk_group", default=1)
    moe = replace(experts(fields), selection="group_top2_sum", groups=groups, top_groups=top)
    moe = replace(moe, renormalise=True, epsilon=1e-20)
    check_groups(fields, moe, least=2)
    return stack(fields, _attention(fields), moe, sparse_layers(fields, 1))


def _attention(fields: ConfigFields) -> list[AttentionSpec]:
    layer_types(fields, "indexed_attention")
    plain, layers = (
        mla(fields.view({"q_lora_rank": None}), interleaved=True),
        fields.integer("num_hidden_layers"),
    )
    own = replace(indexer(fields, interleaved=True), own=True)
    if own.dim < plain.rope_dim:
        raise fields.refuse("index_head_dim", f"is less than the {plain.rope_dim} of qk_rope_head_dim")
    assert plain.rope is not None, "made by `mla`"
    eps = fields.number("rms_norm_eps")
    turned = replace(plain, rope=replace(plain.rope, learned=True), log_scaled=True, latent_eps=eps)
    still = replace(turned, rope=None, nope_dim=plain.head_dim, rope_dim=0)
    every = fields.integer("no_rope_layer_interval", default=4)
    turns = layer_marks(fields, "no_rope_layers") or tuple((n + 1) % every != 0 for n in range(layers))
    kinds = zip(turns, _sources(fields, turns), reusing(fields), strict=True)
    return [
        replace(turned if turns else still, source=source, indexer=replace(own, reuses=reuses))
        for turns, source, reuses in kinds
    ]


def _sources(fields: ConfigFields, turns: tuple[int | bool, ...]) -> list[int | None]:
    """The layer whose latents each one attends: as transformers does, the last one before it that turns as it does and
    that any attends besides itself."""
    layers = len(turns)
    found = fields.integers("kv_source_layers", Range(0, MOST_LAYERS), MOST_LAYERS) or tuple(range(layers))
    shared = [n for n in range(layers) if n in found[n + 1 :]]
    for n, source in enumerate(found):
        last = max((one for one in shared if one < n and turns[one] == turns[n]), default=None)
        if len(found) != layers or (source != n and (source != last or found[source] != source)):
            raise fields.refuse(
                "kv_source_layers", f"is not an earlier layer alike, or itself, for each of {layers}"
            )
    return [None if source == n else source for n, source in enumerate(found)]


_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2048.0, "original_max_position_embeddings": 512,
    "attention_factor": 1.0,
}  # fmt: skip
_LATENT = LatentNames(
    "wq.weight",
    "wkv_a_with_mqa.weight",
    "kv_a_norm.weight",
    "wkv_b.weight",
    "ssmax_scaling.s",
    "ssmax_scaling.b",
)
_NAMES = Naming(
    "", "w1", "w3", "w2", dense_ffn="feed_forward", dense_parts=("w1", "w3", "w2"), shared_parts=("w1", "w3", "w2"),
    attention="attention", out="wo", input_norm="attention_norm.weight", post_norm="ffn_norm.weight", stem="",
    embed="tok_embeddings.weight", head="output.weight", rope_factors="lerope.alpha", latent=_LATENT,
)  # fmt: skip
FAMILY = Family(
    _layers,
    _NAMES,
    lambda fields: Around(logit_cap=fields.number("final_logit_softcapping")),
    sections=("text_config",),
    defaults={
        "n_shared_experts": 1, "rms_norm_eps": 1e-5, "final_logit_softcapping": 30.0, "index_topk": 2048,
        "index_head_dim": 128, "index_n_heads": 32, "rope_parameters": _YARN,
    },
)  # fmt: skip
