"""Models without experts (Llama, Mistral, Qwen2, Qwen3): not served, but read as draft models.

Their tensors have the names that most checkpoints use. Source: transformers' modeling files of the same `model_type`.
"""

from collections.abc import Mapping
from pathlib import Path

from afserve.config_json import ConfigFields
from afserve.errors import ConfigError
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading.attention import QkNorm, gqa
from afserve.families.reading.ffn import activation
from afserve.families.table import naming_of, spec_from_config
from afserve.json_file import read_object
from afserve.spec import ModelSpec
from afserve.spec_parts import AttentionSpec, DenseSpec, LayerSpec


def _stack(fields: ConfigFields, attention: AttentionSpec) -> tuple[LayerSpec, ...]:
    fields.known_only("mlp_bias", False)
    ffn = DenseSpec(fields.integer("intermediate_size"), activation(fields))
    return (LayerSpec(attention, ffn),) * fields.integer("num_hidden_layers")


def _of_llama(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    return _stack(fields, gqa(fields, theta=10000.0, bias=fields.flag("attention_bias", False)))


def _of_mistral(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    return _stack(fields, gqa(fields, theta=10000.0, window=fields.optional("sliding_window")))


def _of_qwen2(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    fields.known_only("use_sliding_window", False)
    return _stack(fields, gqa(fields, theta=10000.0, bias=True, out_bias=False))


def _of_qwen3(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    fields.known_only("use_sliding_window", False)
    norm: QkNorm = "head"
    return _stack(fields, gqa(fields, theta=10000.0, qk_norm=norm, bias=fields.flag("attention_bias", False)))


DENSE: Mapping[str, Family] = {
    "llama": Family(_of_llama, Naming()),
    "mistral": Family(_of_mistral, Naming()),
    "qwen2": Family(_of_qwen2, Naming()),
    "qwen3": Family(_of_qwen3, Naming()),
}
"""config.json's `model_type` -> family."""


def draft_model_spec(folder: str) -> ModelSpec:
    """Of a small model that drafts, with experts or without. Raises CheckpointError or ConfigError."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"--draft model: {path}: no such file; a draft model is a checkpoint folder with a config.json, on each "
            "attention node's host",
            param="draft",
        )
    spec = spec_from_config(read_object(path, once=True), str(path), DENSE)
    if spec.state_bytes():
        raise ConfigError(
            f"--draft model: {path}: {spec.family} has recurrent states, which do not go back to where a guess was "
            "wrong; take a draft model with attention alone",
            param="draft",
        )
    if spec.table is not None:
        raise ConfigError(
            f"--draft model: {path}: {spec.family} has a look-up table, whose rows only a target's steps are given; "
            "take a draft model without one",
            param="draft",
        )
    if spec.quantization is not None:
        raise ConfigError(
            f"--draft model: {path}: quantised draft models are not read; take a copy in bfloat16, float16 or FP8",
            param="draft",
        )
    return spec


def draft_model_naming(spec: ModelSpec) -> Naming:
    return DENSE[spec.family].naming if spec.family in DENSE else naming_of(spec)
