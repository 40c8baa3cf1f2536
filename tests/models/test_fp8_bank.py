"""An FP8 checkpoint's experts: kept as stored where the backend multiplies blocks, de-quantised everywhere else."""

import json

import torch
from safetensors.torch import load_file, save_file

from afserve.config import ModelSource
from afserve.engine.build import build_expert_bank, spec_of
from afserve.kernels.formats.scaled import FP8
from afserve.kernels.ops import Ops, open_ops
from afserve.models.weights import Checkpoint, DummyCheckpoint
from tests.kernels.reference_fp8 import BlockReference


class Watched(BlockReference):
    """Remembers what was stored where."""

    def __init__(self):
        super().__init__()
        self.plain, self.stored = 0, []

    def set_expert(self, experts, slot, gate_up_JH, down_HI, *biases):
        self.plain += 1
        super().set_expert(experts, slot, gate_up_JH, down_HI, *biases)

    def set_half(self, experts, slot, gate_up, down_HI):
        self.plain += down_HI is not None
        super().set_half(experts, slot, gate_up, down_HI)

    def set_expert_fp8(self, experts, slot, gate, up, down):
        self.stored.append((gate, up, down))
        super().set_expert_fp8(experts, slot, gate, up, down)


def bank_of(folder, backend, dtype="bfloat16", load_format="safetensors"):
    source = ModelSource(str(folder), "fp8", dtype=dtype, load_format=load_format)
    return build_expert_bank(source, [(0, 1, 0), (0, 0, 3)], 2, ops=Ops(backend, torch.device("cpu"), 1))


def forward(bank, hidden, dtype=torch.bfloat16):
    torch.manual_seed(0)
    x, out = torch.randn(4, hidden).to(dtype), torch.empty(4, hidden)
    bank.forward(0, x, torch.tensor([[0, 1]] * 4, dtype=torch.int32), torch.rand(4, 2), out)
    return out


def test_stored_blocks_reach_the_slots_as_they_are(fp8_folder):
    backend = Watched()
    bank = bank_of(fp8_folder, backend)
    spec = spec_of(ModelSource(str(fp8_folder), "fp8"))
    assert backend.plain == 0 and len(backend.stored) == 2
    assert {(packed.experts, packed.among) for packed in bank.packed} == {(2, spec.experts)}, (
        "two slots of a node's"
    )
    assert bank.expert_bytes == spec.expert_parameters() * 129 // 128
    on_disk = load_file(fp8_folder / "model.safetensors")
    layer = spec.moe_layer_ids[0]
    for expert, blocks in zip((0, 3), backend.stored, strict=True):
        for part, block in zip(("gate_proj", "up_proj", "down_proj"), blocks, strict=True):
            name = f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
            assert block.q_OI.dtype is FP8 and torch.equal(
                block.q_OI.view(torch.uint8), on_disk[name].view(torch.uint8)
            )
            assert torch.equal(block.scale, on_disk[name + "_scale_inv"])


def test_it_computes_what_dequantised_weights_compute(fp8_folder):
    spec = spec_of(ModelSource(str(fp8_folder), "fp8"))
    kept, plain = (
        forward(bank_of(fp8_folder, b), spec.hidden)
        for b in (BlockReference(), open_ops("cpu", 1, "torch")._backend)
    )
    assert (kept - plain).norm() <= 0.06 * plain.norm()  # rows and activations through e4m3: 2 to 3 bits


def test_the_native_library_keeps_blocks_and_rounds_nothing_more(fp8_folder):
    hidden = spec_of(ModelSource(str(fp8_folder), "fp8")).hidden
    native, plain = (
        bank_of(fp8_folder, open_ops("cpu", 1, backend)._backend) for backend in ("native", "torch")
    )
    assert native._layers[0].fp8 and not plain._layers[0].fp8
    exact, rounded = forward(native, hidden).float(), forward(plain, hidden).float()
    assert (exact - rounded).norm() <= 0.01 * rounded.norm()  # weights in bfloat16: 8 bits


def test_an_expert_without_blocks_in_a_layer_of_blocks_is_named(fp8_folder, tmp_path, caplog):
    spec = spec_of(ModelSource(str(fp8_folder), "fp8"))
    stored = load_file(fp8_folder / "model.safetensors")
    odd = f"model.layers.{spec.moe_layer_ids[0]}.mlp.experts.3."
    kept = {name: t for name, t in stored.items() if not (odd in name and name.endswith("_scale_inv"))}
    for name in [name for name in kept if odd in name]:
        kept[name] = kept[name].to(torch.bfloat16)
    save_file(kept, tmp_path / "model.safetensors")
    config = json.loads((fp8_folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = [odd.removesuffix(".")]
    (tmp_path / "config.json").write_text(json.dumps(config))
    bank_of(tmp_path, open_ops("cpu", 1, "native")._backend)
    assert "expert 3 of layer" in caplog.text and "rounded to FP8" in caplog.text


def test_wider_rows_get_dequantised_weights(fp8_folder):
    backend = Watched()
    bank = bank_of(fp8_folder, backend, dtype="float32")
    assert backend.plain == 2 and not backend.stored
    spec = spec_of(ModelSource(str(fp8_folder), "fp8"))
    assert bank.expert_bytes == 4 * spec.expert_parameters()


def test_layers_left_in_16_bits_stay_so(fp8_folder, tmp_path):
    spec = spec_of(ModelSource(str(fp8_folder), "fp8"))
    plain = f"model.layers.{spec.moe_layer_ids[1]}.mlp.experts."
    stored = load_file(fp8_folder / "model.safetensors")
    kept = {name: t for name, t in stored.items() if not (plain in name and name.endswith("_scale_inv"))}
    for name in kept:
        if plain in name:
            kept[name] = kept[name].to(torch.bfloat16)
    save_file(kept, tmp_path / "model.safetensors")
    config = json.loads((fp8_folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = [plain.removesuffix(".")]
    (tmp_path / "config.json").write_text(json.dumps(config))
    backend = Watched()
    bank = bank_of(tmp_path, backend)
    bank.fill(1, 0, 2)
    assert len(backend.stored) == 2 and backend.plain == 1
    assert bank._layers[1].gate_up_EJH is not None and bank._layers[0].gate_up_EJH is None
    assert bank.expert_bytes == 2 * spec.expert_parameters()


def test_dummy_weights_fill_fp8_slots_too(fp8_folder):
    backend = Watched()
    bank = bank_of(fp8_folder, backend, load_format="dummy")
    spec = spec_of(ModelSource(str(fp8_folder), "fp8"))
    assert backend.plain == 2 and forward(bank, spec.hidden).isfinite().all()
    assert DummyCheckpoint().block_scaled("a.weight", (4, 4)) is None


def test_other_blocks_and_plain_tensors_are_not_handed_out_raw(fp8_folder, tiny_checkpoint):
    name = "model.layers.0.self_attn.o_proj.weight"
    shape = tuple(load_file(fp8_folder / "model.safetensors")[name].shape)
    assert Checkpoint(fp8_folder, (128, 128)).block_scaled(name, shape) is not None
    assert Checkpoint(fp8_folder, (64, 64)).block_scaled(name, shape) is None
    assert Checkpoint(tiny_checkpoint("v3"), (128, 128)).block_scaled(name, shape) is None
