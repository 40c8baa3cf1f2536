"""Families as files: how long they are, which published models they read, and what is said of all others."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from afserve.cli.plan.catalog import load_model
from afserve.config import ModelSource
from afserve.errors import CheckpointError, ConfigError
from afserve.families.table import FAMILIES, load_spec, naming_of, spec_from_config
from afserve.launch.plan.footprint import role_bytes
from afserve.models.identity import role_of
from afserve.placement.planner.perf.attention import Precision
from afserve.placement.planner.perf.kv import attention_weight_bytes
from afserve.placement.planner.perf.shape_reader import shape_from_config
from afserve.tiles import PictureTile
from tests.engine.driving import config
from tests.engine.local_cluster import LocalCluster

ROOT = Path(__file__).parents[2]
FILES = sorted({family.layers.__module__.removeprefix("afserve.families.") for family in FAMILIES.values()})
MOST_LINES, MOST_OF_ODD = 66, 100
ODD = (
    "windowed.minimax_m3",
    "latent.mistral_large4",
    "windowed.gemma4",
    "windowed.step3p7",
    "windowed.mimo_v2_flash",
    "hybrid.nemotron_h",
    "hybrid.bailing_hybrid",
)  # say the same in two ways, blocks of four kinds, or a predictor by names of its own
MODELS = {
    path.stem: tomllib.loads(path.read_text())["config"] for path in (ROOT / "configs/models").glob("*.toml")
}
SERVED = sorted(name for name, fields in MODELS.items() if fields["model_type"] in FAMILIES)


@pytest.mark.parametrize("name", FILES)
def test_a_family_is_a_short_file(name):
    path = ROOT / "afserve/families" / f"{name.replace('.', '/')}.py"
    assert len(path.read_text().splitlines()) <= (MOST_OF_ODD if name in ODD else MOST_LINES)


def test_every_family_has_a_published_model():
    """But those that are text models beside a vision model, and those whose sizes are not known."""
    covered = {MODELS[name]["model_type"] for name in SERVED}
    assert covered == {*FAMILIES} - {
        "llama4",
        "qwen3_5_moe",
        "mistral3",
        "qwen3_vl_moe",
        "gemma4",
        "granitemoe_swa",
        "cohere2_moe",
        "step3p7",
        "minimax_m3_vl",
        "mistral_large4",
    }


@pytest.mark.parametrize("name", SERVED)
def test_published_models_are_read_and_planned(name, tmp_path):
    """As a config.json: the engine's shape, and the planner's from the same file."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    shape = load_model(str(tmp_path))
    assert shape.total_elems == load_model(name).total_elems
    spec = load_spec(tmp_path)
    attending = sum(spec.layer(layer).attention.kind != "none" for layer in range(spec.layers))
    assert attending == shape.layers and spec.routed_parameters() == shape.expert_elems


@pytest.mark.parametrize(
    ("name", "field", "value", "known"),
    [
        ("deepseek-v3", "scoring_func", "softmax", '"sigmoid"'),
        ("kimi-k2", "topk_method", "greedy", '"noaux_tc"'),
        ("deepseek-r1", "moe_layer_freq", 2, "1"),
        ("deepseek-r1", "moe_layer_freq", True, "1"),
        ("deepseek-v2", "scoring_func", "sigmoid", '"softmax"'),
        ("deepseek-v2", "norm_topk_prob", True, "false"),
        ("deepseek-v2", "topk_method", ["greedy"], '"greedy", "group_limited_greedy"'),
        ("glm-4.5", "scoring_func", "tanh", '"sigmoid"'),
        ("minimax-m2", "scoring_func", "softmax", '"sigmoid"'),
        ("minimax-m2", "use_qk_norm", False, "true"),
        ("hunyuan-a13b", "use_cla", True, "false"),
        ("gemma-4-26b-a4b", "hidden_size_per_layer_input", 256, "0"),
        ("gemma-4-26b-a4b", "num_kv_shared_layers", 4, "0"),
        ("gemma-4-26b-a4b", "hidden_activation", "silu", '"gelu_pytorch_tanh"'),
        ("trinity-mini", "score_func", "softmax", '"sigmoid"'),
        ("trinity-mini", "n_group", 4, "1"),
        ("laguna-xs.2", "moe_apply_router_weight_on_input", True, "false"),
        ("laguna-xs.2", "moe_router_logit_softcapping", 30.0, "0.0, 0"),
        ("hunyuan-a13b", "use_qk_norm", False, "true"),
        ("hunyuan-a13b", "use_mixed_mlp_moe", False, "true"),
        ("longcat-flash-chat", "zero_expert_type", "copy", '"identity"'),
        ("longcat-flash-chat", "mla_scale_kv_lora", False, "true"),
        ("ling-3.0-flash", "no_kda_lora", False, "true"),
        ("ling-3.0-flash", "gated_attention_proj_granularity_type", "element_wise", '"head_wise"'),
        ("ling-3.0-flash", "score_function", "softmax", '"sigmoid"'),
    ],
)
def test_a_variant_that_no_kernel_computes_is_refused_by_its_field(name, field, value, known):
    """transformers passes these fields over; who sets them means other arithmetic."""
    with pytest.raises(CheckpointError) as refused:
        spec_from_config({**MODELS[name], field: value})
    said = refused.value.message
    assert said == f"config.json: {field}: {value!r} is not supported; supported: {known}"


