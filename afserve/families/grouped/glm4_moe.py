"""GLM-4.5 and 4.6 (`Glm4MoeForCausalLM`): a rotary embedding of half a head, sigmoid router with a selection bias; and
Solar Open (`SolarOpenForCausalLM`), which turns whole heads and has experts in every layer."""

from afserve.config_json import ConfigFields
from afserve.families.pattern.family import Family
from afserve.families.pattern.naming import Naming, PredictorNames
from afserve.families.reading.attention import gqa
from afserve.families.reading.ffn import dense_then_moe, sigmoid_groups, stack
from afserve.spec_parts import LayerSpec


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    attention = gqa(
        fields,
        theta=10000.0,
        partial=0.5,
        qk_norm="head" if fields.flag("use_qk_norm", False) else "",
        bias=fields.flag("attention_bias", False),
        out_bias=False,
    )
    moe = sigmoid_groups(fields)
    return stack(fields, attention, moe, dense_then_moe(fields, 1))


def _solar_layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    fields.known_only("use_qk_norm", False)
    fields.known_only("first_k_dense_replace", 0)
    attention = gqa(fields, theta=1e6, bias=fields.flag("attention_bias", False), out_bias=False)
    return stack(fields, attention, sigmoid_groups(fields))


FAMILY = Family(
    _layers, Naming(predictor=PredictorNames()), defaults={"rms_norm_eps": 1e-5, "n_shared_experts": 1}
)
SOLAR_OPEN = Family(
    _solar_layers, Naming(), defaults={"rms_norm_eps": 1e-5, "n_shared_experts": 1, "head_dim": 128}
)
