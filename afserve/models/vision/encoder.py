"""The encoders of pictures, Llama 4's and Qwen3.5's: pixels in, rows for the first layer out.

Shapes: P patches, C the class token behind them (P + 1), D width of the tower, N rows, H the text model's width.
"""

import torch
from torch import Tensor
from torch.nn import functional

from afserve.models.vision.tower import (
    Encoding,
    PictureEncoder,
    ReadTensor,
    Tower,
    TowerLayer,
    TowerTensors,
    bytes_of,
    joined,
    patches,
    turns,
)
from afserve.tiles import EncoderSpec, PictureTile, TiledEncoderSpec, WholeEncoderSpec

_TOWER = "vision_model"
_PROJECTOR = "multi_modal_projector.linear_1.weight"
_HALF = 0.5  # mean and deviation of the pixels that both were trained with
_VISUAL = "model.visual"
_TILE_EPS, _WHOLE_EPS = 1e-5, 1e-6


def load_encoder(
    spec: EncoderSpec, width: int, read: ReadTensor, dtype: torch.dtype, device: torch.device
) -> PictureEncoder:
    """With weights in `dtype` on `device`; `width`: the text model's. Raises CheckpointError where a tensor is
    missing."""
    tensors = TowerTensors(read, dtype)
    if isinstance(spec, TiledEncoderSpec):
        return TileEncoder(spec, width, tensors, dtype, device)
    assert isinstance(spec, WholeEncoderSpec), spec
    return WholeEncoder(spec, width, tensors, dtype, device)


