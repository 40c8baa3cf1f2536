"""Quantised weights by themselves: values against the formats' own libraries, and everything that can be wrong."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from afserve.config import ModelSource
from afserve.config_json import ConfigFields
from afserve.engine.build import build_expert_bank, spec_of, tensors_of
from afserve.errors import CheckpointError
from afserve.families.reading.quantization import read_quantization
from afserve.models.quantised import QuantisedWeights
from afserve.models.weights import Checkpoint
from afserve.quantization import Quantization
from tests.models.quantising import compressed_config, gptq, int8_channels, packed, quantised, words

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
BYTES = compressed_config("int-quantized", num_bits=8, strategy="channel")
PACKED = compressed_config("pack-quantized", num_bits=4, group_size=32, strategy="group")


def read(config):
    return read_quantization(ConfigFields({"quantization_config": config}, "config.json"))[1]


def held(how, stored):
    """The weight `w.weight` of what is stored."""
    part = lambda name, shape, first, count: stored[name][first : first + count]  # noqa: E731
    return QuantisedWeights(how, stored.__getitem__, stored.__contains__, lambda name: "file", part)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [32, -1])
def test_values_are_those_of_compressed_tensors(bits, symmetric, size):
    library = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    torch.manual_seed(0)
    told = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if size == -1 else "group",
    }
    weights = told if size == -1 else told | {"group_size": size}
    stored, values = packed(size, bits, symmetric)("w", torch.randn(24, 96))
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**weights)
    )
    local = {name.removeprefix("w."): tensor for name, tensor in stored.items()}
    local["weight_scale"] = local["weight_scale"].float()
    theirs = library.PackedQuantizationCompressor.decompress(local, scheme)["weight"]
    ours = held(read(compressed_config("pack-quantized", **weights)), stored).dequantised(
        "w.weight", (24, 96)
    )
    assert torch.equal(ours, theirs) and torch.equal(ours, values)


def test_codes_are_handed_out_as_they_are_stored():
    stored, values = gptq()("w", torch.randn(16, 80))
    made = held(read(GPTQ), stored).grouped("w.weight", (16, 80), 32)
    assert torch.equal(made.dequantised(), values) and made.code_OI.dtype is torch.int8


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "method 'bitsandbytes' is not supported; supported: fp8 with"),
        ({}, None),
        ({**GPTQ, "bits": 3}, "bits: 3 is not supported; supported: 4 or 8"),
        ({**GPTQ, "group_size": 0}, "group_size: 0 is neither -1 nor a whole number in"),
        ({**GPTQ, "group_size": None}, "group_size: None"),
        ({**GPTQ, "desc_act": "no"}, "desc_act: 'no' is not true or false"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format: 'marlin' is not supported"),
        ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic: '.*down.*' is quantised otherwise"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "version: 'gemv' is not"),
        ({"quant_method": "awq", "bits": 8, "group_size": 32}, "bits: 8 is not supported; supported: 4"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": False}, "zero_point: False"),
        ({"quant_method": "compressed-tensors"}, "config_groups: missing"),
        ({**PACKED, "format": "marlin-24"}, "format: 'marlin-24' is not one of pack-quantized"),
        ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({**PACKED, "transform_config": {"config_groups": {"u": {}}}}, "transform_config: rotated weights"),
        (compressed_config("pack-quantized", num_bits=5, group_size=32), "weights: num_bits: 5 is not supported"),
        (compressed_config("pack-quantized", num_bits=4, strategy="tensor_group"), "strategy: 'tensor_group'"),
        (compressed_config("pack-quantized", num_bits=4, type="float", group_size=32), "type: 'float'"),
        (compressed_config("int-quantized", num_bits=8, strategy="block"), "block_structure: None"),
        (compressed_config("int-quantized", num_bits=8, dynamic=True), "weights: dynamic"),
        (compressed_config("int-quantized", num_bits=8, actorder="group"), "weights: actorder: 'group' is not"),
        (compressed_config("pack-quantized", num_bits=4, strategy="block", block_structure=[128, 128]),
         "weights: strategy: 'block' is not supported; supported: tensor, channel, group with pack-quantized"),
        ({**PACKED, "config_groups": {**PACKED["config_groups"], "group_1": {"weights": {"num_bits": 8}}}},
         "config_groups: group_0 and group_1 store weights in two ways"),
    ],
)  # fmt: skip
def test_what_is_not_read_names_its_key(config, said):
    if said is None:
        assert read(config) is None
        return
    with pytest.raises(CheckpointError) as refused:
        read(config)
    message = str(refused.value)
    assert message.startswith("config.json: ") and "\n" not in message
    for part in said.split(".*"):
        assert part in message


def without(name):
    return lambda stored: stored.pop(name)


def also(name, tensor):
    return lambda stored: stored.update({name: tensor})


def other(name, change):
    return lambda stored: stored.update({name: change(stored[name])})


@pytest.mark.parametrize(
    ("config", "write", "spoil", "said"),
    [
        (GPTQ, gptq(), without("w.scales"), "w.scales is missing"),
        (GPTQ, gptq(), without("w.qzeros"), "w.qzeros is missing"),
        (GPTQ, gptq(64), None, r"w.scales is torch.float16 \(2, 16\); gptq with 4 bits in groups of 32"),
        (GPTQ, gptq(16, ordered=True), None, "w.scales is"),
        (GPTQ, gptq(ordered=True), None, "w.g_idx orders inputs, but .* no act-order"),
        ({**GPTQ, "desc_act": True}, gptq(), without("w.g_idx"), "w.g_idx is missing"),
        ({**GPTQ, "desc_act": True}, gptq(), other("w.g_idx", lambda g: g + 7), "w.g_idx does not name one of 4"),
        (GPTQ, gptq(), other("w.qweight", lambda q: q.long()), "w.qweight is torch.int64"),
        (GPTQ, gptq(), other("w.scales", lambda s: s.int()), "w.scales has dtype torch.int32"),
        (PACKED, packed(), without("w.weight_scale"), "w.weight_scale is missing"),
        (PACKED, packed(), other("w.weight_shape", lambda s: s + 1), r"w.weight_shape says \(17, 129\)"),
        (PACKED, packed(symmetric=False), None, "w.weight_zero_point has zero points, but .* symmetric"),
        (BYTES, int8_channels, also("w.weight_zero_point", torch.ones(16, 1)), "w.weight_zero_point has zero points"),
        (PACKED, packed(), other("w.weight_shape", lambda s: s[0]), r"w.weight_shape says \(16,\)"),
        (PACKED, gptq(), None, r"w.weight is missing .* there is w.qweight, which is not what .*pack-quantized"),
        (None, gptq(), None, "w.weight is missing .* w.qweight, but config.json has no quantization_config"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(config, write, spoil, said, tmp_path):
    stored, _ = write("w", torch.randn(16, 128))
    if spoil is not None:
        spoil(stored)
    save_file(stored, tmp_path / "model.safetensors")
    how = None if config is None else read(config)
    with pytest.raises(CheckpointError, match=said) as refused:
        Checkpoint(tmp_path, quantization=how).tensor("w.weight", (16, 128), torch.float32)
    assert "\n" not in str(refused.value)


def test_zero_points_that_say_nothing_are_passed_over(tmp_path):
    stored, values = packed()("w", torch.randn(16, 128))
    for zero in (words(torch.full((4, 16), 8)).t().contiguous(), torch.zeros(16, 4, dtype=torch.int8)):
        save_file(stored | {"w.weight_zero_point": zero}, tmp_path / "model.safetensors")
        read_back = Checkpoint(tmp_path, quantization=read(PACKED)).tensor(
            "w.weight", (16, 128), torch.float32
        )
        assert torch.equal(read_back, values)


@pytest.mark.slow
def test_an_expert_stored_otherwise_than_its_layer_is_named(tiny_checkpoint, tmp_path):
    pytest.importorskip("afserve.kernels._native", reason="the native library was not built")
    few, plain = quantised(tiny_checkpoint("qwen3"), tmp_path, GPTQ, gptq())
    stored, whole = (load_file(f"{source.path}/model.safetensors") for source in (few, plain))
    stem = "model.layers.0.mlp.experts.2.up_proj"
    mixed = {name: tensor for name, tensor in stored.items() if not name.startswith(stem)}
    save_file(mixed | {f"{stem}.weight": whole[f"{stem}.weight"]}, f"{few.path}/model.safetensors")
    build_expert_bank(few, [(0, 0, 1)], 1)
    with pytest.raises(CheckpointError, match=rf"{stem}.weight is not stored in int4 as the other experts"):
        build_expert_bank(few, [(0, 0, 2)], 1)


@pytest.mark.slow
def test_layers_that_are_not_quantised_stay_as_they_are(tiny_checkpoint, tmp_path):
    first, second = spec_of(ModelSource(str(tiny_checkpoint("qwen3")), "qwen3")).moe_layer_ids[:2]
    stem = f"model.layers.{second}.mlp.experts."
    left_out = {**GPTQ, "dynamic": {f"-:.*layers.{second}.mlp.experts.*": {}}}
    few, plain = quantised(tiny_checkpoint("qwen3"), tmp_path, left_out, gptq())
    stored, whole = (load_file(f"{source.path}/model.safetensors") for source in (few, plain))
    spec = spec_of(few)
    mixed = {name: tensor for name, tensor in stored.items() if not name.startswith(stem)}
    kept = {name: tensor for name, tensor in whole.items() if name.startswith(stem)}
    save_file(mixed | kept, f"{few.path}/model.safetensors")
    bank = build_expert_bank(few, [(0, 0, 1), (1, 0, 1)], 1)
    assert bank.expert_bytes == 4 * spec.expert_parameters()
    source = tensors_of(few, spec, torch.device("cpu"))
    gate = f"{stem}1.gate_proj.weight"
    assert not source.has_int4(gate) and source.has_int4(gate.replace(f"layers.{second}", f"layers.{first}"))


def test_which_weights_are_4_bit_codes_in_groups():
    assert Quantization("gptq", 4, 128).regular and Quantization("pack-quantized", 4).regular
    assert Quantization("mxfp4", 4, 32).regular
    for odd in (
        Quantization("gptq", 8, 128),
        Quantization("gptq", 4, 48),
        Quantization("gptq", 4, 128, ordered=True),
        Quantization("awq", 4, 128, symmetric=False),
    ):
        assert not odd.regular
    assert Quantization("gptq", 4).group_for(100, 40) == 128
