"""Numbers of config.json and generation_config.json from extreme to extreme: refused by name, or planned for soon."""

import json
import math
import resource

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afserve.cli.main import run
from afserve.cli.plan.catalog import load_model
from afserve.config import ModelSource
from afserve.config_ranges import RANGES
from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import CheckpointError, ConfigError, DoesNotFitError
from afserve.families.table import FAMILIES, load_spec
from afserve.launch.plan.machine import Machine
from afserve.launch.plan.topology import choose
from afserve.launch.plan.wishes import Wishes
from afserve.server.bodies.sampling import RECOMMENDED, model_defaults
from afserve.spec import ModelSpec
from tests.work import Calls

COMMON = {
    "vocab_size": 211, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "intermediate_size": 80, "rms_norm_eps": 1e-6, "num_experts_per_tok": 3,
    "eos_token_id": 1, "bos_token_id": [0],
    "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.8, "attention_factor": 1.0,
    },
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
LATENT = {
    **COMMON, "q_lora_rank": 28, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16,
    "n_routed_experts": 12, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
}  # fmt: skip
CONFIGS = {
    "deepseek_v3": LATENT,
    "deepseek_v2": {**LATENT, "topk_method": "group_limited_greedy"},
    "qwen3_moe": {
        **COMMON, "num_experts": 12, "moe_intermediate_size": 24, "head_dim": 16, "decoder_sparse_step": 1,
        "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 20,
    },
    "mixtral": {**COMMON, "num_local_experts": 12, "sliding_window": 20},
    "olmoe": {**COMMON, "num_experts": 12, "clip_qkv": 2.5},
    "qwen2_moe": {
        **COMMON, "num_experts": 12, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 1, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 20,
        "max_window_layers": 2,
    },
    "qwen3_next": {
        **COMMON, "num_experts": 12, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "head_dim": 16,
        "decoder_sparse_step": 1, "mlp_only_layers": [1], "full_attention_interval": 2, "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    },
    "glm4_moe": {
        **COMMON, "head_dim": 16, "n_routed_experts": 12, "moe_intermediate_size": 24, "n_shared_experts": 1,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
    },
    "ernie4_5_moe": {
        **COMMON, "moe_num_experts": 12, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 1, "moe_norm_min": 1e-12,
    },
    "hunyuan_v1_moe": {**COMMON, "num_experts": 12, "moe_topk": [3, 3, 3], "head_dim": 16},
    "granitemoe": {
        **COMMON, "num_local_experts": 12, "attention_multiplier": 0.2, "residual_multiplier": 0.3,
        "embedding_multiplier": 12.0, "logits_scaling": 6.0,
    },
    "phimoe": {
        **COMMON, "num_experts_per_tok": 2, "num_local_experts": 12, "sliding_window": 20, "router_jitter_noise": 0.01,
    },
    "minimax_m2": {**COMMON, "num_local_experts": 12, "head_dim": 16, "rotary_dim": 8, "attn_type_list": [1, 1, 1]},
    "dbrx": {
        "d_model": 48, "n_heads": 4, "n_layers": 3, "max_seq_len": 256, "vocab_size": 211, "rope_theta": 1e4,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 12, "moe_top_k": 3, "moe_normalize_expert_weights": 1},
    },
    "gpt_oss": {
        **COMMON, "num_local_experts": 12, "head_dim": 16, "sliding_window": 20, "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "llama4_text": {
        **COMMON, "num_local_experts": 12, "head_dim": 16, "intermediate_size_mlp": 56, "attention_chunk_size": 32,
        "interleave_moe_layer_step": 2, "no_rope_layers": [1, 1, 0], "floor_scale": 64, "attn_scale": 0.1,
    },
    "dots1": {
        **COMMON, "head_dim": 16, "n_routed_experts": 12, "moe_intermediate_size": 24, "n_shared_experts": 1,
        "sliding_window": 20, "max_window_layers": 2, "first_k_dense_replace": 1,
    },
    "exaone_moe": {
        **COMMON, "head_dim": 16, "num_experts": 12, "moe_intermediate_size": 24, "num_shared_experts": 1,
        "sliding_window": 20, "sliding_window_pattern": 2, "n_group": 4, "topk_group": 2,
    },
    "hy_v3": {
        **COMMON, "head_dim": 16, "num_experts": 12, "moe_intermediate_size": 24, "num_shared_experts": 1,
        "router_scaling_factor": 2.8, "first_k_dense_replace": 1,
    },
    "mellum": {**COMMON, "head_dim": 16, "num_experts": 12, "moe_intermediate_size": 24, "sliding_window": 20},
    "flint": {
        **COMMON, "head_dim": 16, "num_experts": 12, "moe_intermediate_size": 24, "sliding_window": 20,
        "shared_expert_intermediate_size": 40, "mlp_only_layers": [1], "decoder_sparse_step": 1,
    },
    "afmoe": {
        **COMMON, "head_dim": 16, "num_experts": 12, "moe_intermediate_size": 24, "num_shared_experts": 1,
        "sliding_window": 20, "num_dense_layers": 1, "route_scale": 2.8, "global_attn_every_n_layers": 2,
    },
    "laguna": {
        **COMMON, "head_dim": 16, "num_experts": 12, "moe_intermediate_size": 24, "sliding_window": 20,
        "shared_expert_intermediate_size": 40, "num_attention_heads_per_layer": [4, 6, 2],
        "moe_routed_scaling_factor": 2.5,
    },
    "cohere2_moe": {
        **COMMON, "head_dim": 16, "num_experts": 12, "sliding_window": 20, "sliding_window_pattern": 2,
        "num_shared_experts": 1, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 80, "logit_scale": 0.5,
    },
    "lfm2_moe": {
        **COMMON, "num_experts": 12, "moe_intermediate_size": 24, "num_dense_layers": 1, "routed_scaling_factor": 1.5,
        "norm_eps": 1e-5, "conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"],
    },
    "kimi_linear": {
        **COMMON, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16,
        "num_experts": 12, "num_experts_per_token": 3, "moe_intermediate_size": 24, "num_shared_experts": 1,
        "num_expert_group": 1, "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "model_max_length": 256,
        "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2], "head_dim": 8, "num_heads": 4,
                               "short_conv_kernel_size": 4},
    },
    "bailing_hybrid": {
        **COMMON, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16, "head_dim": 8,
        "num_experts": 12, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 32,
        "num_shared_experts": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1, "layer_group_size": 3, "short_conv_kernel_size": 4, "kda_lower_bound": -5.0,
        "expert_swiglu_limit_list": [0, 0, 4.0], "share_expert_swiglu_limit_list": [0, 5.0, 0],
    },
    "granitemoehybrid": {
        **COMMON, "num_local_experts": 12, "attention_multiplier": 0.2, "residual_multiplier": 0.3,
        "embedding_multiplier": 12.0, "logits_scaling": 6.0, "shared_intermediate_size": 32, "mamba_n_heads": 8,
        "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_head": 12, "mamba_d_conv": 4, "mamba_expand": 2,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "nemotron_h": {
        **COMMON, "layers_block_type": ["linear_attention", "moe", "full_attention"], "head_dim": 16,
        "mamba_num_heads": 8, "mamba_head_dim": 12, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4,
        "n_routed_experts": 12, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 32,
        "moe_latent_size": 20, "n_group": 2, "topk_group": 1,
        "routed_scaling_factor": 2.5, "layer_norm_epsilon": 1e-5, "n_shared_experts": 1,
    },
    "gemma4_text": {
        **COMMON, "head_dim": 16, "global_head_dim": 20, "num_experts": 12, "moe_intermediate_size": 24,
        "top_k_experts": 3, "sliding_window": 20, "num_global_key_value_heads": 1, "final_logit_softcapping": 30.0,
        "enable_moe_block": True, "hidden_size_per_layer_input": 0,
    },
    "step3p7": {"text_config": {
        **COMMON, "head_dim": 16, "n_routed_experts": 12, "moe_intermediate_size": 24, "share_expert_dim": 32,
        "sliding_window": 20, "num_sliding_attention_heads": 6, "moe_router_scaling_factor": 3.0,
        "swiglu_limits": [0, 0, 7.0], "swiglu_limits_shared": [0, 16.0, 0],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    }},
    "mimo_v2_flash": {
        **COMMON, "head_dim": 16, "v_head_dim": 12, "n_routed_experts": 12, "moe_intermediate_size": 24,
        "sliding_window_size": 20, "swa_num_key_value_heads": 4, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.5,
        "attention_value_scale": 0.7, "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1],
    },
}  # fmt: skip
CONFIGS["longcat_flash"] = {
    **{name: LATENT[name] for name in LATENT if name not in ("num_hidden_layers", "num_experts_per_tok")},
    "num_layers": 2, "ffn_hidden_size": 80, "expert_ffn_hidden_size": 24, "moe_topk": 3, "zero_expert_num": 4,
}  # fmt: skip
CONFIGS["longcat_flash_ngram"] = CONFIGS["longcat_flash"] | {
    "emb_neighbor_num": 3, "emb_split_num": 2, "ngram_vocab_size_ratio": 1.5,
}  # fmt: skip
CONFIGS["solar_open"] = CONFIGS["glm4_moe"] | {"first_k_dense_replace": 0}
CONFIGS["glm4_moe_lite"] = CONFIGS["deepseek_v3"]
CONFIGS["granitemoe_swa"] = CONFIGS["granitemoe"] | {"sliding_window": 20, "layer_rope_theta": [0, 1e4, 1e5]}
CONFIGS["deepseek_v32"] = LATENT | {"index_n_heads": 6, "index_head_dim": 16, "index_topk": 8}
CONFIGS["glm_moe_dsa"] = CONFIGS["deepseek_v32"] | {"index_topk_freq": 2, "index_skip_topk_offset": 1}
CONFIGS["kimi_k2"] = CONFIGS["deepseek_v3"]
CONFIGS["axk1"] = CONFIGS["deepseek_v3"]
CONFIGS["mistral4"] = LATENT | {"rope_parameters": COMMON["rope_parameters"] | {"llama_4_scaling_beta": 0.1}}
CONFIGS["mistral_large4"] = {"text_config": CONFIGS["deepseek_v32"] | {"q_lora_rank": None, "n_group": 2}}
CONFIGS["mistral3"] = {"text_config": {**CONFIGS["mistral4"], "model_type": "mistral4"}}
CONFIGS["minimax_m3_vl"] = {"text_config": {
    **COMMON, "num_local_experts": 12, "head_dim": 16, "rotary_dim": 8, "dense_intermediate_size": 80,
    "shared_intermediate_size": 32, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "index_n_heads": 2,
    "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 3, "index_local_blocks": 1,
    "routed_scaling_factor": 2.0,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}}  # fmt: skip
