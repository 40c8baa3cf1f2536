"""EAGLE-3 heads as their config.json describes them, in speculators' form or in SpecForge's.

A head is one decoder layer as Llama's or Qwen3's, whose queries, keys and values take the next token's embedding beside
a row that is made of what some of the target's layers gave. Sources: EAGLE-3 (arXiv 2503.01840), vLLM's llama_eagle3.py
and speculators' models/eagle3 for the meaning of the fields.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from afserve.config_json import ConfigFields
from afserve.config_ranges import LAYER_COUNT
from afserve.errors import CheckpointError, ConfigError, shown
from afserve.families.limits import check_layer
from afserve.families.pattern.family import given
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import activation
from afserve.json_file import read_object
from afserve.spec import ModelSpec
from afserve.spec_parts import AttentionSpec, DenseSpec, LayerSpec

STEMS = ("midlayer", "layers.0")
"""What the one layer is called by SpecForge, and by speculators."""
EMBEDDING = "embed_tokens.weight"
TO_TARGET = "d2t"
FROM_TARGET = "t2d"
Shape = tuple[int, ...]

_ALIKE: Mapping[
    str, Mapping[str, object]
] = {  # by model_type: what transformers leaves out of a file, as its default
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    "qwen3": {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "vocab_size": 151936,
    }
    | {"num_hidden_layers": 32, "num_key_value_heads": 32, "head_dim": 128},
}
_AS_PUBLISHED: Mapping[str, object] = {  # of what NVIDIA's eagle_config may vary
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}
_SOME = 16  # layers that are read


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """`behind`: the rows that the head reads are those that so many of the target's layers gave, 0 the embedding.

    residual_normed  the residual stream begins with the normed row
    joined_norm      a norm over all rows that are read, before `fc`
    each_norm        a norm over each of them
    feeds_normed     the next pass goes on with the row after the last norm
    """

    layer: LayerSpec
    hidden: int
    vocab_size: int
    draft_vocab: int
    eps: float
    behind: tuple[int, ...]
    residual_normed: bool = False
    joined_norm: bool = False
    each_norm: bool = False
    feeds_normed: bool = False

    @property
    def attention(self) -> AttentionSpec:
        return self.layer.attention

    def tensors(self, stem: str) -> dict[str, Shape]:
        """Those that it must have, by name; the layer is called `stem`."""
        a, h, read = self.attention, self.hidden, len(self.behind) * self.hidden
        assert isinstance(self.layer.ffn, DenseSpec)
        inner, wide, narrow = self.layer.ffn.inner, a.heads * a.head_dim, a.kv_heads * a.head_dim
        heads: dict[str, Shape] = {"q_proj": (wide,), "k_proj": (narrow,), "v_proj": (narrow,)}
        found: dict[str, Shape] = {"fc.weight": (h, read), "norm.weight": (h,)}
        found |= {"lm_head.weight": (self.draft_vocab, h)}
        found |= {"input_norm.weight": (read,)} if self.joined_norm else {}
        found |= {f"fc_norm.{at}.weight": (h,) for at in range(len(self.behind)) if self.each_norm}
        attention = {f"{name}.weight": (*size, 2 * h) for name, size in heads.items()}
        attention |= {"o_proj.weight": (h, wide)}
        if a.qkv_bias:
            attention |= {f"{name}.bias": size for name, size in heads.items()} | {"o_proj.bias": (h,)}
        if a.qk_norm:
            attention |= {"q_norm.weight": (a.head_dim,), "k_norm.weight": (a.head_dim,)}
        found |= {f"{stem}.self_attn.{name}": shape for name, shape in attention.items()}
        found |= {f"{stem}.mlp.{name}_proj.weight": (inner, h) for name in ("gate", "up")}
        found |= {f"{stem}.mlp.down_proj.weight": (h, inner)}
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        return found | {f"{stem}.{name}.weight": (h,) for name in norms}

    def further(self) -> dict[str, Shape]:
        """Those that it may have. Without an embedding it takes the target's."""
        vocabulary = (self.vocab_size, self.hidden)
        return {EMBEDDING: vocabulary, TO_TARGET: (self.draft_vocab,), FROM_TARGET: (self.vocab_size,)}


def load_eagle(folder: str, target: ModelSpec) -> EagleSpec:
    """Of a head for `target`. Raises CheckpointError or ConfigError that name what is wrong, or does not fit."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"--draft eagle3: {path}: no such file; an EAGLE-3 head is a folder with a config.json and its "
            "model.safetensors, on the host of every attention node",
            param="draft",
        )
    fields = ConfigFields(read_object(path, once=True), str(path))
    fields.known_only("quantization_config")
    found = (
        _of_speculators(fields, target) if fields.has("speculators_model_type") else _plain(fields, target)
    )
    for name, own, wanted in (
        ("hidden_size", found.hidden, target.hidden),
        ("vocab_size", found.vocab_size, target.vocab_size),
    ):
        if own != wanted:
            _refuse(
                fields, f"{name}: {own}, but {target.family} here has {wanted}; the head is of another model"
            )
    if found.draft_vocab > found.vocab_size:
        _refuse(fields, f"draft_vocab_size: {found.draft_vocab} is more than vocab_size, {found.vocab_size}")
    if any(layers > target.layers for layers in found.behind):
        _refuse(fields, f"it reads rows behind layers {found.behind}, and the model has {target.layers}")
    return found


def stem_of(names: Collection[str]) -> str:
    """What the layer is called there; SpecForge's name where neither is."""
    return next((stem for stem in STEMS if any(name.startswith(f"{stem}.") for name in names)), STEMS[0])


