"""What towers of Llama 4 and Qwen3.5 have in common: pre-norm layers over patches that see each other, and joined rows.

One picture or tile at a time, so that its rows do not depend on what else is computed. Shapes: P patches, C what the
layers see (patches, and what a model puts beside them), D width of the tower, E numbers of a head.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from afserve.tiles import TURN_PATCHES, EncoderSpec, PictureTile

ReadTensor = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
"""`TensorSource.tensor`."""
Affine = tuple[Tensor, Tensor]
"""A weight, of a map (O, I) or a norm (D), and its bias."""
Encoding = Generator[None, None, Tensor]
"""Yields now and then, and returns (N, X): the rows of a picture as the text model reads them, side by side with those
that are added to them behind its first layers."""


_PAIRS = 1 << 26  # of patches that see each other in a head, in one turn


class PictureEncoder(Protocol):
    @property
    def spec(self) -> EncoderSpec: ...

    def encode_tile(self, tile: PictureTile) -> Encoding: ...


class TowerTensors:
    """Of a checkpoint, in one dtype."""

    def __init__(self, read: ReadTensor, dtype: torch.dtype) -> None:
        """`read` raises CheckpointError where a tensor is missing."""
        self._read, self._dtype = read, dtype

    def one(self, name: str, *shape: int) -> Tensor:
        return self._read(name, shape, self._dtype)

    def both(self, stem: str, *shape: int) -> Affine:
        return self.one(f"{stem}.weight", *shape), self.one(f"{stem}.bias", shape[0])


@dataclass(frozen=True, slots=True)
class TowerLayer:
    """`qkv` stacks heads of q, then k, then v; neighbours of a head of q and k are a pair that turns."""

    before: Affine
    qkv: Affine
    out: Affine
    behind: Affine
    up: Affine
    down: Affine


class Tower:
    def __init__(self, heads: int, eps: float, layers: list[TowerLayer], approximate: str = "none") -> None:
        """`approximate`: of GELU."""
        self._heads, self._eps, self._layers, self._approximate = heads, eps, layers, approximate

    def pass_layers(
        self, x_CD: Tensor, turn_CE: Tensor, deep: Sequence[int] = ()
    ) -> Generator[None, None, list[Tensor]]:
        """What the last layer gives, and what the layers `deep` do. Yields before each part of a layer. `turn_CE` are
        complex, a number for each pair of a head."""
        kept: dict[int, Tensor] = {}
        rows, width = x_CD.shape
        parts = _slices(rows, TURN_PATCHES)
        qkv_3HCE = x_CD.new_empty(3, self._heads, rows, width // self._heads)
        for number, layer in enumerate(self._layers):
            for part in parts:
                yield None
                qkv_3HCE[:, :, part] = self._looked(layer, x_CD[part], turn_CE[part])
            through_CD = torch.empty_like(x_CD)
            for part in parts:
                y_HRE = yield from self._seen(qkv_3HCE[0, :, part], *qkv_3HCE[1:])
                through_CD[part] = self._through(layer, x_CD[part], y_HRE.transpose(0, 1).flatten(1))
            x_CD = through_CD
            if number in deep:
                kept[number] = x_CD
        return [x_CD, *(kept[number] for number in deep)]

    def _looked(self, layer: TowerLayer, x_RD: Tensor, turn_RE: Tensor) -> Tensor:
        """(3, H, R, E) of so many rows: what they look for, are found by and give."""
        normed_RD = functional.layer_norm(x_RD, x_RD.shape[-1:], *layer.before, self._eps)
        qkv_RX = functional.linear(normed_RD, *layer.qkv)
        q, k, v = qkv_RX.view(len(x_RD), 3, self._heads, -1).permute(1, 2, 0, 3)
        return torch.stack([_turned(q, turn_RE), _turned(k, turn_RE), v])

    @staticmethod
    def _seen(q_HRE: Tensor, k_HCE: Tensor, v_HCE: Tensor) -> Generator[None, None, Tensor]:
        """(H, R, E): what so many rows see of all, head by head where a picture is large."""
        (heads, rows, _), every = q_HRE.shape, k_HCE.shape[1]
        y_HRE = torch.empty_like(q_HRE)
        for some in _slices(heads, max(1, _PAIRS // (rows * every))):
            yield None
            given = q_HRE[None, some], k_HCE[None, some], v_HCE[None, some]
            y_HRE[some] = functional.scaled_dot_product_attention(*given)[0]
        return y_HRE

    def _through(self, layer: TowerLayer, x_RD: Tensor, y_RD: Tensor) -> Tensor:
        """So many rows behind the layer."""
        x_RD = x_RD + functional.linear(y_RD, *layer.out)
        normed_RD = functional.layer_norm(x_RD, x_RD.shape[-1:], *layer.behind, self._eps)
        inner = functional.gelu(functional.linear(normed_RD, *layer.up), approximate=self._approximate)
        return x_RD + functional.linear(inner, *layer.down)


def _slices(count: int, each: int) -> list[slice]:
    return [slice(at, min(at + each, count)) for at in range(0, count, each)]


def joined(x_PD: Tensor, tall: int, wide: int, join: int) -> Tensor:
    """`join` x `join` neighbours of `tall` x `wide` patches side by side: of each row of them those of a row of patches
    come first."""
    blocks = x_PD.view(tall // join, join, wide // join, join, -1).permute(0, 2, 1, 3, 4)
    return blocks.reshape(tall * wide // join**2, -1)


def patches(pixels_3YX: Tensor, patch: int) -> Tensor:
    """(P, 3 * patch^2), row by row; of a patch one colour after the other."""
    return functional.unfold(pixels_3YX[None], patch, stride=patch)[0].T


def bytes_of(tile: PictureTile, device: torch.device) -> Tensor:
    """(3, Y, X) of uint8."""
    flat = torch.frombuffer(bytearray(tile.pixels), dtype=torch.uint8).to(device)
    return flat.view(3, tile.tall, tile.wide)


def turns(row_P: Tensor, column_P: Tensor, theta: float, size: int) -> Tensor:
    """Complex, (P, E/2) of a head of `size` numbers: the first half of its pairs turns by `row_P`, the other by
    `column_P`."""
    half = size // 2
    speeds = 1.0 / theta ** (torch.arange(0, half, 2).float() / half)
    angle_PE = torch.cat([row_P[:, None] * speeds, column_P[:, None] * speeds], -1)
    return torch.polar(torch.ones_like(angle_PE), angle_PE)


def _turned(x_HCE: Tensor, turn_CE: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x_HCE.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn_CE).flatten(-2).type_as(x_HCE)
