"""The encoder of pictures: a tile's pixels in, rows for the first layer out (Llama 4's vision tower and projector).

One tile at a time, so that its rows do not depend on what else is computed. Shapes: P patches of a tile, C the class
token behind them (P + 1), D width of the tower, N rows of a tile, H the text model's width.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from afserve.tiles import EncoderSpec

_TOWER = "vision_model"
_PROJECTOR = "multi_modal_projector.linear_1.weight"
_EPS = 1e-5
_HALF = 0.5  # mean and deviation of the pixels that Llama 4 was trained with
ReadTensor = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
"""`TensorSource.tensor`."""


class _Tensors:
    def __init__(self, read: ReadTensor, dtype: torch.dtype) -> None:
        self._read, self._dtype = read, dtype

    def one(self, name: str, *shape: int) -> Tensor:
        return self._read(name, shape, self._dtype)

    def both(self, stem: str, *shape: int) -> tuple[Tensor, Tensor]:
        """A weight, of a map (O, I) or a norm (D), and its bias."""
        return self.one(f"{stem}.weight", *shape), self.one(f"{stem}.bias", shape[0])


class _Layer:
    def __init__(self, spec: EncoderSpec, tensors: _Tensors, number: int) -> None:
        stem, d = f"{_TOWER}.model.layers.{number}", spec.hidden
        self._heads = spec.heads
        self._before = tensors.both(f"{stem}.input_layernorm", d)
        self._behind = tensors.both(f"{stem}.post_attention_layernorm", d)
        parts = [tensors.both(f"{stem}.self_attn.{name}_proj", d, d) for name in "qkv"]
        weights, biases = zip(*parts, strict=True)
        self._qkv = torch.cat(weights), torch.cat(biases)
        self._out = tensors.both(f"{stem}.self_attn.o_proj", d, d)
        self._up = tensors.both(f"{stem}.mlp.fc1", spec.inner, d)
        self._down = tensors.both(f"{stem}.mlp.fc2", d, spec.inner)

    def __call__(self, x_CD: Tensor, turn_CE: Tensor) -> Tensor:
        x_CD = x_CD + functional.linear(self._attended(_normed(x_CD, self._before), turn_CE), *self._out)
        inner = functional.gelu(functional.linear(_normed(x_CD, self._behind), *self._up))
        return x_CD + functional.linear(inner, *self._down)

    def _attended(self, normed_CD: Tensor, turn_CE: Tensor) -> Tensor:
        """All to all, heads side by side."""
        rows, width = normed_CD.shape
        qkv_3HCE = functional.linear(normed_CD, *self._qkv).view(rows, 3, self._heads, -1).permute(1, 2, 0, 3)
        q, k = (_turned(half, turn_CE) for half in (qkv_3HCE[0], qkv_3HCE[1]))
        y_HCE = functional.scaled_dot_product_attention(q[None], k[None], qkv_3HCE[2][None])[0]
        return y_HCE.transpose(0, 1).reshape(rows, width)


class TileEncoder:
    """With weights in `dtype` on `device`. `rows(pixels)` of a tile are (N, H)."""

    def __init__(
        self, spec: EncoderSpec, width: int, read: ReadTensor, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`width`: the text model's. Raises CheckpointError where a tensor is missing."""
        tensors, d = _Tensors(read, dtype), spec.hidden
        self.spec, self._dtype, self._device = spec, dtype, device
        self._patches_DI = tensors.one(f"{_TOWER}.patch_embedding.linear.weight", d, 3 * spec.patch**2)
        self._class_1D = tensors.one(f"{_TOWER}.class_embedding", d)[None]
        self._places_CD = tensors.one(f"{_TOWER}.positional_embedding_vlm", spec.grid**2 + 1, d)
        self._first, self._last = (tensors.both(f"{_TOWER}.layernorm_{n}", d) for n in ("pre", "post"))
        self._layers = [_Layer(spec, tensors, number) for number in range(spec.layers)]
        adapter = f"{_TOWER}.vision_adapter.mlp"
        self._join = tensors.one(f"{adapter}.fc1.weight", spec.out, d * spec.join**2)
        self._adapt = tensors.one(f"{adapter}.fc2.weight", spec.out, spec.out)
        self._project_HO = tensors.one(_PROJECTOR, width, spec.out)
        self._turn_CE = _turns(spec).to(device)

    def rows(self, pixels: bytes) -> Tensor:
        """Of the red, then the green, then the blue plane of a tile, row by row: a byte for each number."""
        side = self.spec.side
        flat = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).to(self._device)
        # In bfloat16 whatever the model's dtype is, as transformers' Llama4ImageProcessor has it.
        scaled = (flat.view(1, 3, side, side).to(torch.bfloat16) * (1 / 255)).sub_(_HALF).div_(_HALF)
        patch = self.spec.patch
        patches_PI = functional.unfold(scaled.to(self._dtype), patch, stride=patch)[0].T
        x_CD = torch.cat([functional.linear(patches_PI, self._patches_DI), self._class_1D]) + self._places_CD
        x_CD = _normed(x_CD, self._first)
        for layer in self._layers:
            x_CD = layer(x_CD, self._turn_CE)
        joined = functional.gelu(functional.linear(self._joined(_normed(x_CD, self._last)[:-1]), self._join))
        return functional.linear(functional.gelu(functional.linear(joined, self._adapt)), self._project_HO)

    def _joined(self, x_PD: Tensor) -> Tensor:
        """`join` x `join` neighbours side by side: of each row of them those of a row of patches come first."""
        join, size = self.spec.join, self.spec.grid // self.spec.join
        blocks = x_PD.view(size, join, size, join, -1).permute(0, 2, 1, 3, 4)
        return blocks.reshape(size * size, -1)


def _normed(x: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], *norm, _EPS)


def _turns(spec: EncoderSpec) -> Tensor:
    """Complex, (C, E/2) of a head: the first half of its pairs turns by the column, the other by the row, both counted
    from 1; the class token is not turned (`Llama4VisionRotaryEmbedding`)."""
    half = spec.hidden // spec.heads // 2
    speeds = 1.0 / spec.theta ** (torch.arange(0, half, 2).float() / half)
    place_P = torch.arange(spec.grid**2)
    angles = [(at_P + 1)[:, None] * speeds for at_P in (place_P % spec.grid, place_P // spec.grid)]
    angle_PE = torch.cat(angles, -1)
    angle_CE = torch.cat([angle_PE, torch.zeros_like(angle_PE[:1])])
    return torch.polar(torch.ones_like(angle_CE), angle_CE)


def _turned(x_HCE: Tensor, turn_CE: Tensor) -> Tensor:
    """Neighbours of a head are a pair."""
    pairs = torch.view_as_complex(x_HCE.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn_CE).flatten(-2).type_as(x_HCE)
