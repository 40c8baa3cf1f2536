"""Rotary embedding in sections (M-RoPE, interleaved): rows of pictures turn by time, row and column, words by place.

All rows of a picture have one place in time, and what stands behind it goes on from the largest place in it: behind
pictures a token is turned by less than its position. Source: `get_rope_index` and `recomposition_frequencies` of
transformers' Qwen3.5-MoE. Shapes: N tokens of one sequence, T of all, D half a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from afserve.kernels.devices.opened import device_of
from afserve.kernels.paged import RotaryRows
from afserve.tiles import EncoderSpec, PictureTile, WholeEncoderSpec

_AXES = 3


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """`count` tokens of a sequence with these pictures, from position `start` on."""

    tiles: Sequence[PictureTile]
    start: int
    count: int


class SectionedRotary:
    """Over the tables of a model's layers."""

    def __init__(self, spec: WholeEncoderSpec, cos_PD: Tensor, sin_PD: Tensor) -> None:
        self._spec, self._cos_PD, self._sin_PD = spec, cos_PD, sin_PD
        axis_D = torch.zeros(cos_PD.shape[1], dtype=torch.int64)
        for axis in range(1, _AXES):
            axis_D[axis : _AXES * spec.sections[axis] : _AXES] = axis
        self._axis_D = axis_D.to(cos_PD.device)

    def rotary_rows(self, spans: Sequence[TokenSpan]) -> RotaryRows:
        """Of the rows of all spans, one after the other."""
        cos_PD, sin_PD = self._cos_PD, self._sin_PD
        longest = len(cos_PD) - 1
        place_3T = torch.cat([places(span, self._spec) for span in spans], 1).clamp_max_(longest)
        pinned = device_of(cos_PD.device).pinned(place_3T.numel(), torch.int64).view(place_3T.shape)
        pinned.copy_(place_3T)
        place_TD = pinned.to(cos_PD.device, non_blocking=True)[self._axis_D].T
        row_T = torch.arange(len(place_TD), device=cos_PD.device)
        return RotaryRows(cos_PD.gather(0, place_TD), sin_PD.gather(0, place_TD), row_T)


def places(span: TokenSpan, spec: EncoderSpec) -> Tensor:
    """Int64, (3, N): by time, row and column. `tiles` are in order of their `start`."""
    place_3N = torch.arange(span.start, span.start + span.count).repeat(_AXES, 1)
    for tile in span.tiles:
        tall, wide = spec.grid(tile)
        first, behind = (max(0, at - span.start) for at in (tile.start, tile.start + tall * wide))
        if (inside_3M := place_3N[:, first:behind]).numel():
            row_M = torch.arange(span.start + first, span.start + first + inside_3M.shape[1]) - tile.start
            inside_3M -= row_M
            inside_3M[1] += row_M // wide
            inside_3M[2] += row_M % wide
        place_3N[:, behind:] -= tall * wide - max(tall, wide)
    return place_3N