CONFIGS["qwen3_vl_moe"] = {"text_config": CONFIGS["qwen3_moe"]}
CONFIGS["gemma4"] = CONFIGS["gemma4_text"]
CONFIGS["llama4"] = CONFIGS["llama4_text"] | {
    "image_token_index": 7,
    "vision_config": {
        "image_size": 24, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "projector_input_dim": 12, "projector_output_dim": 12, "vision_output_dim": 12,
    },
}  # fmt: skip
CONFIGS["qwen3_5_moe_text"] = CONFIGS["qwen3_next"]
CONFIGS["qwen3_5_moe"] = CONFIGS["qwen3_next"] | {
    "image_token_id": 7,
    "vision_config": {
        "depth": 2, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 4,
        "num_position_embeddings": 25, "out_hidden_size": CONFIGS["qwen3_next"]["hidden_size"],
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip
OWN_NAMES = {"longcat_flash", "longcat_flash_ngram"}
"""Their layers are counted by another name, each being two of ours: the planner reads them as these families alone."""
MACHINE = Machine(8, 64 << 30, 64 << 30, "")
MOST_CALLS = 5_000_000
PLACES = {
    family: [(name,) for name, value in config.items() if not isinstance(value, dict | str | bool)]
    + [
        (section, name)
        for section, inner in config.items()
        if isinstance(inner, dict)
        for name, value in inner.items()
        if not isinstance(value, str)
    ]
    for family, config in CONFIGS.items()
}
HUGE = 10**400
NUMBERS = st.one_of(
    st.sampled_from(
        [math.nan, math.inf, -math.inf, 5e-324, -5e-324, 2.3e-308, 1e-320, 1.8e308, 1e308, -1e308, 0.0]
    ),
    st.sampled_from([0, -0.0, 1, -1, 2, 3, 2**31, 2**32, 2**53, 2**63, 2**64, 10**9, 10**12, HUGE, -HUGE]),
    st.builds(lambda power, delta: 2**power + delta, st.integers(0, 70), st.integers(-1, 1)),
    st.integers(),
    st.floats(),
    st.integers(1, 5000),
)
WRONG = st.sampled_from(
    [None, True, False, "", "48", "nan", [], [1], [[]], {}, {"a": 1}, [HUGE], [math.nan], ["x"]]
)


def odd(draw: st.DrawFn, config: dict, place: tuple[str, ...]) -> dict:
    """The config with another value at one place."""
    value = draw(st.one_of(NUMBERS, WRONG, st.lists(NUMBERS, max_size=3)))
    if len(place) == 1:
        return {**config, place[0]: value}
    return {**config, place[0]: {**config[place[0]], place[1]: value}}


@st.composite
def configs(draw: st.DrawFn, planned: bool = False) -> tuple[dict, list[str]]:
    """A config with one or two odd numbers, and the names of their fields. Where it is `planned`, of a family that
    only the planner knows: it is read by the names of the same fields."""
    family = draw(st.sampled_from(sorted(FAMILIES.keys() - OWN_NAMES if planned else FAMILIES)))
    config = {"model_type": "unheard_of" if planned else family, **CONFIGS[family]}
    places = draw(st.lists(st.sampled_from(PLACES[family]), min_size=1, max_size=2, unique=True))
    for place in places:
        config = odd(draw, config, place)
    return config, [place[-1] for place in places]


def load(folder, config) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return load_spec(folder)


def check_engine(folder, config, names) -> None:
    with Calls() as calls:
        plan_engine(folder, config, names)
    assert calls.made < MOST_CALLS


def plan_engine(folder, config, names) -> None:
    try:
        spec = load(folder, config)
    except (CheckpointError, ConfigError) as error:
        assert any(name in error.message for name in names), error.message
        assert str(folder / "config.json") in error.message and len(error.message) < len(str(folder)) + 400
        return
    turned = [kind.attention.rope for kind in spec.kinds if kind.attention.rope]
    numbers = [spec.eps, spec.moe.scale, *(n for rope in turned for n in (rope.theta, rope.factor))]
    assert all(math.isfinite(n) and n > 0 for n in numbers)
    source = ModelSource(str(folder), "odd")
    try:
        found = choose(spec, source, MACHINE, Wishes())
        assert found.attention.total + found.expert.total < MACHINE.memory
    except (DoesNotFitError, ConfigError):
        pass


def check_planner(folder, config, names) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    try:
        shape = load_model(str(folder))
    except ConfigError as error:
        assert any(name in error.message for name in names), error.message
        assert str(folder / "config.json") in error.message and len(error.message) < len(str(folder)) + 400
        return
    assert shape.experts.layers + shape.dense_layers <= RANGES["num_hidden_layers"].high
    assert 0 < shape.expert_elems < 2**80 and 0 < shape.attention_elems < 2**80


def slightly_odd(check, folder) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    check()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 512 << 10, f"{grown >> 10} MiB more than before"


COMMONLY = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@pytest.mark.slow
def test_the_configs_are_good(tmp_path):
    for family, config in CONFIGS.items():
        spec = load(tmp_path, {"model_type": family, **config})
        plan = choose(spec, ModelSource(str(tmp_path), family), MACHINE, Wishes())
        assert plan.attention.total > 0 and plan.expert.total > 0, family
        assert load_model(str(tmp_path)).experts.layers == spec.moe_layers, family


@pytest.mark.slow
def test_families_that_only_the_planner_knows(tmp_path):
    unread = set()
    for family, config in CONFIGS.items():
        (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
        try:
            assert load_model(str(tmp_path)).experts.layers > 0, family
        except ConfigError as error:
            assert "none of num_hidden_layers, n_layers is there" in error.message
            unread.add(family)
    assert unread == OWN_NAMES


@pytest.mark.slow
@pytest.mark.parametrize(
    "examples", [100, pytest.param(20_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_any_number_is_named_or_planned_for(tmp_path, examples):
    @settings(max_examples=examples, **COMMONLY)
    @given(configs())
    def check(drawn):
        check_engine(tmp_path, *drawn)

    slightly_odd(check, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "examples", [100, pytest.param(20_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_any_number_is_named_or_a_shape_for_the_planner(tmp_path, examples):
    @settings(max_examples=examples, **COMMONLY)
    @given(st.booleans().flatmap(configs))
    def check(drawn):
        check_planner(tmp_path, *drawn)

    slightly_odd(check, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "examples", [10, pytest.param(500, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_plan_ends_with_an_answer_or_one_line(tmp_path, examples, capsys):
    @settings(max_examples=examples, **COMMONLY)
    @given(configs())
    def check(drawn):
        (tmp_path / "config.json").write_text(json.dumps(drawn[0]))
        code = run(["plan", "--model", str(tmp_path), "--pool", "h800=8"])
        printed = capsys.readouterr()
        assert code == 0 or (code == 2 and printed.err.startswith("error: "))

    check()


NAMED = [
    ("rms_norm_eps", math.nan), ("rms_norm_eps", 0), ("rms_norm_eps", 1e-320), ("rms_norm_eps", 2.0),
    ("routed_scaling_factor", 1e308), ("routed_scaling_factor", -1), ("num_hidden_layers", 10**9),
    ("num_hidden_layers", 10**12), ("vocab_size", 2**25), ("n_routed_experts", 2**17), ("hidden_size", 2**21),
    ("eos_token_id", 211), ("bos_token_id", -1), ("qk_rope_head_dim", 7), ("max_position_embeddings", 2**40),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), NAMED)
def test_what_used_to_be_served(tmp_path, name, value):
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path, {"model_type": "deepseek_v3", **LATENT, name: value})


def test_layers_that_are_not_there_are_missed_by_the_familys_own_name(tmp_path):
    config = {"model_type": "longcat_flash", **CONFIGS["longcat_flash"], "num_layers": None}
    config.pop("num_hidden_layers", None)
    with pytest.raises(CheckpointError, match="num_layers: missing"):
        load(tmp_path, config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("factor", math.nan),
        ("factor", 0),
        ("rope_theta", 0),
        ("rope_theta", -5),
        ("beta_fast", 5e-324),
        ("mscale", math.inf),
    ],
)
def test_rotary_numbers(tmp_path, name, value):
    rope = {**COMMON["rope_parameters"], name: value}
    with pytest.raises(CheckpointError, match=f"rope_parameters: {name}: "):
        load(tmp_path, {"model_type": "qwen3_moe", **CONFIGS["qwen3_moe"], "rope_parameters": rope})


def test_more_experts_than_can_be_placed(tmp_path):
    config = {**LATENT, "model_type": "deepseek_v3", "num_hidden_layers": 4096, "n_routed_experts": 1024}
    with pytest.raises(
        CheckpointError, match=r"num_hidden_layers, n_routed_experts.* 4095 layers of 1024 experts"
    ):
        load(tmp_path, config)


@settings(max_examples=600, **COMMONLY)
@given(st.sampled_from(RECOMMENDED), st.one_of(NUMBERS, WRONG))
def test_what_generation_config_recommends(tmp_path, name, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    try:
        params = model_defaults(tmp_path)
    except ConfigError as error:
        assert "generation_config.json" in error.message and name in error.message
        assert error.exit_code == 2
    else:
        assert value is None or math.isfinite(getattr(params, name))
        assert isinstance(params, SamplingParams)
