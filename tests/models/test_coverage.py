"""Plain weights in a checkpoint that says it is quantised: refused, but for what its config.json leaves out."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from afserve.config import ModelSource
from afserve.config_json import ConfigFields
from afserve.coverage import MOST_PATTERNS, ModuleNames
from afserve.engine.build import build_expert_bank, colocated
from afserve.errors import CheckpointError
from afserve.families.reading.quantization import read_coverage
from tests.engine.driving import config
from tests.models.quantising import compressed_config, gptq, quantised

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PACKED = compressed_config("pack-quantized", num_bits=4, group_size=32, strategy="group")
BYTES = compressed_config("int-quantized", num_bits=8, strategy="channel")
GATE, QUERY = "model.layers.3.mlp.experts.7.gate_proj", "model.layers.3.self_attn.q_proj"


def saying(folder, to, told):
    """The plain checkpoint of `folder` with this quantization_config."""
    shutil.copytree(folder, to)
    read = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(read | {"quantization_config": told}))
    return ModelSource(str(to), "said")


@pytest.mark.parametrize("told", [GPTQ, AWQ, FP8, PACKED, BYTES], ids=lambda told: told["quant_method"])
def test_a_plain_checkpoint_that_says_it_is_quantised_is_refused(told, tiny_checkpoint, tmp_path):
    source = saying(tiny_checkpoint("qwen3"), tmp_path / "few", told)
    key = {"gptq": "dynamic", "compressed-tensors": "ignore"}.get(
        told["quant_method"], "modules_to_not_convert"
    )
    for load in (lambda: colocated(source, config()), lambda: build_expert_bank(source, [(0, 0, 1)], 1)):
        with pytest.raises(CheckpointError) as refused:
            load()
        said = str(refused.value)
        assert "_proj.weight is plain float32, but quantization_config of config.json says" in said
        assert said.startswith(f"{tmp_path}/few/model.safetensors: model.layers.0.") and "\n" not in said
        assert told["quant_method"] in said and f"in its {key}" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "left_out",
    [{"dynamic": {"-:.*self_attn.*": {}}}, {"modules_in_block_to_quantize": [["mlp.experts"], ["mlp.up_proj"]]},
     {"modules_to_not_convert": ["self_attn"]},
     {"extra_config": {f"model.layers.{i}.self_attn": {"bits": 16} for i in range(9)}}],
)  # fmt: skip
def test_what_is_left_out_may_be_plain_and_nothing_else(left_out, tiny_checkpoint, tmp_path):
    few, plain = quantised(tiny_checkpoint("qwen3"), tmp_path, GPTQ | left_out, gptq())
    stored, whole = (load_file(f"{source.path}/model.safetensors") for source in (few, plain))
    kept = {name: t for name, t in stored.items() if ".self_attn." not in name}
    kept |= {name: t for name, t in whole.items() if ".self_attn." in name}
    save_file(kept, f"{few.path}/model.safetensors")
    colocated(few, config())
    stem = "model.layers.0.mlp.experts.1.down_proj"
    mixed = {name: t for name, t in kept.items() if not name.startswith(stem)}
    save_file(mixed | {f"{stem}.weight": whole[f"{stem}.weight"]}, f"{few.path}/model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{stem}\.weight is (plain|not stored in int4)"):
        build_expert_bank(few, [(0, 0, 1)], 1)


@pytest.mark.parametrize(
    ("told", "plain", "few"),
    [
        ({**PACKED, "ignore": ["lm_head", "re:.*self_attn.*"]}, [QUERY], [GATE]),
        ({**PACKED, "ignore": [QUERY]}, [QUERY], [GATE, QUERY.replace(".3.", ".13.")]),
        ({**PACKED, "ignore": ["re:.*mlp.gate$", "model.layers.3.mlp.gate"]}, [], [GATE, QUERY]),
        ({**PACKED, "config_groups": {"g": {"targets": ["re:.*experts.*"]}}}, [QUERY], [GATE]),
        ({**FP8, "ignored_layers": ["model.layers.3"]}, [QUERY, GATE], [GATE.replace("3", "4")]),
        ({**FP8, "modules_to_not_convert": ["model.layers.*.self_attn", "gate"]}, [QUERY], [GATE]),
        ({**FP8, "modules_to_not_convert": ["language_model.model.layers.3.self_attn"]}, [QUERY], [GATE]),
        ({**FP8, "modules_to_not_convert": ["[", "("]}, [], [QUERY, GATE]),
        ({**FP8, "modules_to_not_convert": ["model.layers.3.", "x.weight"]}, [QUERY, GATE], [GATE.replace("3", "30")]),
        ({**FP8, "modules_to_not_convert": [f"{QUERY}.weight"]}, [QUERY], [GATE]),
        ({**AWQ, "modules_to_not_convert": ["mlp.gate.", "model.layers.3."]}, [QUERY], [GATE.replace("3", "13")]),
        ({**AWQ, "modules_to_not_convert": ["attn"]}, [QUERY], [GATE]),
        ({**AWQ, "modules_to_not_convert": None}, [], [QUERY, GATE]),
        ({**GPTQ, "extra_config": {QUERY: {"bits": 8}}}, [], [QUERY, GATE]),
        ({"quant_method": "mxfp4"}, [QUERY, "model.layers.3.mlp.shared_expert.up_proj"], [GATE]),
    ],
)  # fmt: skip
def test_which_modules_are_in_few_bits(told, plain, few):
    said = read_coverage(ConfigFields({"quantization_config": told}, "config.json"))
    assert not any(map(said.covers, plain)) and all(map(said.covers, few))
    others = ("model.layers.3.mlp.gate", "model.embed_tokens", "lm_head", "model.layers.3.eh_proj")
    assert not any(map(said.covers, others))


@pytest.mark.parametrize(("method", "refused"), [("mxfp4", True), ("gptq", False)])
def test_tensors_of_all_experts(method, refused):
    """GPTQ and its like quantise linear maps only, and leave those as they are without a word."""
    said = read_coverage(ConfigFields({"quantization_config": {"quant_method": method}}, "config.json"))
    stem = "model.layers.3.mlp.experts."
    assert said.covers(f"{stem}gate_up_proj", stacked=True) is refused
    assert not said.covers(f"{stem}gate_up_proj_bias", stacked=True)
    assert not said.covers("model.layers.3.self_attn.q_proj", stacked=True)


@pytest.mark.parametrize("key", ["ignore", "modules_to_not_convert", "modules_in_block_to_quantize"])
def test_names_that_are_none_are_refused_by_key(key):
    for value in ([["x", 3]], [None]) if "block" in key else ("self_attn", [3]):
        with pytest.raises(CheckpointError, match=rf"config.json: quantization_config: {key}"):
            read_coverage(ConfigFields({"quantization_config": GPTQ | {key: value}}, "config.json"))


def test_many_names_are_found_at_once():
    names = ModuleNames(
        tuple(f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(90) for j in range(160))
    )
    found = [
        names.holds(f"model.layers.{i}.mlp.experts.{i}.{part}")
        for i in range(90)
        for part in ("up_proj", "x")
    ]
    assert found == [True, False] * 90


@pytest.mark.parametrize(
    "told",
    [
        {**PACKED, "ignore": ["re:(a+)+$", "re:(.*)*=", "re:.*.*.*.*.*.*=", r"re:(\w+\.?)+="]},
        {**PACKED, "config_groups": {"g": {"targets": ["re:(.*)*="]}}},
        {**FP8, "modules_to_not_convert": ["(.*)*(.*)*="]},
        {**GPTQ, "dynamic": {"-:(.*)*(.*)*=": {}}},
        {**GPTQ, "extra_config": {"(.*)*(.*)*=": {"bits": 16}}},
    ],
)
def test_a_pattern_that_python_would_take_for_ever_for_is_matched_at_once(told):
    said = read_coverage(ConfigFields({"quantization_config": told}, "config.json"))
    assert said.covers("model.layers.3." + "a" * 2000 + ".q_proj") == (
        "config_groups" not in told or not said.only
    )


@pytest.mark.parametrize(
    "text", ["re:(a)\\1+", "re:(?<!shared_)experts", "re:((a{1000}){1000})", "re:" + "a*" * 501]
)
@pytest.mark.parametrize("key", ["ignore", "modules_to_not_convert", "ignored_layers"])
def test_a_pattern_that_could_take_without_end_is_refused_by_name(text, key):
    with pytest.raises(CheckpointError) as refused:
        read_coverage(ConfigFields({"quantization_config": PACKED | {key: [text]}}, "models/x/config.json"))
    said = str(refused.value)
    assert said.startswith("models/x/config.json: quantization_config: the pattern '") and len(said) < 500
    assert "could take without end; write it more simply, or list the names of the modules" in said


def test_as_many_patterns_as_are_matched():
    patterns = [f"re:.*layers.{index}.mlp.*" for index in range(MOST_PATTERNS + 1)]
    fields = {"quantization_config": PACKED | {"ignore": patterns[:-1]}}
    said = read_coverage(ConfigFields(fields, "config.json"))
    assert not said.covers(GATE) and said.covers(QUERY)
    fields = {"quantization_config": PACKED | {"ignore": patterns}}
    with pytest.raises(
        CheckpointError, match="lists 257 patterns, at most 256 are matched here; join them with"
    ):
        read_coverage(ConfigFields(fields, "config.json"))
