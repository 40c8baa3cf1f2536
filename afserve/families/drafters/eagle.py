"""EAGLE-3 heads as their config.json describes them, in speculators' form or in SpecForge's.

A head is one decoder layer whose queries, keys and values take the next token's embedding beside a row that is made of
what some of the target's layers gave. Sources: EAGLE-3 (arXiv 2503.01840), vLLM's llama_eagle3.py and speculators'
models/eagle3 for the meaning of the fields.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from afserve.config_json import ConfigFields
from afserve.config_ranges import LAYER_COUNT
from afserve.families.drafters.heads import (
    HEAD,
    SOME,
    HeadSpec,
    Shape,
    dense_layer,
    fitting,
    layer_fields,
    open_head,
)
from afserve.families.drafters.known_fields import OF_LAYERS, check_names
from afserve.families.pattern.family import given
from afserve.spec import ModelSpec
from afserve.spec_parts import LayerSpec

_STEMS = ("midlayer", "layers.0")  # what the one layer is called by SpecForge, and by speculators
_AS_PUBLISHED: Mapping[str, object] = {  # the one value that is run, of what NVIDIA's eagle_config may vary
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
    "eagle_num_layers": 1,
    "eagle_decoder_type": "llama",
    "position_embedding_type": "rope",
}
_READ = (
    *("eagle_aux_hidden_state_layer_ids", "draft_vocab_size", "target_hidden_size", "quantization_config"),
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
)


@dataclass(frozen=True, slots=True)
class EagleSpec(HeadSpec):
    """residual_normed  the residual stream begins with the normed row
    joined_norm      a norm over all rows that are read, before `fc`
    each_norm        a norm over each of them
    feeds_normed     the next pass goes on with the row after the last norm
    """

    method: ClassVar[str] = "eagle3"
    called: ClassVar[str] = "an EAGLE-3 head"

    residual_normed: bool = False
    joined_norm: bool = False
    each_norm: bool = False
    feeds_normed: bool = False

    def stems(self, names: Collection[str]) -> tuple[str, ...]:
        """SpecForge's name where neither is there."""
        return (next((s for s in _STEMS if any(name.startswith(f"{s}.") for name in names)), _STEMS[0]),)

    def needed_tensors(self, stems: Collection[str]) -> dict[str, Shape]:
        (stem,) = stems
        found = HeadSpec.needed_tensors(self, stems) | {HEAD: (self.draft_vocab, self.hidden)}
        found |= {"input_norm.weight": (self.read,)} if self.joined_norm else {}
        found |= {f"fc_norm.{at}.weight": (self.hidden,) for at in range(len(self.behind)) if self.each_norm}
        return found | {f"{stem}.hidden_norm.weight": (self.hidden,)}

    def _of_layer(self, layer: LayerSpec, width: int) -> dict[str, Shape]:
        return HeadSpec._of_layer(self, layer, 2 * width)


def load_eagle(folder: str, target: ModelSpec) -> EagleSpec:
    """Of a head for `target`. Raises CheckpointError or ConfigError that name what is wrong, or does not fit."""
    fields = open_head(folder, EagleSpec)
    found = (
        _of_speculators(fields, target) if fields.has("speculators_model_type") else _plain(fields, target)
    )
    return fitting(fields, found, target)


def _of_speculators(fields: ConfigFields, target: ModelSpec) -> EagleSpec:
    """Its layers are counted as here: 0 is the embedding."""
    fields.known_only("speculators_model_type", "eagle3")
    inner = fields.inner(fields.section("transformer_layer_config"), "transformer_layer_config")
    check_names(fields, _READ, ("speculators_model_type", "transformer_layer_config", "model_type"))
    check_names(inner, OF_LAYERS)
    behind = fields.integers("eagle_aux_hidden_state_layer_ids", LAYER_COUNT, SOME)
    return _spec(fields, inner, behind or _usual(target))


def _plain(fields: ConfigFields, target: ModelSpec) -> EagleSpec:
    """SpecForge names the layers themselves, the first one 0."""
    named = fields.config.get("architectures")
    if not isinstance(named, list) or not any("eagle3" in str(one).lower() for one in named):
        raise fields.refuse("architectures", "is no EAGLE-3 head, such as LlamaForCausalLMEagle3")
    inner = fields.inner(fields.section("eagle_config"), "eagle_config")
    for part in (inner, fields):
        check_names(part, OF_LAYERS, _READ, _AS_PUBLISHED, ("eagle_config",))
        for name, known in _AS_PUBLISHED.items():
            part.known_only(name, known)
    behind = [layer + 1 for layer in inner.integers("eagle_aux_hidden_state_layer_ids", LAYER_COUNT, SOME)]
    top = fields.integers("eagle_aux_hidden_state_layer_ids", LAYER_COUNT, SOME)
    flat = ConfigFields({**given(inner.config), **given(fields.config)}, fields.where)
    return _spec(flat, flat, top or tuple(behind) or _usual(target))


def _usual(target: ModelSpec) -> tuple[int, ...]:
    """Behind an early, a middle and a late layer."""
    usual = (2, target.layers // 2, target.layers - 3)
    return tuple(min(max(layers, 0), target.layers) for layers in usual)


def _spec(fields: ConfigFields, inner: ConfigFields, behind: tuple[int, ...]) -> EagleSpec:
    filled = layer_fields(inner)
    if filled.integer("num_hidden_layers") != 1:
        raise filled.refuse("num_hidden_layers", "is not supported: heads of one layer are run")
    if any(one != "full_attention" for one in filled.items("layer_types", 1)):
        raise filled.refuse("layer_types", "is not supported; supported: full_attention")
    filled.known_only("use_sliding_window", False)
    filled.known_only("is_causal", True)
    vocabulary = filled.integer("vocab_size")
    return EagleSpec(
        (dense_layer(filled, head_norms=inner.config.get("model_type") == "qwen3"),),
        filled.integer("hidden_size"),
        vocabulary,
        fields.integer("draft_vocab_size", default=vocabulary),
        filled.number("rms_norm_eps", default=1e-6),
        behind,
        residual_normed=fields.flag("norm_before_residual", False),
        joined_norm=fields.flag("norm_before_fc", False),
        each_norm=fields.flag("fc_norm", False),
        feeds_normed=fields.flag("norm_output", False),
    )
