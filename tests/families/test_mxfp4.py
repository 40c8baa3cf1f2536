"""gpt-oss as it is published, with experts in MXFP4: the tokens of a plain checkpoint with the same values."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from afserve.config import ModelSource
from afserve.engine.build import build_expert_bank, colocated, spec_of, tensors_of
from afserve.errors import CheckpointError
from afserve.families.table import naming_of
from afserve.kernels.grouped import Groups
from afserve.models.expert_tensors import read_codes, read_expert
from afserve.models.unpacking import E2M1, mx_values
from tests.engine.driving import collect, config, drive, prompts, requests
from tests.engine.local_cluster import LocalCluster

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def in_mxfp4(weight_EIO):
    """Blocks and scales of (E, I, O), the inputs in groups of 32 and padded with zeros."""
    wide = weight_EIO.transpose(1, 2).float()
    wide = torch.nn.functional.pad(wide, (0, -wide.shape[2] % 32)).unflatten(2, (-1, 32))
    exponent = (wide.abs().amax(3).clamp(min=1e-9).log2().floor() - 2).int()
    small = torch.ldexp(wide, -exponent.unsqueeze(3))
    code = (small.abs().unsqueeze(4) - torch.tensor(E2M1)).abs().argmin(4) + 8 * (small < 0)
    blocks = (code[..., 0::2] | code[..., 1::2] << 4).to(torch.uint8)
    return blocks.contiguous(), (exponent + 127).to(torch.uint8).contiguous()


@pytest.fixture
def folders(checkpoint, tmp_path):
    """(in MXFP4, plain with the same values)."""
    few, plain = {}, {}
    for name, tensor in load_file(checkpoint("gptoss") / "model.safetensors").items():
        plain[name] = few[name] = tensor
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            del few[name]
            blocks, scales = few[f"{name}_blocks"], few[f"{name}_scales"] = in_mxfp4(tensor)
            plain[name] = mx_values(blocks, scales)[..., : tensor.shape[1]].transpose(1, 2).contiguous()
    for folder, tensors, told in (("few", few, {"quantization_config": MXFP4}), ("plain", plain, {})):
        shutil.copytree(checkpoint("gptoss"), tmp_path / folder)
        save_file(tensors, tmp_path / folder / "model.safetensors", {"format": "pt"})
        read = json.loads((tmp_path / folder / "config.json").read_text())
        (tmp_path / folder / "config.json").write_text(json.dumps(read | told))
    return tmp_path / "few", tmp_path / "plain"


@pytest.mark.slow
def test_tokens_are_those_of_the_same_values(folders):
    few, plain = (ModelSource(str(folder), "gptoss") for folder in folders)
    asked = requests(prompts())
    wanted = collect(drive(colocated(plain, config()), asked))
    assert collect(drive(colocated(few, config()), asked)) == wanted
    assert collect(LocalCluster.build(few, config(), attention=1, experts=2).run(asked)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_stay_in_four_bits(folders, dtype):
    """The same tokens whatever nodes there are."""
    source, asked = ModelSource(str(folders[0]), "gptoss", dtype=dtype), requests(prompts())
    node = colocated(source, config())
    wanted = collect(drive(node, asked))
    for attention, experts, micro_batches in ((1, 1, 1), (2, 3, 2)):
        cluster = LocalCluster.build(
            source, config(micro_batches=micro_batches), attention=attention, experts=experts
        )
        assert collect(cluster.run(asked)) == wanted
    memory = (spec := spec_of(source)).moe_layers * (spec.top_k + 1) * spec.expert_parameters()
    few = LocalCluster.build(source, config(), attention=1, experts=1, expert_memory=memory)
    assert few.banks[0].packed is None
    assert collect(few.run(asked)) == wanted
    (packed, *_) = build_expert_bank(source, [(0, 0, 0)], 1).packed
    assert packed.int4 == Groups(32, e2m1=True)


def test_codes_have_the_values_that_are_read(folders):
    source = ModelSource(str(folders[0]), "gptoss")
    spec = spec_of(source)
    where = spec, tensors_of(source, spec, torch.device("cpu")), naming_of(spec), 1, 3, torch.float32
    read, codes = read_expert(*where), read_codes(*where, 32)
    assert torch.equal(codes.gate_up.dequantised(), read.gate_up_JH)
    assert torch.equal(codes.down.dequantised(), read.down_HI)
    assert torch.equal(codes.gate_up_bias_J, read.gate_up_bias_J)
    assert torch.equal(codes.down_bias_H, read.down_bias_H)


def test_values_are_those_of_transformers():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 4), dtype=torch.uint8)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(mx_values(blocks, scales).transpose(1, 2), theirs)


def test_missing_scales_are_named(folders):
    few, _ = folders
    tensors = load_file(few / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, few / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj_scales is missing"):
        colocated(ModelSource(str(few), "gptoss"), config())
