"""config.json in, shape out; and one clear line for each way a config can be wrong."""

import json

import pytest

from afserve.errors import CheckpointError, ConfigError
from afserve.families.table import FAMILIES, load_spec, spec_from_config
from tests.conftest import TINY


@pytest.fixture
def v3(tiny_checkpoint):
    return json.loads((tiny_checkpoint("v3") / "config.json").read_text())


@pytest.mark.parametrize("name", sorted(TINY))
def test_parameters_match_the_checkpoint(name, tiny_checkpoint):
    """The planner's count of parameters is the file's, norms and biases of single vectors aside."""
    from safetensors.torch import load_file

    spec = load_spec(tiny_checkpoint(name))
    tensors = load_file(tiny_checkpoint(name) / "model.safetensors")
    idle = tuple(f".experts.{e}." for e in range(spec.experts, spec.choices))  # transformers has half of them
    matrices = sum(
        t.numel() for n, t in tensors.items() if t.dim() > 1 and not any(map(n.__contains__, idle))
    )
    assert matrices <= spec.routed_parameters() + spec.attention_parameters() <= matrices * 1.02


def test_family_names_unsupported(v3):
    v3["model_type"] = "llama"
    with pytest.raises(CheckpointError, match="'llama' is not supported; supported: " + ", ".join(FAMILIES)):
        spec_from_config(v3)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", None, "hidden_size: missing"),
        ("hidden_size", "48", "hidden_size: '48' is not a whole number"),
        ("hidden_size", -1, "hidden_size: -1 is not a whole number in [1, 1048576]"),
        ("num_attention_heads", 0, "num_attention_heads: 0 is not"),
        ("hidden_act", "gelu", "hidden_act: 'gelu' is not supported"),
        ("n_group", 5, "n_group: 5 does not divide the 12 experts"),
        ("topk_group", 9, "topk_group: 9 is more than the 4 groups"),
        ("num_experts_per_tok", 7, "topk_group: 2 of n_group leave 6 of n_routed_experts"),
        ("first_k_dense_replace", 3, "no MoE layer at all"),
        ("dtype", "int8", "dtype: 'int8' is not one of"),
        (
            "rope_parameters",
            {"rope_type": "longrope"},
            "rope_type 'longrope' with other short_factor and long_factor is not supported",
        ),
        ("rope_parameters", 3, "rope_parameters: 3 is not an object"),
        ("rope_parameters", {"rope_type": "yarn"}, "rope_parameters: factor: missing, for rope_type 'yarn'"),
        (
            "rope_parameters",
            {"rope_type": "linear", "original_max_position_embeddings": 9},
            "rope_parameters: factor: missing, for rope_type 'linear'",
        ),
        ("quantization_config", {"quant_method": "quip"}, "method 'quip' is not supported"),
        ("quantization_config", {"quant_method": "fp8"}, "weight_block_size: None is not two sizes"),
        ("norm_topk_prob", "yes", "norm_topk_prob: 'yes' is not true or false"),
        ("eos_token_id", ["x"], "eos_token_id"),
    ],
)
def test_bad_fields_are_named(v3, field, value, message):
    v3[field] = value
    with pytest.raises(CheckpointError) as caught:
        spec_from_config(v3, where="here/config.json")
    assert message in str(caught.value)
    assert str(caught.value).startswith("here/config.json")


def test_bad_files(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="a JSON object was expected, found list"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mixtral", "model_type": "olmoe"}')
    with pytest.raises(CheckpointError, match=r"config\.json: 'model_type' is there twice"):
        load_spec(tmp_path)


def test_old_style_rope_fields(v3):
    v3.pop("rope_parameters")
    v3["rope_theta"] = 5e5
    v3["rope_scaling"] = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 64,
        "beta_fast": 16,
    }
    rope = spec_from_config(v3).layer(0).attention.rope
    assert (rope.kind, rope.theta, rope.factor, rope.beta_fast) == ("yarn", 5e5, 40.0, 16.0)


def test_a_rope_that_is_said_in_two_ways_is_refused_unless_both_say_the_same(v3):
    """Model cards tell people to add `rope_scaling`; beside `rope_parameters` it would do nothing."""
    v3["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for added, said in ((yarn, "rope_type"), ({"rope_type": "default", "rope_theta": 1e4}, "rope_theta")):
        with pytest.raises(
            CheckpointError, match=f"rope_scaling: its '{said}' is not that of rope_parameters"
        ):
            spec_from_config({**v3, "rope_scaling": added})
    same = spec_from_config({**v3, "rope_scaling": {"rope_type": "default", "rope_theta": 5e5}})
    assert same == spec_from_config(v3)


def test_cut_keeps_a_moe_layer(v3):
    spec = spec_from_config(v3)
    assert spec.cut(2).moe_layer_ids == (1,)
    assert spec.cut(2).fingerprint() != spec.fingerprint()
    with pytest.raises(ConfigError, match="leaves no MoE layer"):
        spec.cut(1)
