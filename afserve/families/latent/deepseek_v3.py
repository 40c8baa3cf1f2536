"""DeepSeek-V3 and V3.1 (`DeepseekV3ForCausalLM`): MLA, sigmoid router with a selection bias, shared expert;
GLM-4.7-Flash (`Glm4MoeLiteForCausalLM`), which names its dense layers otherwise; A.X-K1 (`AXK1ForCausalLM`), with a
norm of what experts add; and both with sparse attention, V3.2 (`DeepseekV32ForCausalLM`) and GLM-5
(`GlmMoeDsaForCausalLM`), some of whose layers attend what an earlier one chose."""

from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming, PredictorNames
from afserve.families.reading.ffn import sigmoid_groups, sparse_layers, stack
from afserve.families.reading.latent import indexed, mla
from afserve.spec_parts import LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    return stack(fields, mla(fields), sigmoid_groups(fields), sparse_layers(fields, 3))


def _lite_layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    return stack(fields, mla(fields), sigmoid_groups(fields), sparse_layers(fields, 1))


def _axk1_layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    moe = replace(sigmoid_groups(fields), normed=True)
    return stack(fields, mla(fields), moe, sparse_layers(fields, 1))


def _v32_layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    attention = indexed(fields, interleaved=False)
    return stack(fields, attention, sigmoid_groups(fields), sparse_layers(fields, 3))


def _glm5_layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    attention = indexed(fields, interleaved=True)
    return stack(fields, attention, sigmoid_groups(fields), sparse_layers(fields, 3))


_GLM = {"rms_norm_eps": 1e-5, "n_shared_experts": 1}
FAMILY = Family(_layers, Naming(predictor=PredictorNames()))
V32 = Family(_v32_layers, Naming(predictor=PredictorNames()), defaults={"n_shared_experts": 1})
GLM5 = Family(_glm5_layers, Naming(predictor=PredictorNames()), defaults=_GLM)
AXK1 = Family(
    _axk1_layers,
    Naming(correction_sometimes=True),
    defaults={"n_shared_experts": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
)
GLM4_LITE = Family(_lite_layers, Naming(predictor=PredictorNames()), defaults=_GLM)
