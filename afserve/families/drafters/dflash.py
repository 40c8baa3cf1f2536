"""DFlash heads (block diffusion) as their config.json describes them, in z-lab's form or in speculators'.

A head is a few decoder layers as Qwen3's. Of a token that the model has computed they keep keys and values of what
`fc` and a norm make of the rows that some of the model's layers gave; behind these stands a block: the newest token,
and mask tokens that see each other, of which each becomes a guess. Sources: DFlash (arXiv 2602.06036), z-lab's
dflash/model.py, speculators' models/dflash, and vLLM's qwen3_dflash.py for windows and causal layers.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from afserve.config_json import ConfigFields
from afserve.config_ranges import LAYER_COUNT
from afserve.drafts import DRAFT_TOKENS
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
from afserve.families.reading.layers import FULL, SLIDING, layer_types
from afserve.spec import ModelSpec
from afserve.spec_parts import LayerSpec

_EITHER = (
    "block_size",
    "mask_token_id",
    "causal",
    "swa_window_size",
    "target_hidden_size",
    "input_embedding_scale",
)
_READ = (*_EITHER, "target_layer_ids", "num_target_layers")
_READ_OF_PLAIN = (*_READ, "dflash_config", "draft_vocab_size", "quantization_config")
_READ_OF_SPECULATORS = (
    *_EITHER, "speculators_model_type", "transformer_layer_config", "draft_vocab_size", "aux_hidden_state_layer_ids",
    "sample_from_anchor", "sliding_window_non_causal", "quantization_config", "model_type",
)  # fmt: skip
_AS_PUBLISHED: Mapping[str, tuple[object, ...]] = {  # by a field: the values that change nothing
    "use_aux_hidden_state": (True,),
    "use_swa": (False,),
    "attention_sink_bias": (False,),
    "attention_mode": ("gqa",),
    "projector_type": ("dflash",),
    "shift_label": (False,),
    "logit_scale": (1.0, 1),
    "output_multiplier": (1.0, 1),
    "final_logit_softcapping": (),
    "draft_adapter_rank": (0,),
}
_PLAIN = ("DFlashDraftModel",)
_MASK = "mask_embedding.pt"


@dataclass(frozen=True, slots=True)
class DflashSpec(HeadSpec):
    """block        rows of a block: the newest token, then masks
    mask         the token that stands where nothing is known
    from_newest  the newest token's row guesses what follows it; else each mask's row guesses the token in its place
    causal       by layer: whether rows of a block see only those before them
    scale        of the embedded rows of a block
    normed       by row that it reads: whether the model's last norm comes first
    """

    method: ClassVar[str] = "dflash"
    called: ClassVar[str] = "a DFlash head"

    block: int
    mask: int
    from_newest: bool
    causal: tuple[bool, ...]
    scale: float
    normed: tuple[bool, ...]

    @property
    def guesses(self) -> int:
        """Tokens that one pass guesses, at most."""
        return min(self.block - (not self.from_newest), int(DRAFT_TOKENS.high))

    def rows(self, guesses: int) -> int:
        """Of a block that guesses so many tokens."""
        return guesses + (not self.from_newest)

    def needed_tensors(self, stems: Collection[str]) -> dict[str, Shape]:
        return HeadSpec.needed_tensors(self, stems) | {"hidden_norm.weight": (self.hidden,)}

    def further(self) -> dict[str, Shape]:
        """Without an LM head it takes the target's."""
        return HeadSpec.further(self) | {HEAD: (self.draft_vocab, self.hidden)}


def load_dflash(folder: str, target: ModelSpec) -> DflashSpec:
    """Of a head for `target`. Raises CheckpointError or ConfigError that name what is wrong, or does not fit."""
    fields = open_head(folder, DflashSpec)
    if (Path(folder) / _MASK).exists():
        raise fields.error(
            f"beside it stands {_MASK}, and a mask apart from the embedding is not read", "mask_token_id"
        )
    if not fields.has("speculators_model_type"):
        return _plain(fields, target)
    fields.known_only("speculators_model_type", "dflash")
    return fitting(fields, of_speculators(fields, newest=False), target)


def of_speculators(fields: ConfigFields, *further: str, newest: bool) -> DflashSpec:
    """Its layers are counted as here: 0 is the embedding. `further`: fields that the caller reads. `newest`:
    `from_newest` where nothing says so. Raises CheckpointError or ConfigError."""
    check_names(fields, _READ_OF_SPECULATORS, _AS_PUBLISHED, further)
    inner = fields.inner(fields.section("transformer_layer_config"), "transformer_layer_config")
    check_names(inner, OF_LAYERS, _AS_PUBLISHED)
    behind = fields.integers("aux_hidden_state_layer_ids", LAYER_COUNT, SOME)
    if not behind:
        raise fields.error(
            "aux_hidden_state_layer_ids: missing: which rows it reads is not known",
            "aux_hidden_state_layer_ids",
        )
    block = fields.integer("block_size", default=8)
    found = _spec(fields, inner, fields, behind, block, fields.flag("sample_from_anchor", newest))
    ahead = fields.flag("sliding_window_non_causal", False)
    if ahead and any(layer.attention.window is not None for layer in found.layers):
        raise fields.refuse("sliding_window_non_causal", "is not supported for layers with a window")
    return found