def _of_speculators(fields: ConfigFields, target: ModelSpec) -> EagleSpec:
    """Its layers are counted as here: 0 is the embedding."""
    fields.known_only("speculators_model_type", "eagle3")
    inner = fields.inner(fields.section("transformer_layer_config"), "transformer_layer_config")
    behind = fields.integers("eagle_aux_hidden_state_layer_ids", LAYER_COUNT, _SOME)
    return _spec(fields, inner, behind or _usual(target), target)


def _plain(fields: ConfigFields, target: ModelSpec) -> EagleSpec:
    """SpecForge names the layers themselves, the first one 0."""
    named = fields.config.get("architectures")
    if not isinstance(named, list) or not any("eagle3" in str(one).lower() for one in named):
        raise fields.refuse("architectures", "is no EAGLE-3 head, such as LlamaForCausalLMEagle3")
    inner = fields.inner(fields.section("eagle_config"), "eagle_config")
    for name, known in _AS_PUBLISHED.items():
        inner.known_only(name, known)
    behind = [layer + 1 for layer in inner.integers("eagle_aux_hidden_state_layer_ids", LAYER_COUNT, _SOME)]
    top = fields.integers("eagle_aux_hidden_state_layer_ids", LAYER_COUNT, _SOME)
    flat = ConfigFields({**given(inner.config), **given(fields.config)}, fields.where)
    return _spec(flat, flat, top or tuple(behind) or _usual(target), target)


def _usual(target: ModelSpec) -> tuple[int, ...]:
    """Behind an early, a middle and a late layer."""
    usual = (2, target.layers // 2, target.layers - 3)
    return tuple(min(max(layers, 0), target.layers) for layers in usual)


def _spec(fields: ConfigFields, inner: ConfigFields, behind: tuple[int, ...], target: ModelSpec) -> EagleSpec:
    kind = inner.config.get("model_type", "llama")
    if kind not in _ALIKE:
        raise inner.refuse("model_type", f"is not one of {', '.join(_ALIKE)}: other layers are no heads here")
    filled = ConfigFields({**_ALIKE[str(kind)], **given(inner.config)}, inner.where)
    if filled.integer("num_hidden_layers") != 1:
        raise filled.refuse("num_hidden_layers", "is not supported: heads of one layer are run")
    filled.known_only("mlp_bias", False)
    if any(one != "full_attention" for one in filled.items("layer_types", 1)):
        raise filled.refuse("layer_types", "is not supported; supported: full_attention")
    attention = gqa(
        filled,
        theta=1e4,
        qk_norm="head" if kind == "qwen3" else "",
        bias=filled.flag("attention_bias", False),
    )
    if attention.rope is None or attention.rope.dim != attention.head_dim:
        raise filled.error("partial_rotary_factor: heads turn whole here", "partial_rotary_factor")
    layer = LayerSpec(attention, DenseSpec(filled.integer("intermediate_size"), activation(filled)))
    check_layer(layer, filled.where)
    hidden, vocabulary = filled.integer("hidden_size"), filled.integer("vocab_size")
    if fields.has("target_hidden_size") and fields.config["target_hidden_size"] != target.hidden:
        raise fields.refuse("target_hidden_size", f"is not that of the model, {target.hidden}")
    return EagleSpec(
        layer,
        hidden,
        vocabulary,
        fields.integer("draft_vocab_size", default=vocabulary),
        filled.number("rms_norm_eps", default=1e-6),
        behind,
        residual_normed=fields.flag("norm_before_residual", False),
        joined_norm=fields.flag("norm_before_fc", False),
        each_norm=fields.flag("fc_norm", False),
        feeds_normed=fields.flag("norm_output", False),
    )


def check_tensors(folder: str, head: EagleSpec, shapes: Mapping[str, Shape]) -> None:
    """Raises CheckpointError that names the first tensor which is not there, of another shape, or one too many."""
    stem = stem_of(shapes)
    for name in head.tensors(stem):
        if name not in shapes:
            raise CheckpointError(f"{folder}: no {name}, which an EAGLE-3 head of that config.json has")
    for name, wanted in {**head.tensors(stem), **head.further()}.items():
        if name in shapes and tuple(shapes[name]) != wanted:
            raise CheckpointError(
                f"{folder}: {name} has shape {tuple(shapes[name])}, config.json wants {wanted}"
            )
    computed = (f"{stem}.", "fc.", "fc_norm.", "input_norm.")
    for name in sorted(set(shapes) - set(head.tensors(stem))):
        if name.startswith(computed) and not name.endswith(".inv_freq"):
            raise CheckpointError(f"{folder}: {name} is there, and no field of config.json asks for it")
    if TO_TARGET not in shapes and head.draft_vocab != head.vocab_size:
        raise CheckpointError(
            f"{folder}: no {TO_TARGET}: which of {head.vocab_size} tokens its {head.draft_vocab} are is not known"
        )


def _refuse(fields: ConfigFields, why: str) -> NoReturn:
    raise ConfigError(f"--draft eagle3: {shown(fields.where)}: {why}", param="draft")