class TileEncoder:
    """Llama 4's."""

    def __init__(
        self,
        spec: TiledEncoderSpec,
        width: int,
        tensors: TowerTensors,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        d, grid = spec.hidden, spec.side // spec.patch
        self.spec, self._dtype, self._device, self._grid = spec, dtype, device, grid
        self._patches_DI = tensors.one(f"{_TOWER}.patch_embedding.linear.weight", d, 3 * spec.patch**2)
        self._class_1D = tensors.one(f"{_TOWER}.class_embedding", d)[None]
        self._places_CD = tensors.one(f"{_TOWER}.positional_embedding_vlm", grid**2 + 1, d)
        self._first, self._last = (tensors.both(f"{_TOWER}.layernorm_{n}", d) for n in ("pre", "post"))
        layers = [_layer_of_tiles(spec, tensors, number) for number in range(spec.layers)]
        self._tower = Tower(spec.heads, _TILE_EPS, layers)
        adapter = f"{_TOWER}.vision_adapter.mlp"
        self._join = tensors.one(f"{adapter}.fc1.weight", spec.out, d * spec.join**2)
        self._adapt = tensors.one(f"{adapter}.fc2.weight", spec.out, spec.out)
        self._project_HO = tensors.one(_PROJECTOR, width, spec.out)
        # Columns come first here, both are counted from 1, and the class token is not turned.
        place_P = torch.arange(grid**2)
        turn_PE = turns(place_P % grid + 1, place_P // grid + 1, spec.theta, d // spec.heads)
        self._turn_CE = torch.cat([turn_PE, torch.ones_like(turn_PE[:1])]).to(device)

    def encode_tile(self, tile: PictureTile) -> Encoding:
        # In bfloat16 whatever the model's dtype is, as transformers' Llama4ImageProcessor has it.
        scaled = (bytes_of(tile, self._device).to(torch.bfloat16) * (1 / 255)).sub_(_HALF).div_(_HALF)
        patch_PI = patches(scaled.to(self._dtype), self.spec.patch)
        x_CD = torch.cat([functional.linear(patch_PI, self._patches_DI), self._class_1D]) + self._places_CD
        x_CD = functional.layer_norm(x_CD, x_CD.shape[-1:], *self._first, _TILE_EPS)
        (x_CD,) = yield from self._tower.pass_layers(x_CD, self._turn_CE)
        x_PD = functional.layer_norm(x_CD, x_CD.shape[-1:], *self._last, _TILE_EPS)[:-1]
        side_NX = joined(x_PD, self._grid, self._grid, self.spec.join)
        adapted = functional.gelu(
            functional.linear(functional.gelu(functional.linear(side_NX, self._join)), self._adapt)
        )
        return functional.linear(adapted, self._project_HO)


def _layer_of_tiles(spec: TiledEncoderSpec, tensors: TowerTensors, number: int) -> TowerLayer:
    stem, d = f"{_TOWER}.model.layers.{number}", spec.hidden
    parts = [tensors.both(f"{stem}.self_attn.{name}_proj", d, d) for name in "qkv"]
    weights, biases = zip(*parts, strict=True)
    return TowerLayer(
        before=tensors.both(f"{stem}.input_layernorm", d),
        qkv=(torch.cat(weights), torch.cat(biases)),
        out=tensors.both(f"{stem}.self_attn.o_proj", d, d),
        behind=tensors.both(f"{stem}.post_attention_layernorm", d),
        up=tensors.both(f"{stem}.mlp.fc1", spec.inner, d),
        down=tensors.both(f"{stem}.mlp.fc2", d, spec.inner),
    )


class _Merger:
    def __init__(self, tensors: TowerTensors, stem: str, width: int, wide: int) -> None:
        self._join = tensors.both(f"{stem}.linear_fc1", wide, wide)
        self._project = tensors.both(f"{stem}.linear_fc2", width, wide)

    def __call__(self, side_NX: Tensor) -> Tensor:
        return functional.linear(functional.gelu(functional.linear(side_NX, *self._join)), *self._project)


class WholeEncoder:
    """Qwen3-VL's and Qwen3.5's."""

    def __init__(
        self,
        spec: WholeEncoderSpec,
        width: int,
        tensors: TowerTensors,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        d, wide = spec.hidden, spec.hidden * spec.join**2
        self.spec, self._dtype, self._device = spec, dtype, device
        embed = f"{_VISUAL}.patch_embed.proj"
        kernel = tensors.one(f"{embed}.weight", d, 3, spec.frames, spec.patch, spec.patch)
        self._patches = kernel.flatten(1), tensors.one(f"{embed}.bias", d)
        places = tensors.one(f"{_VISUAL}.pos_embed.weight", spec.places**2, d)
        self._places_1DSS = places.float().T.reshape(1, d, spec.places, spec.places)
        layers = [_layer_of_pictures(spec, tensors, number) for number in range(spec.layers)]
        self._tower = Tower(spec.heads, _WHOLE_EPS, layers, approximate="tanh")
        merger = f"{_VISUAL}.merger"
        self._norm = tensors.both(f"{merger}.norm", d)
        self._merger = _Merger(tensors, merger, width, wide)
        stems = [f"{_VISUAL}.deepstack_merger_list.{at}" for at in range(len(spec.deep))]
        self._deep = [
            (tensors.both(f"{one}.norm", wide), _Merger(tensors, one, width, wide)) for one in stems
        ]

    def encode_tile(self, tile: PictureTile) -> Encoding:
        spec = self.spec
        tall, wide = tile.tall // spec.patch, tile.wide // spec.patch
        place_P = torch.arange(tall * wide)
        turn_PE = turns(place_P // wide, place_P % wide, spec.theta, spec.hidden // spec.heads)
        x_PD, *deep = yield from self._tower.pass_layers(
            self._embedded(tile) + self._stretched(tall, wide), turn_PE.to(self._device), spec.deep
        )
        x_PD = functional.layer_norm(x_PD, x_PD.shape[-1:], *self._norm, _WHOLE_EPS)
        rows = [self._merger(joined(x_PD, tall, wide, spec.join))]
        for given_PD, (norm, merger) in zip(deep, self._deep, strict=True):
            side_NX = joined(given_PD, tall, wide, spec.join)
            rows.append(merger(functional.layer_norm(side_NX, side_NX.shape[-1:], *norm, _WHOLE_EPS)))
        return torch.cat(rows, 1)

    def _embedded(self, tile: PictureTile) -> Tensor:
        spec = self.spec
        scaled = bytes_of(tile, self._device).float().sub_(255 * _HALF).div_(255 * _HALF)
        patch_PI = patches(scaled.to(self._dtype), spec.patch)
        alike_PI = patch_PI.view(-1, 3, 1, spec.patch**2).expand(-1, -1, spec.frames, -1).flatten(1)
        return functional.linear(alike_PI, *self._patches)

    def _stretched(self, tall: int, wide: int) -> Tensor:
        """What is learned for places, between corners that stay corners."""
        size = tall, wide
        places = functional.interpolate(self._places_1DSS, size, mode="bilinear", align_corners=True)
        return places[0].flatten(1).T.to(self._dtype)


def _layer_of_pictures(spec: WholeEncoderSpec, tensors: TowerTensors, number: int) -> TowerLayer:
    """Heads of q and k are stored with the first members of all pairs in front."""
    stem, d = f"{_VISUAL}.blocks.{number}", spec.hidden
    size = d // spec.heads
    order = torch.arange(3 * d).view(3, spec.heads, size)
    order[:2] = order[:2].unflatten(-1, (2, size // 2)).transpose(-1, -2).flatten(-2)
    weight, bias = tensors.both(f"{stem}.attn.qkv", 3 * d, d)
    which = order.flatten().to(weight.device)
    return TowerLayer(
        before=tensors.both(f"{stem}.norm1", d),
        qkv=(weight[which], bias[which]),
        out=tensors.both(f"{stem}.attn.proj", d, d),
        behind=tensors.both(f"{stem}.norm2", d),
        up=tensors.both(f"{stem}.mlp.linear_fc1", spec.inner, d),
        down=tensors.both(f"{stem}.mlp.linear_fc2", d, spec.inner),
    )
