"""Checkpoints in the formats that people have, written from a plain one: packers that share nothing with the readers.

Every writer returns what a reader must give: value = (code - zero) * scale in float32.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from afserve.config import ModelSource

Stored = dict[str, Tensor]
Writer = Callable[[str, Tensor], tuple[Stored, Tensor]]
_LINEAR = re.compile(r".*(_proj\w*|\.w[123]|\.Wqkv)\.weight")  # what such checkpoints have in few bits
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns is i-th in a word


def words(codes_RC: Tensor, bits: int = 4) -> Tensor:
    """Codes from 0 on, the first column lowest, padded with zeros to whole words."""
    each = 32 // bits
    padded = torch.nn.functional.pad(codes_RC.long(), (0, -codes_RC.shape[1] % each))
    made = torch.stack([padded[:, i::each] << (bits * i) for i in range(each)]).sum(0)
    return torch.where(made >= 1 << 31, made - (1 << 32), made).to(torch.int32).contiguous()


def awq_words(codes_RC: Tensor) -> Tensor:
    return words(codes_RC.view(len(codes_RC), -1, 8)[..., list(AWQ_PLACES)].flatten(1))


def grouped(weight_OI: Tensor, size: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes O x I from 0 on; scales (float16 numbers) and zero points O x G."""
    outputs, inputs = weight_OI.shape
    groups = -(-inputs // size)
    wide = torch.nn.functional.pad(weight_OI, (0, groups * size - inputs)).view(outputs, groups, size)
    low, high = wide.aminmax(dim=2)
    most = (1 << bits) - 1
    scale = (2 * wide.abs().amax(2) if symmetric else high - low).clamp(min=1e-5) / most
    scale = scale.half().float()
    zero = torch.full_like(scale, 1 << (bits - 1)) if symmetric else (-low / scale).round().clamp(1, most)
    code = (wide / scale[..., None] + zero[..., None]).round().clamp(0, most)
    return code.view(outputs, -1)[:, :inputs], scale, zero


def values(code: Tensor, scale: Tensor, zero: Tensor, group_I: Tensor) -> Tensor:
    return (code - zero[:, group_I]) * scale[:, group_I]


def gptq(
    size: int = 32, bits: int = 4, symmetric: bool = True, ordered: bool = False, shift: int = 1
) -> Writer:
    def write(stem: str, weight_OI: Tensor) -> tuple[Stored, Tensor]:
        inputs = weight_OI.shape[1]
        each = inputs if size == -1 else size
        order = torch.randperm(inputs) if ordered else torch.arange(inputs)
        group_I = torch.empty(inputs, dtype=torch.int32)
        group_I[order] = (torch.arange(inputs) // each).int()
        code = torch.empty_like(weight_OI)
        code[:, order], scale, zero = grouped(weight_OI[:, order], each, bits, symmetric)
        stored = {
            f"{stem}.qweight": words(code, bits).t().contiguous(),
            f"{stem}.qzeros": words(zero.t() - shift, bits),
            f"{stem}.scales": scale.t().half().contiguous(),
            f"{stem}.g_idx": group_I,
        }
        return stored, values(code, scale, zero, group_I.long())

    return write


def awq(size: int = 32) -> Writer:
    def write(stem: str, weight_OI: Tensor) -> tuple[Stored, Tensor]:
        code, scale, zero = grouped(weight_OI, size, 4, symmetric=False)
        stored = {
            f"{stem}.qweight": awq_words(code.t()),
            f"{stem}.qzeros": awq_words(zero.t()),
            f"{stem}.scales": scale.t().half().contiguous(),
        }
        return stored, values(code, scale, zero, torch.arange(weight_OI.shape[1]) // size)

    return write


def packed(size: int = 32, bits: int = 4, symmetric: bool = True) -> Writer:
    def write(stem: str, weight_OI: Tensor) -> tuple[Stored, Tensor]:
        each = weight_OI.shape[1] if size == -1 else size
        code, scale, zero = grouped(weight_OI, each, bits, symmetric)
        stored = {
            f"{stem}.weight_packed": words(code, bits),
            f"{stem}.weight_scale": scale.half(),
            f"{stem}.weight_shape": torch.tensor(weight_OI.shape),
        }
        if not symmetric:
            stored[f"{stem}.weight_zero_point"] = words(zero.t(), bits).t().contiguous()
        return stored, values(code, scale, zero, torch.arange(weight_OI.shape[1]) // each)

    return write


def int8_channels(stem: str, weight_OI: Tensor) -> tuple[Stored, Tensor]:
    scale = (weight_OI.abs().amax(1, keepdim=True) / 127).bfloat16()
    code = (weight_OI / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {f"{stem}.weight": code, f"{stem}.weight_scale": scale}, code.float() * scale.float()


def fp8_tensors(stem: str, weight_OI: Tensor) -> tuple[Stored, Tensor]:
    scale = (weight_OI.abs().max() / 448).view(1)
    code = (weight_OI / scale).to(torch.float8_e4m3fn)
    return {f"{stem}.weight": code, f"{stem}.weight_scale": scale}, code.float() * scale


def compressed_config(form: str, **weights: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def quantised(
    folder: Path, to: Path, config: dict[str, object], write: Writer
) -> tuple[ModelSource, ModelSource]:
    """The checkpoint with its linear maps written so, and a plain one with the values that those have."""
    stored: Stored = {}
    plain: Stored = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if _LINEAR.fullmatch(name) and tensor.dim() == 2:
            few, whole = write(name.removesuffix(".weight"), tensor.float())
            stored |= few
            plain[name] = whole.contiguous()
        else:
            stored[name] = plain[name] = tensor
    return _saved(folder, to / "few", stored, config), _saved(folder, to / "plain", plain, None)


def _saved(folder: Path, to: Path, tensors: Stored, config: dict[str, object] | None) -> ModelSource:
    shutil.copytree(folder, to)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    if config is not None:
        told = json.loads((to / "config.json").read_text())
        (to / "config.json").write_text(json.dumps(told | {"quantization_config": config}))
    return ModelSource(str(to), "quantised" if config else "plain")