@pytest.mark.parametrize(
    ("name", "experts", "heads", "groups"), [("kimi-k2", 384, 64, 1), ("deepseek-r1", 256, 128, 8)]
)
def test_models_with_the_layout_of_deepseek_v3(name, experts, heads, groups):
    spec, v3 = spec_from_config(MODELS[name]), spec_from_config(MODELS["deepseek-v3"])
    assert naming_of(spec) == naming_of(v3)
    assert (spec.experts, spec.layer(60).attention.heads, spec.moe.groups) == (experts, heads, groups)
    assert spec.layer(60).attention.kv_lora_rank == 512 and spec.moe.correction_bias
    assert spec.layers == 61 and spec.hidden == v3.hidden


def test_limits_of_ling_are_those_of_each_layer():
    """Lists may go on beyond the layers, for one of multi-token prediction. transformers passes them over."""
    config = MODELS["ling-3.0-flash"]
    longer = {name: [*value, 9] for name, value in config.items() if name.endswith("swiglu_limit_list")}
    assert len(longer) == 2
    for fields in (config, config | longer):
        spec = spec_from_config(fields)
        each = [spec.layer(layer).moe for layer in range(spec.layers)]
        found = [(moe.activation, moe.limit, moe.shared_limit) for moe in each if moe]
        last = [("silu", None, 5.0), *[("bounded_swiglu", 4.0, 5.0)] * 5, *[("bounded_swiglu", 4.0, 7.0)] * 2]
        assert found == [("silu", None, None)] * 32 + last


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"architectures": ["BailingMoeV2_5ForCausalLM"]},
            "architectures: .* is Ling 2.5, which is not supported",
        ),
        (
            {"layer_group_size": 5},
            "layer_group_size: 5 does not divide num_hidden_layers 42; add layer_types",
        ),
        ({"expert_swiglu_limit_list": [0] * 41}, "expert_swiglu_limit_list: .* num_hidden_layers 42"),
        ({"share_expert_swiglu_limit_list": [5] * 42}, "share_expert_swiglu_limit_list: .* without experts"),
    ],
)
def test_what_ling_refuses(fields, words):
    with pytest.raises(CheckpointError, match=words):
        spec_from_config(MODELS["ling-3.0-flash"] | fields)


