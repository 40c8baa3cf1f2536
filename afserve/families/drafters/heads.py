"""What heads of all kinds have in common: decoder layers as Llama's or Qwen3's beside a model, which read rows that
some of its layers gave, and the folder with a config.json and a model.safetensors that they come in."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn, TypeVar

from afserve.config_json import ConfigFields
from afserve.errors import CheckpointError, ConfigError, shown
from afserve.families.limits import check_layer
from afserve.families.pattern.family import given
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import activation
from afserve.json_file import read_object
from afserve.spec import ModelSpec
from afserve.spec_parts import AttentionSpec, DenseSpec, LayerSpec

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
TO_TARGET = "d2t"
FROM_TARGET = "t2d"
SOME = 16  # layers that are read
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
_UNREAD = ("verifier_norm.weight", "verifier_lm_head.weight")  # of the model, which training reads


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """`behind`: the rows that the head reads are those that so many of the target's layers gave, 0 the embedding."""

    method: ClassVar[str]  # of --draft
    called: ClassVar[str]

    layers: tuple[LayerSpec, ...]
    hidden: int
    vocab_size: int
    draft_vocab: int
    eps: float
    behind: tuple[int, ...]

    @property
    def attention(self) -> AttentionSpec:
        """Of its first layer; of the others only the window may differ."""
        return self.layers[0].attention

    @property
    def read(self) -> int:
        """Numbers of all rows of one token that it reads."""
        return len(self.behind) * self.hidden

    def kv_bytes(self, element: int) -> int:
        """Of a token, in numbers of so many bytes."""
        return sum(layer.attention.kv_bytes(element) for layer in self.layers)

    def stems(self, names: Collection[str]) -> tuple[str, ...]:
        """What its layers are called where there are tensors of these names."""
        return tuple(f"layers.{layer}" for layer in range(len(self.layers)))

    def needed_tensors(self, stems: Collection[str]) -> dict[str, Shape]:
        """Those that it must have, by name."""
        found: dict[str, Shape] = {"fc.weight": (self.hidden, self.read), "norm.weight": (self.hidden,)}
        for stem, layer in zip(stems, self.layers, strict=True):
            found |= {f"{stem}.{name}": shape for name, shape in self._of_layer(layer, self.hidden).items()}
        return found

    def further(self) -> dict[str, Shape]:
        """Those that it may have. Without an embedding it takes the target's."""
        vocabulary = (self.vocab_size, self.hidden)
        return {EMBEDDING: vocabulary, TO_TARGET: (self.draft_vocab,), FROM_TARGET: (self.vocab_size,)}

    def _of_layer(self, layer: LayerSpec, width: int) -> dict[str, Shape]:
        """Queries, keys and values take rows of `width`."""
        assert isinstance(layer.ffn, DenseSpec)
        a, h, inner = layer.attention, self.hidden, layer.ffn.inner
        wide, narrow = a.heads * a.head_dim, a.kv_heads * a.head_dim
        heads: dict[str, Shape] = {"q_proj": (wide,), "k_proj": (narrow,), "v_proj": (narrow,)}
        attention = {f"{name}.weight": (*size, width) for name, size in heads.items()}
        attention |= {"o_proj.weight": (h, wide)}
        if a.qkv_bias:
            attention |= {f"{name}.bias": size for name, size in heads.items()} | {"o_proj.bias": (h,)}
        if a.qk_norm:
            attention |= {"q_norm.weight": (a.head_dim,), "k_norm.weight": (a.head_dim,)}
        found = {f"self_attn.{name}": shape for name, shape in attention.items()}
        found |= {f"mlp.{name}_proj.weight": (inner, h) for name in ("gate", "up")}
        found |= {"mlp.down_proj.weight": (h, inner)}
        return found | {f"{name}.weight": (h,) for name in ("input_layernorm", "post_attention_layernorm")}


Spec = TypeVar("Spec", bound=HeadSpec)


