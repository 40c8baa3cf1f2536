"""The table of families that the engine serves, and the one way from a config.json to a shape.

A new family is a file here and a row below (docs/add-a-family.md). Families that are only planned for need no row:
`planned` reads their layers by the names of their fields.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from afserve.config import ModelSource
from afserve.config_json import Config, ConfigFields
from afserve.drafts import DraftChoice
from afserve.errors import CheckpointError, ConfigError, shown
from afserve.families import limits
from afserve.families.grouped import (
    dbrx,
    dots1,
    ernie4_5_moe,
    glm4_moe,
    granitemoe,
    hunyuan_v1_moe,
    minimax_m2,
    mixtral,
    olmoe,
    phimoe,
    qwen2_moe,
    qwen3_moe,
)
from afserve.families.hybrid import (
    bailing_hybrid,
    granitemoehybrid,
    kimi_linear,
    lfm2_moe,
    nemotron_h,
    qwen3_next,
)
from afserve.families.latent import (
    deepseek_v2,
    deepseek_v3,
    longcat_flash,
    longcat_flash_ngram,
    mistral4,
    mistral_large4,
)
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming
from afserve.families.reading import planned
from afserve.families.reading.quantization import read_coverage, read_quantization
from afserve.families.windowed import (
    afmoe,
    cohere2_moe,
    exaone_moe,
    flint,
    gemma4,
    gpt_oss,
    granitemoe_swa,
    laguna,
    llama4,
    mellum,
    mimo_v2_flash,
    minimax_m3,
    step3p7,
)
from afserve.json_file import read_object
from afserve.spec import BYTES, ModelSpec, distinct
from afserve.spec_parts import LayerSpec, TableSpec
from afserve.tiles import EncoderSpec

FAMILIES: dict[str, Family] = {
    "deepseek_v3": deepseek_v3.FAMILY,
    "kimi_k2": deepseek_v3.FAMILY,
    "deepseek_v32": deepseek_v3.V32,
    "glm_moe_dsa": deepseek_v3.GLM5,
    "deepseek_v2": deepseek_v2.FAMILY,
    "mistral4": mistral4.FAMILY,
    "mistral3": mistral4.WITH_VISION,
    "mistral_large4": mistral_large4.FAMILY,
    "longcat_flash": longcat_flash.FAMILY,
    "longcat_flash_ngram": longcat_flash_ngram.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen3_vl_moe": qwen3_moe.WITH_VISION,
    "qwen3_next": qwen3_next.FAMILY,
    "qwen3_5_moe_text": qwen3_next.QWEN3_5,
    "qwen3_5_moe": qwen3_next.QWEN3_5_WITH_VISION,
    "mixtral": mixtral.FAMILY,
    "olmoe": olmoe.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "glm4_moe_lite": deepseek_v3.GLM4_LITE,
    "axk1": deepseek_v3.AXK1,
    "solar_open": glm4_moe.SOLAR_OPEN,
    "dots1": dots1.FAMILY,
    "hy_v3": dots1.HY3,
    "exaone_moe": exaone_moe.FAMILY,
    "mellum": mellum.FAMILY,
    "flint": flint.FAMILY,
    "laguna": laguna.FAMILY,
    "afmoe": afmoe.FAMILY,
    "gemma4_text": gemma4.TEXT,
    "gemma4": gemma4.WITH_VISION,
    "lfm2_moe": lfm2_moe.FAMILY,
    "kimi_linear": kimi_linear.FAMILY,
    "bailing_hybrid": bailing_hybrid.FAMILY,
    "granitemoehybrid": granitemoehybrid.FAMILY,
    "nemotron_h": nemotron_h.FAMILY,
    "cohere2_moe": cohere2_moe.FAMILY,
    "mimo_v2_flash": mimo_v2_flash.FAMILY,
    "step3p7": step3p7.FAMILY,
    "ernie4_5_moe": ernie4_5_moe.FAMILY,
    "hunyuan_v1_moe": hunyuan_v1_moe.FAMILY,
    "granitemoe": granitemoe.FAMILY,
    "granitemoe_swa": granitemoe_swa.FAMILY,
    "phimoe": phimoe.FAMILY,
    "minimax_m2": minimax_m2.FAMILY,
    "minimax_m3_vl": minimax_m3.FAMILY,
    "dbrx": dbrx.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "llama4_text": llama4.FAMILY,
    "llama4": llama4.WITH_VISION,
}
"""config.json's `model_type` -> family."""


def load_spec(folder: str | Path) -> ModelSpec:
    """From `folder/config.json`. Raises CheckpointError naming the file and the field."""
    path = Path(folder) / "config.json"
    if not path.exists():
        raise CheckpointError(f"{path}: no such file; a model is a folder with a config.json")
    return spec_from_config(read_object(path, once=True), where=str(path))


