"""Every bundled model adds up to its published size, and Step-3's published cost table comes out."""

import tomllib
from pathlib import Path

import pytest

from afserve.cli.plan.catalog import load_hardware, load_model
from afserve.errors import ConfigError
from afserve.placement.planner.perf.shape_reader import shape_from_config
from bench.planner_theory import theoretical_cost

MODELS = Path(__file__).parents[2] / "configs/models"
# billions of parameters: total, active; published by each model's makers
SIZES = {
    "deepseek-v3": (671, 37), "deepseek-r1": (671, 37), "deepseek-v3.2": (671, 37), "deepseek-v2": (236, 21),
    "kimi-k2": (1026, 32), "qwen3-235b-a22b": (235, 22), "qwen3-30b-a3b": (30.5, 3.3), "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (141, 39), "dbrx": (132, 36),
    "gpt-oss-120b": (117, 5.1), "gpt-oss-20b": (20.9, 3.6), "glm-4.5": (355, 32),
    "glm-5": (744, 40), "minimax-m1": (456, 45.9), "minimax-m2": (230, 10), "step-3": (316, 38),
    "llama-4-maverick": (400, 17), "qwen3.5-397b-a17b": (397, 17), "olmoe-1b-7b": (6.92, 1.28),
    "qwen2-57b-a14b": (57.4, 14), "ernie-4.5-300b-a47b": (300, 47), "hunyuan-a13b": (80, 13),
    "phi-3.5-moe": (41.9, 6.6), "llama-4-scout": (109, 17),
    "mimo-v2-flash": (309, 15),
    "qwen3-next-80b-a3b": (80, 3.56),  # 3 active without embedding and head, 0.62 together
    "solar-open-100b": (102.6, 12), "dots.llm1": (142, 14), "hy3-preview": (295, 21), "k-exaone-236b-a23b": (236, 23),
    "flint": (39.8, 2.5),
    "laguna-xs.2": (33, 3), "trinity-mini": (26, 3), "a.x-k1": (519, 33),
    "mistral-small-4-119b": (119, 6.5), "longcat-flash-chat": (560, 27),
    "longcat-flash-lite": (68.5, 3.7),  # 2.9 to 4.5, by how many experts compute
    "glm-4.7-flash": (30, 3.58),  # "A3B"; 3.26 without embedding and head
    "mellum2-12b-a2.5b": (12.15, 2.21),  # 2.5 with embedding, head and its layer of multi-token prediction
    "kimi-linear-48b-a3b": (49, 3.26),  # "48B" and "A3B" by its name
    "nemotron-3-nano-30b-a3b": (31.6, 3.2), "nemotron-3-super-120b-a12b": (120.6, 12.2),  # without the embedding
    "ling-3.0-flash": (124, 5.1),  # 4.73 without the embedding
    "granite-4.0-h-tiny": (7.05, 1.46),  # 6.9, and its embedding twice; "1B active" by its card
    "gemma-4-26b-a4b": (26, 3.8),  # 25.2, and its embedding twice
    "lfm2-8b-a1b": (8.47, 1.5),  # 8.3, and its embedding twice
    "granite-3.1-3b-a800m": (3.37, 0.88),  # 3.3 and 0.8, and its embedding twice: the planner counts a head beside it
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.toml")))
def test_sizes_are_the_published_ones(name: str) -> None:
    shape = load_model(name)
    total, active = SIZES[name]
    assert shape.total_elems / 1e9 == pytest.approx(total, rel=0.02)
    assert shape.active_elems / 1e9 == pytest.approx(active, rel=0.09)
    if not name.startswith("nemotron"):  # whose layers are one or the other
        assert shape.layers == shape.experts.layers + shape.dense_layers


def test_every_model_file_is_a_config_json_with_its_source() -> None:
    for path in MODELS.glob("*.toml"):
        table = tomllib.loads(path.read_text())
        assert table["meta"]["source"].startswith("https://huggingface.co/")
        assert table["config"]["architectures"]


def test_windows_states_and_indexers_bound_the_cache() -> None:
    oss, m1, sparse = load_model("gpt-oss-120b"), load_model("minimax-m1"), load_model("deepseek-v3.2")
    assert {group.kind for group in oss.attention} == {"gqa", "window"}
    assert oss.kv_elems(8192) < 0.52 * oss.layers * 2 * 8 * 64 * 8192
    assert sum(group.layers for group in m1.attention if group.kind == "linear") == 70
    assert sparse.attention[0].reach == 2048
    assert sparse.kv_elems(4096) > load_model("deepseek-v3").kv_elems(4096)


# USD per million tokens of attention at 8K and at 32K and of the FFNs, arXiv 2507.19427
@pytest.mark.parametrize(
    ("model", "chip", "printed"),
    [
        ("deepseek-v3", "h20", (0.128, 0.460, 0.036)),
        ("kimi-k2", "a800", (0.057, 0.205, 0.032)),
        ("qwen3-235b-a22b", "h800", (0.135, 0.527, 0.008)),
        ("step-3", "910b", (0.043, 0.133, 0.035)),
    ],
)
def test_step3_table(model: str, chip: str, printed: tuple[float, float, float]) -> None:
    shape, hardware = load_model(model), load_hardware(chip)
    short, long = theoretical_cost(shape, hardware, 8192), theoretical_cost(shape, hardware, 32768)
    assert (short.attention, long.attention, short.experts) == pytest.approx(printed, rel=0.03)


def test_a_dense_config_is_refused_by_field_name() -> None:
    with pytest.raises(ConfigError, match=r"none of n_routed_experts, num_experts"):
        shape_from_config(
            "llama",
            {
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_attention_heads": 4,
                "vocab_size": 100,
            },
        )
    with pytest.raises(ConfigError, match="hidden_size: 'big' is not a whole number"):
        shape_from_config("odd", {"num_hidden_layers": 2, "hidden_size": "big"})
