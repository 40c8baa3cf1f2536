"""What the planner counts of every bundled model, number for number, and of served families from their own files."""

import math
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.cli.plan.catalog import load_model
from afserve.errors import CheckpointError, ConfigError
from afserve.families.table import FAMILIES, spec_from_config
from afserve.placement.planner.perf.shape_reader import shape_from_config

CONFIGS = Path(__file__).parents[2] / "configs"
# weights on attention nodes, of the routed experts, that a token passes; cache of 32,768 tokens; FLOPs of a pair;
# activations of a token; layers by kind. A change of one of them changes what `afserve plan` prints.
NUMBERS = {
    "dbrx": (4760272896, 126835752960, 35852648448, 2684354560, 1966080, 1638400, "gqa:40"),
    "deepseek-r1": (17116626944, 653908770816, 36624596992, 1151336448, 21987328, 23025792, "mla:61"),
    "deepseek-v2": (13023150080, 222717542400, 20850769920, 1132462080, 21626880, 22402560, "mla:60"),
    "deepseek-v3.2": (17968136192, 653908770816, 37476106240, 1407188992, 22986752, 23025792, "sparse:61"),
    "deepseek-v3": (17116626944, 653908770816, 36624596992, 1151336448, 21987328, 23025792, "mla:61"),
    "glm-4.5": (16831774720, 335963750400, 32854016000, 6174015488, 9043968, 5840896, "gqa:92"),
    "glm-5": (19134283776, 724775731200, 40831942656, 1799356416, 16613376, 17182464, "sparse:78"),
    "gpt-oss-120b": (2127052800, 114661785600, 5131100160, 606339072, 1179648, 870912, "gqa:18 window:18"),
    "gpt-oss-20b": (1797488640, 19110297600, 3607142400, 404226048.0, 786432.0, 580608, "gqa:12 window:12"),
    "kimi-k2": (11721179136, 1014686023680, 31686066176, 1151336448, 10993664, 12032128, "mla:61"),
    "llama-4-maverick": (14164295680, 386547056640, 16149708800, 1409286144, 1966080, 1671168, "gqa:12 window:36"),
    "mimo-v2-flash": (5983174656, 302795194368, 14820573184, 468320256, 3932160, 2582016, "gqa:9 window:39"),
    "minimax-m1": (21222653952, 434865438720, 47172550656, 744488960, 441057280, 5939200, "gqa:10 linear:70"),
    "minimax-m2": (4008443904, 224680476672, 10415112192, 4160749568, 3047424, 2158592, "gqa:62"),
    "mixtral-8x22b": (5328470016, 135291469824, 38954729472, 3758096384, 2752512, 2293760, "gqa:56"),
    "mixtral-8x7b": (1605369856, 45097156608, 12748587008, 2147483648, 1048576, 917504, "gqa:32"),
    "qwen3-235b-a22b": (7996440576, 227096395776, 21567635456, 3154116608, 6160384, 4042752, "gqa:94"),
    "qwen3-30b-a3b": (1540882432, 28991029248, 3041656832, 1610612736, 1572864, 1081344, "gqa:48"),
    "qwen3-next-80b-a3b": (2358771712, 77309411328, 3557556224, 422412288, 113639424, 1302528, "gqa:12 linear:36"),
    "qwen3.5-397b-a17b": (9772728320, 386547056640, 16305356800, 552161280, 284098560, 2856960, "gqa:15 linear:45"),
    "step-3": (20343441408, 295950090240, 37916976128, 1023410176, 7995392, 5184512, "mfa:61"),
    "olmoe-1b-7b": (476577792, 6442450944, 1178861568, 2147483648, 262144, 327680, "gqa:16"),
    "qwen2-57b-a14b": (8083210240, 49325015040, 13704298496, 939524096, 802816, 659456, "gqa:28"),
    "ernie-4.5-300b-a47b": (11988893696, 287494373376, 47078440960, 3623878656, 3538944, 2875392, "gqa:54"),
    "hunyuan-a13b": (3608469504, 77309411328, 12747173888, 2147483648, 1048576, 917504, "gqa:32"),
    "granite-3.1-3b-a800m": (354296832, 3019898880, 882774528, 1073741824, 393216, 360448, "gqa:32"),
    "phi-3.5-moe": (1606942720, 40265318400, 6508773376, 2147483648, 1048576, 917504, "window:32"),
    "llama-4-scout": (11132600320, 96636764160, 16137912320, 1409286144, 1966080, 1671168, "gqa:12 window:36"),
    "glm-4.7-flash": (2160066560, 27783069696, 3579314176, 887095296, 3008000, 3290752, "mla:47"),
    "solar-open-100b": (6014631936, 96636764160, 11249123328, 3221225472, 3145728, 2162688, "gqa:48"),
    "dots.llm1": (7683702784, 135090143232, 13393199104, 16642998272, 2031616, 2539520, "gqa:62"),
    "hy3-preview": (8746434560, 286286413824, 20180107264, 5368709120, 5242880, 3604480, "gqa:80"),
    "k-exaone-236b-a23b": (9474146304, 227096395776, 22723952640, 814743552, 3145728, 2359296, "gqa:12 window:36"),
    "mellum2-12b-a2.5b": (1051656192, 11098128384, 2212429824, 256901120, 917504, 645120, "gqa:7 window:21"),
    "flint": (1935671296, 37849399296, 2515271680, 488147968, 1605632, 1103872, "gqa:14 window:35"),
    "laguna-xs.2": (2035482624, 31406948352, 2811428864, 702545920, 2457600, 1556480, "gqa:10 window:30"),
    "trinity-mini": (1964507136, 24159191040, 3064463360, 318767104, 1048576, 720896, "gqa:8 window:24"),
    "a.x-k1": (11638603776, 507343011840, 31603490816, 1151336448, 10993664, 12032128, "mla:61"),
    "lfm2-8b-a1b": (722972672, 7751073792, 1557639168, 201400320, 319488, 380928, "gqa:6 linear:18"),
    "gemma-4-26b-a4b": (3147071488, 22837985280, 3836248064, 440401920, 1146880, 967680, "gqa:5 window:25"),
    "mistral-small-4-119b": (3008364544, 115964116992, 6095372288, 377487360, 1916928, 2271744, "mla:36"),
    "longcat-flash-chat": (19498270720, 541165879296, 27148681216, 1056964608, 10092544, 10931200, "mla:56"),
    "longcat-flash-lite": (3322937344, 33822867456, 3977248768, 528482304, 2523136, 2770432, "mla:28"),
    "kimi-linear-48b-a3b": (2165555200, 47110422528, 3260268544, 143343616, 63545344, 1418624, "mla:7 linear:20"),
    "granite-4.0-h-tiny": (1049886720, 6039797760, 1461977088, 148732928, 84983808, 616448, "gqa:4 linear:36"),
    "nemotron-3-nano-30b-a3b": (2198224896, 29374808064, 3222847488, 113145856, 72548352, 731392, "gqa:6 linear:23"),
    "nemotron-3-super-120b-a12b": (
        7902068736, 112742891520, 12209618944, 177389568, 251920384, 2007040, "gqa:8 linear:40",
    ),
    "ling-3.0-flash": (3245703168, 120795955200, 4730748928, 151760896, 110731264, 2000768, "mla:7 linear:35"),
    "nano": (2293760, 3145728, 2162688, 15728640, 11520, 15520, "mla:5"),
}  # fmt: skip