def open_head(folder: str, kind: type[HeadSpec]) -> ConfigFields:
    """Its config.json. Raises CheckpointError, or ConfigError where there is none."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"--draft {kind.method}: {path}: no such file; {kind.called} is a folder with a config.json and its "
            "model.safetensors, on the host of every attention node",
            param="draft",
        )
    fields = ConfigFields(read_object(path, once=True), str(path))
    fields.known_only("quantization_config")
    return fields


def layer_fields(inner: ConfigFields, otherwise: str = "llama") -> ConfigFields:
    """The fields of its layers, of `model_type` or `otherwise`, with what transformers leaves out of a file. Raises
    CheckpointError."""
    kind = inner.config.get("model_type", otherwise)
    if kind not in _ALIKE:
        raise inner.refuse("model_type", f"is not one of {', '.join(_ALIKE)}: other layers are no heads here")
    filled = ConfigFields({**_ALIKE[str(kind)], **given(inner.config)}, inner.where)
    filled.known_only("mlp_bias", False)
    filled.known_only("is_neox_style", True)
    return filled


def dense_layer(fields: ConfigFields, *, head_norms: bool) -> LayerSpec:
    """Of `layer_fields`. Raises CheckpointError."""
    attention = gqa(
        fields,
        theta=1e4,
        qk_norm="head" if head_norms else "",
        bias=fields.flag("attention_bias", False),
    )
    if attention.rope is None or attention.rope.dim != attention.head_dim:
        raise fields.error("partial_rotary_factor: heads turn whole here", "partial_rotary_factor")
    layer = LayerSpec(attention, DenseSpec(fields.integer("intermediate_size"), activation(fields)))
    check_layer(layer, fields.where)
    return layer


def fitting(fields: ConfigFields, head: Spec, target: ModelSpec) -> Spec:
    """The head of that config.json, where it is one for `target`. Raises CheckpointError or ConfigError."""
    if fields.has("target_hidden_size") and fields.config["target_hidden_size"] != target.hidden:
        raise fields.refuse("target_hidden_size", f"is not that of the model, {target.hidden}")
    for name, own, wanted in (
        ("hidden_size", head.hidden, target.hidden),
        ("vocab_size", head.vocab_size, target.vocab_size),
    ):
        if own != wanted:
            refuse(
                fields,
                head,
                f"{name}: {own}, but {target.family} here has {wanted}; the head is of another model",
            )
    if head.draft_vocab > head.vocab_size:
        refuse(
            fields, head, f"draft_vocab_size: {head.draft_vocab} is more than vocab_size, {head.vocab_size}"
        )
    if any(layers > target.layers for layers in head.behind):
        refuse(fields, head, f"it reads rows behind layers {head.behind}, and the model has {target.layers}")
    return head


def refuse(fields: ConfigFields, head: HeadSpec, why: str) -> NoReturn:
    raise ConfigError(f"--draft {head.method}: {shown(fields.where)}: {why}", param="draft")


def check_tensors(folder: str, head: HeadSpec, shapes: Mapping[str, Shape]) -> None:
    """Raises CheckpointError that names the first tensor which is not there, of another shape, or one too many."""
    needed = head.needed_tensors(head.stems(shapes))
    for name in needed:
        if name not in shapes:
            raise CheckpointError(f"{folder}: no {name}, which {head.called} of that config.json has")
    for name, wanted in {**needed, **head.further()}.items():
        if name in shapes and tuple(shapes[name]) != wanted:
            raise CheckpointError(
                f"{folder}: {name} has shape {tuple(shapes[name])}, config.json wants {wanted}"
            )
    for name in sorted(set(shapes) - {*needed, *head.further(), *_UNREAD}):
        if not name.endswith(".inv_freq"):
            raise CheckpointError(f"{folder}: {name} is there, and no field of config.json asks for it")
    if head.draft_vocab == head.vocab_size:
        return
    for name in (HEAD, TO_TARGET):
        if name not in shapes:
            raise CheckpointError(
                f"{folder}: no {name}: which of {head.vocab_size} tokens its {head.draft_vocab} are is not known"
            )