def served_spec(source: ModelSource, draft: DraftChoice) -> ModelSpec:
    """What nodes load of `source`, with a `draft` that predicts its layer of multi-token prediction too. Raises
    CheckpointError, and ConfigError where it has no such layer."""
    spec = load_spec(source.path)
    if source.layers is not None:
        spec = spec.cut(source.layers)
    if not draft.predicts:
        return spec
    if why := _predicts_not(source, spec):
        raise ConfigError(f"--draft {draft}: {why}; --draft ngram needs no such layer", param="draft")
    names = naming_of(spec).predictor
    return spec.predicting(narrow=names is not None and names.narrow)


def _predicts_not(source: ModelSource, spec: ModelSpec) -> str:
    """Empty where it has a layer that predicts further tokens."""
    naming = naming_of(spec)
    if naming.predictor is None:
        known = ", ".join(name for name, family in FAMILIES.items() if family.naming.predictor is not None)
        return f"how a layer of multi-token prediction works is known for {known}, not for {spec.family}"
    if source.layers is not None:
        return f"the layer of multi-token prediction stands behind all layers, and --layers leaves {source.layers}"
    path = Path(source.path) / "config.json"
    fields = ConfigFields(read_object(path, once=True), str(path))
    counted = naming.predictor.field
    if counted and not fields.integer(counted, default=0):
        return f"{path}: {counted} is 0 or missing: {source.name} has no layer of multi-token prediction"
    return ""


def spec_from_config(
    config: Config, where: str = "config.json", also: Mapping[str, Family] = MappingProxyType({})
) -> ModelSpec:
    """A model that the engine can run; `also` are families that are not served. Raises CheckpointError that begins with
    `where` for any other."""
    found = also.get(str(config.get("model_type"))) or _family(config)
    if found is None:
        known = ", ".join((*also, *FAMILIES))
        named = shown(config.get("model_type") or "missing")
        raise CheckpointError(f"{where}: model_type {named} is not supported; supported: {known}")
    spec = _spec(found.config_view(ConfigFields(config, where)), found)
    limits.check(spec, where)
    return spec


def layers_of(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    """Every decoder layer, also of a family that the engine does not serve and with what it cannot run."""
    found = _family(fields.config)
    return planned.layers(fields) if found is None else found.read(found.config_view(fields))


def table_of(fields: ConfigFields) -> TableSpec | None:
    """The look-up table of a family that the engine serves and that has one."""
    found = _family(fields.config)
    return None if found is None else found.table(found.config_view(fields))


def encoder_of(fields: ConfigFields) -> EncoderSpec | None:
    """The encoder of pictures of a family that the engine serves and that has one."""
    found = _family(fields.config)
    return None if found is None else found.encoder(found.config_view(fields))


def naming_of(spec: ModelSpec) -> Naming:
    """Also of its layer of multi-token prediction, where it is one that has it; in a GGUF file experts have tensors of
    their own."""
    naming = FAMILIES[spec.family].naming
    if spec.quantization is not None and spec.quantization.gguf:
        naming = replace(naming, stacked=None, layer_count=spec.layers)
    return replace(naming, layer_count=spec.layers) if spec.predictors else naming


def _family(config: Mapping[str, object]) -> Family | None:
    name = config.get("model_type")
    return FAMILIES.get(name) if isinstance(name, str) else None


def _spec(fields: ConfigFields, family: Family) -> ModelSpec:
    kinds, pattern = distinct(family.read(fields))
    vocab_size = fields.integer("vocab_size")
    fp8_block, quantization = read_quantization(fields)
    return ModelSpec(
        family=str(fields.config["model_type"]),
        hidden=fields.integer("hidden_size"),
        vocab_size=vocab_size,
        max_position=fields.integer("max_position_embeddings"),
        eps=fields.number("rms_norm_eps", default=1e-6),
        tied=fields.flag("tie_word_embeddings", False),
        dtype=_dtype(fields),
        fp8_block=fp8_block,
        kinds=kinds,
        pattern=pattern,
        bos_ids=fields.token_ids("bos_token_id", vocab_size),
        eos_ids=fields.token_ids("eos_token_id", vocab_size),
        around=family.around(fields),
        quantization=quantization,
        coverage=read_coverage(fields),
        table=family.table(fields),
        encoder=family.encoder(fields),
    )


def _dtype(fields: ConfigFields) -> str:
    dtype = str(fields.config.get("dtype") or fields.config.get("torch_dtype") or "float32")
    if dtype not in BYTES:
        raise fields.error(f"dtype: {shown(dtype)} is not one of {', '.join(BYTES)}", "dtype")
    return dtype