def test_every_bundled_model_is_pinned() -> None:
    assert {*NUMBERS} == {path.stem for path in (CONFIGS / "models").glob("*.toml")} | {"nano"}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_a_plan(name: str) -> None:
    shape = load_model(name)
    flops = sum(g.layers * (g.pair_flops + g.prefill_pair_flops + g.scan_flops) for g in shape.attention)
    assert NUMBERS[name] == (
        shape.attention_elems,
        shape.expert_elems,
        shape.active_elems,
        shape.kv_elems(32768),
        flops,
        sum(group.layers * group.row_elems for group in shape.attention),
        " ".join(f"{group.kind}:{group.layers}" for group in shape.attention),
    )


GQA = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 128,
    "max_position_embeddings": 256,
}  # fmt: skip
LATENT = {
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "kv_lora_rank": 8,
    "num_local_experts": 8,
}


def test_a_served_family_is_planned_as_it_is_served() -> None:
    """Sparse steps and dense layers of Qwen3-MoE, which its own file knows and a reader of names alone does not."""
    config = {**GQA, "model_type": "qwen3_moe", "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    shape, spec = shape_from_config("q", config), spec_from_config(config)
    assert spec.moe_layer_ids == (3,)
    assert (shape.experts.layers, shape.dense_layers) == (1, 3)
    assert shape.expert_elems == spec.routed_parameters()


def test_what_the_engine_refuses_is_planned_for() -> None:
    """Activations, rotary embeddings and quantisations are the engine's business."""
    for field in (
        {"hidden_act": "gelu"},
        {"rope_scaling": {"type": "longrope"}},
        {"quantization_config": {"a": 1}},
    ):
        config = {**GQA, "model_type": "qwen3_moe", **field}
        with pytest.raises(CheckpointError, match="not supported"):
            spec_from_config(config)
        assert shape_from_config("q", config).layers == 4


def test_a_wrong_field_is_the_planners_error_in_every_family() -> None:
    for family in (*FAMILIES, "unheard_of"):
        with pytest.raises(ConfigError, match="num_hidden_layers: 0 is not a whole number"):
            shape_from_config("q", {**GQA, **LATENT, "model_type": family, "num_hidden_layers": 0})


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 9}, "gqa:2 window:2"),
        ({"layer_types": ["linear_attention"] * 3}, "gqa:1 linear:3"),
        ({"attn_type_list": [0, 1]}, "gqa:1 linear:3"),
        ({"full_attention_interval": 2}, "gqa:2 linear:2"),
        ({"attention_chunk_size": 64}, "gqa:1 window:3"),
    ],
)
def test_layers_by_the_names_of_fields(fields: dict[str, object], kinds: str) -> None:
    shape = shape_from_config("new", {**GQA, "model_type": "unheard_of", **fields})
    assert " ".join(f"{group.kind}:{group.layers}" for group in shape.attention) == kinds


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"layer_types": ["full_attention"] * 5},
            "layer_types: .* is not a list of at most num_hidden_layers, 4",
        ),
        ({"moe_layers_enum": "1,x"}, "moe_layers_enum: '1,x' is not a list of layers"),
        ({"moe_layers_enum": "7"}, "moe_layers_enum.* leave none of 4 layers with experts"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "mlp_only_layers leave none of 4 layers"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than the 8 of num_experts"),
        ({"text_config": 3}, "text_config: 3 is not an object"),
    ],
)
def test_odd_fields_of_planned_families(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=f"here: {words}|here: .*{words}"):
        shape_from_config("new", {**GQA, "model_type": "unheard_of", **fields}, source="here")


MODELS = {
    path.stem: tomllib.loads(path.read_text())["config"] for path in (CONFIGS / "models").glob("*.toml")
}
PLACES = [(model, name) for model, config in sorted(MODELS.items()) for name in config]
ODD = st.one_of(
    st.sampled_from(
        [None, True, "", "7", [], [1], {}, {"a": 1}, math.nan, math.inf, -1, 0, 10**400, 1e308, 5e-324]
    ),
    st.lists(st.one_of(st.integers(), st.text(max_size=3)), max_size=4),
    st.integers(),
    st.floats(),
)


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(PLACES), ODD)
def test_any_value_of_any_field_is_named_or_planned_for(place: tuple[str, str], value: object) -> None:
    model, name = place
    try:
        shape = shape_from_config(model, {**MODELS[model], name: value}, source="here")
    except ConfigError as error:
        assert error.message.startswith("here: ") and len(error.message) < 400
    else:
        blocks = shape.layers - shape.experts.layers - shape.dense_layers
        assert blocks == 0 or (blocks > 0 and MODELS[model]["model_type"] == "nemotron_h"), (
            "layers without FFN"
        )
        assert 0 < shape.active_elems < 2**80