def _plain(fields: ConfigFields, target: ModelSpec) -> DflashSpec:
    """z-lab names the layers themselves, the first one 0, and reads transformers' rows: the last one is normed."""
    named = fields.config.get("architectures")
    if not isinstance(named, list) or not named or any(one not in _PLAIN for one in named):
        raise fields.refuse("architectures", f"is no DFlash head that is run; supported: {', '.join(_PLAIN)}")
    own = fields.inner(fields.section("dflash_config"), "dflash_config")
    check_names(fields, OF_LAYERS, _READ_OF_PLAIN, _AS_PUBLISHED)
    check_names(own, _READ, _AS_PUBLISHED)
    _check_values(own)
    flat = ConfigFields({**given(fields.config), **given(own.config)}, fields.where)
    if flat.has("num_target_layers") and flat.integer("num_target_layers") != target.layers:
        raise flat.refuse(
            "num_target_layers", f"is not the number of layers of {target.family} here, {target.layers}"
        )
    ids = flat.integers("target_layer_ids", LAYER_COUNT, SOME) or _usual(flat, target)
    behind, block = tuple(layer + 1 for layer in ids), flat.integer("block_size", default=16)
    normed = tuple(layers == target.layers for layers in behind)
    return fitting(flat, replace(_spec(flat, flat, own, behind, block, False), normed=normed), target)


def _usual(fields: ConfigFields, target: ModelSpec) -> tuple[int, ...]:
    """As many as it has layers, from the second to the last but two."""
    count = fields.integer("num_hidden_layers")
    if count == 1:
        return (target.layers // 2,)
    first, span = 1, target.layers - 4
    return tuple(max(round(first + at * span / (count - 1)), 0) for at in range(count))


def _spec(
    fields: ConfigFields,
    inner: ConfigFields,
    own: ConfigFields,
    behind: tuple[int, ...],
    block: int,
    from_newest: bool,
) -> DflashSpec:
    _check_values(fields)
    _check_values(inner)
    filled = layer_fields(inner, "qwen3")
    layers, causal = _layers(filled, own)
    vocabulary = filled.integer("vocab_size")
    found = DflashSpec(
        layers,
        filled.integer("hidden_size"),
        vocabulary,
        fields.integer("draft_vocab_size", default=vocabulary),
        filled.number("rms_norm_eps", default=1e-6),
        behind,
        block,
        fields.integer("mask_token_id"),
        from_newest,
        causal,
        fields.number("input_embedding_scale", default=1.0),
        (False,) * len(behind),
    )
    if found.mask >= vocabulary:
        raise fields.refuse("mask_token_id", f"is none of the {vocabulary} of vocab_size")
    return found


def _check_values(fields: ConfigFields) -> None:
    for name, known in _AS_PUBLISHED.items():
        fields.known_only(name, *known)


def _layers(fields: ConfigFields, own: ConfigFields) -> tuple[tuple[LayerSpec, ...], tuple[bool, ...]]:
    """With whether each is causal: where nothing says so, one with a window is."""
    layer, count = dense_layer(fields, head_norms=True), fields.integer("num_hidden_layers")
    windowed = fields.flag("use_sliding_window", False)
    by_count = windowed and fields.has("sliding_window")
    full = fields.integer("max_window_layers", default=28) if by_count else count
    otherwise = [FULL if at < full else SLIDING for at in range(count)]
    types = layer_types(fields, FULL, SLIDING, otherwise=otherwise)
    window = None
    if SLIDING in types:
        if not windowed:
            raise fields.error(
                "use_sliding_window: false, or absent, and layer_types has layers with a window: whether they have one "
                "is not known; say true, or full_attention for each of them",
                "use_sliding_window",
            )
        window = own.optional("swa_window_size") or fields.integer("sliding_window")
    said = [
        part.flag(name, False) for part, name in ((fields, "is_causal"), (own, "causal")) if part.has(name)
    ]
    causal = tuple(said[0] if said else kind == SLIDING for kind in types)
    if any(kind == SLIDING and not one for kind, one in zip(types, causal, strict=True)):
        raise fields.error(
            "is_causal, or causal of dflash_config: false is not supported for layers with a window",
            "is_causal",
        )
    windows = [window if kind == SLIDING else None for kind in types]
    layers = tuple(replace(layer, attention=replace(layer.attention, window=one)) for one in windows)
    return layers, causal