QWEN3_5_VISION = {"out_hidden_size": 4096}  # the others are those of the family
SCOUT_VISION = {
    "hidden_size": 1408, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14, "pixel_shuffle_ratio": 0.5, "projector_input_dim": 4096,
    "projector_output_dim": 4096, "vision_output_dim": 4096, "rope_theta": 10000, "hidden_act": "gelu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"image_size": 337}, "vision_config: image_size: 337 is not a multiple of 2 . patch_size 14"),
        ({"intermediate_size": 5633}, "intermediate_size: 5633 is not 4 times hidden_size 1408"),
        ({"num_attention_heads": 15}, "hidden_size: 1408 is not a multiple of 4 . num_attention_heads 15"),
        ({"vision_output_dim": 7680}, "vision_output_dim: 7680 is not projector_output_dim 4096"),
        ({"pixel_shuffle_ratio": 0.25}, "pixel_shuffle_ratio: 0.25 is not supported; supported: 0.5"),
    ],
)
def test_what_llama4s_encoder_refuses(fields, words):
    text = MODELS["llama-4-scout"]
    with pytest.raises(CheckpointError, match=words):
        spec_from_config(
            {"model_type": "llama4", "text_config": text, "vision_config": SCOUT_VISION | fields}
        )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"out_hidden_size": 3584},
            "vision_config: out_hidden_size: 3584 is not the text model's hidden_size",
        ),
        ({"num_position_embeddings": 2300}, "num_position_embeddings: 2300 is not a square"),
        ({"num_heads": 15}, "hidden_size: 1152 is not a multiple of 4 . num_heads 15"),
        ({"deepstack_visual_indexes": [8, 16]}, "deepstack_visual_indexes: .8, 16. is not supported"),
    ],
)
def test_what_qwen3_5s_encoder_refuses(fields, words):
    text = MODELS["qwen3.5-397b-a17b"]
    with pytest.raises(CheckpointError, match=words):
        spec_from_config(
            {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": QWEN3_5_VISION | fields}
        )


def test_llama4_beside_a_vision_model():
    text = MODELS["llama-4-scout"]
    spec = spec_from_config(
        {
            "model_type": "llama4",
            "text_config": text,
            "vision_config": SCOUT_VISION,
            "image_token_index": 200092,
        }
    )
    assert spec.hidden == 5120 and spec.layers == 48
    tile = PictureTile(0, 336, bytes(338_688))
    assert spec.encoder is not None and not spec.encoder.fault(tile) and spec.encoder.row_count(tile) == 144
    assert round(spec.encoder_parameters() / 1e6) == 872
    source = ModelSource("", "scout", dtype="bfloat16")
    seeing, blind = (
        role_bytes(one, source, "int8", "int8")[0] for one in (spec, replace(spec, encoder=None))
    )
    assert seeing - blind == 2 * spec.encoder_parameters(), "never rounded"
    assert naming_of(spec).embedding == "language_model.model.embed_tokens.weight"


def test_qwen3_5_beside_a_vision_model():
    text = MODELS["qwen3.5-397b-a17b"]
    config = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": QWEN3_5_VISION}
    spec, shape = spec_from_config(config), shape_from_config("seeing", config)
    assert spec.encoder == shape.encoder and round(spec.encoder_parameters() / 1e6) == 456
    tall, wide = 1080 // 32 * 32, 1920
    assert spec.encoder.row_count(PictureTile(0, wide, bytes(3 * tall * wide))) == 33 * 60
    blind = replace(shape, encoder=None)
    taken = [attention_weight_bytes(one, Precision(), 4) for one in (shape, blind)]
    assert taken[0] - taken[1] == 2 * spec.encoder_parameters(), "whole on one device, in bfloat16"
    assert spec.hidden == 4096 and [spec.layer(i).attention.kind for i in range(4)] == ["linear"] * 3 + [
        "gqa"
    ]
    naming = naming_of(spec)
    assert naming.embedding == "model.language_model.embed_tokens.weight" and naming.head == "lm_head.weight"


def test_mistral_4_beside_a_vision_model():
    text = MODELS["mistral-small-4-119b"]
    spec = spec_from_config({"model_type": "mistral3", "text_config": text, "vision_config": {"depth": 7}})
    assert spec.layer(0).attention.temperature == (8192, 0.1, 0) and spec.moe.shared_inner == 2048
    naming = naming_of(spec)
    assert naming.embedding == "language_model.model.embed_tokens.weight"
    assert naming.head == "language_model.lm_head.weight"
    with pytest.raises(CheckpointError) as refused:
        spec_from_config({"model_type": "mistral3", "text_config": {**text, "model_type": "mistral"}})
    assert str(refused.value) == (
        "config.json: text_config: model_type: 'mistral' is not supported; supported: mistral4"
    )


def test_gemma_4_beside_a_vision_model():
    text = MODELS["gemma-4-26b-a4b"]
    spec = spec_from_config({"model_type": "gemma4", "text_config": text, "vision_config": {"depth": 7}})
    narrow, full = spec.layer(0).attention, spec.layer(5).attention
    assert (narrow.head_dim, narrow.kv_heads, narrow.window, narrow.value_of_key) == (256, 8, 1024, False)
    assert (full.head_dim, full.kv_heads, full.window, full.value_of_key) == (512, 2, None, True)
    naming = naming_of(spec)
    assert naming.embedding == "model.language_model.embed_tokens.weight" and spec.tied
    assert naming.router(3) == "model.language_model.layers.3.router.proj.weight"


@pytest.mark.parametrize(
    "name",
    ["gpt_oss", "granitemoe", "granitemoe_swa", "dbrx", "llama4_text", "mistral3", "gemma4", "qwen3_vl_moe"],
)
def test_stacked_experts_are_read_by_expert_nodes(name):
    naming = FAMILIES[name].naming
    stacked = naming.stacked
    names = [naming.in_moe(3, part) for part in (stacked.gate_up, stacked.down, stacked.up) if part]
    assert {role_of(part) for part in names} == {"expert"}
    assert role_of(naming.router(3)) == role_of(naming.embedding) == "attention"


def test_the_supported_families_are_listed():
    with pytest.raises(
        CheckpointError, match="model_type 'step3p5' is not supported; supported: " + ", ".join(FAMILIES)
    ):
        spec_from_config({"model_type": "step3p5"})


@pytest.mark.parametrize(
    ("model", "field", "value", "words"),
    [
        ("gpt-oss-120b", "quantization_config", {"quant_method": "quark"}, "method 'quark' is not supported"),
        ("gpt-oss-120b", "hidden_act", "gelu", "hidden_act: 'gelu' is not silu"),
        ("minimax-m2", "attn_type_list", [0] * 62, "attn_type_list: .* has layers other than 1"),
        ("hunyuan-a13b", "moe_topk", [8] * 31 + [4], "moe_topk: .* is not the same for all layers"),
        ("phi-3.5-moe", "num_experts_per_tok", 4, "num_experts_per_tok: 4 is not 2"),
        (
            "qwen3-next-80b-a3b",
            "linear_num_key_heads",
            5,
            r"linear_num_key_heads: 5 for 32 value heads is not supported; supported: a divisor .*layer 0",
        ),
        (
            "qwen3-next-80b-a3b",
            "linear_conv_kernel_dim",
            1,
            r"convolution of 1 tokens \(linear_conv_kernel_dim, ",
        ),
        ("qwen3.5-397b-a17b", "attn_output_gate", False, "attn_output_gate: False is not true"),
        (
            "qwen3-next-80b-a3b",
            "layer_types",
            ["full_attention", "mamba"],
            "layer_types: .* for each of 48 layers",
        ),
        ("glm-4.5", "partial_rotary_factor", 0.01, "partial_rotary_factor: 1 of 128 numbers"),
        (
            "llama-4-scout",
            "no_rope_layers",
            [1, 0],
            "no_rope_layers: .* is not 0 or 1 for each layer of num_hidden_layers 48",
        ),
        (
            "mimo-v2-flash",
            "swa_num_key_value_heads",
            5,
            "swa_num_key_value_heads.*: 5 does not divide the 64",
        ),
        ("mimo-v2-flash", "swa_v_head_dim", 64, "swa_v_head_dim: 64 is not supported; supported: 128"),
        (
            "dots.llm1",
            "scoring_func",
            "softmax",
            'scoring_func: .softmax. is not supported; supported: "sigmoid"',
        ),
        ("dbrx", "d_model", -1, r"hidden_size: -1 is not .* \(hidden_size is d_model here\)"),
    ],
)
def test_what_is_not_served_is_named(model, field, value, words):
    with pytest.raises(CheckpointError, match=words):
        spec_from_config({**MODELS[model], field: value})


def test_a_block_that_does_not_divide_a_chunk(checkpoint):
    source = ModelSource(str(checkpoint("llama4")), "llama4")
    with pytest.raises(
        ConfigError, match="block_size: 12 tokens do not divide the 16 of the model's attention_chunk"
    ):
        LocalCluster.build(source, config(block_size=12))
