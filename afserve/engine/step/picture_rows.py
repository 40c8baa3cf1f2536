"""Rows of pictures for a step: what its tokens of tiles are in the first layer, in the place of their embeddings.

A tile is encoded when a step needs a row of it, and its rows are kept for as long as there is room: a chunk of a prompt
may end within it, and the next request may have it too. Shapes: P rows of pictures in a step, H hidden.
"""

from collections import OrderedDict
from collections.abc import Generator
from dataclasses import replace

import torch
from torch import Tensor

from afserve.engine.scheduling.step_plan import StepPlan
from afserve.engine.step.step_input import PlacedRows, StepInput
from afserve.models.vision.encoder import TileEncoder
from afserve.tiles import PictureTile

KEPT_BYTES = 64 << 20
_FEWEST = 4


class PictureRows:
    """Of a node: all its micro-batches share what is kept."""

    def __init__(self, encoder: TileEncoder) -> None:
        self._encoder = encoder
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self.encoded = 0  # tiles

    def added(self, plan: StepPlan, step: StepInput) -> Generator[None, None, StepInput]:
        """The step with rows for its tokens of tiles. Yields before each tile that is encoded, so that other
        micro-batches have their turns."""
        at: list[int] = []
        parts: list[Tensor] = []
        for chunk, first in zip(plan.chunks, step.paged.starts[:-1], strict=True):
            for tile in chunk.sequence.request.tiles:
                begin = max(tile.start, chunk.start)
                end = min(tile.start + self._encoder.spec.rows, chunk.start + chunk.count)
                if begin < end:
                    rows_NH = yield from self._rows(tile)
                    parts.append(rows_NH[begin - tile.start : end - tile.start])
                    at += range(first + begin - chunk.start, first + end - chunk.start)
        if not parts:
            return step
        rows_PH = torch.cat(parts)
        return replace(step, placed=PlacedRows(torch.tensor(at, device=rows_PH.device), rows_PH))

    def _rows(self, tile: PictureTile) -> Generator[None, None, Tensor]:
        if tile.name not in self._kept:
            yield None
        if (rows_NH := self._kept.pop(tile.name, None)) is None:
            rows_NH = self._encoder.rows(tile.pixels)
            self.encoded += 1
        self._kept[tile.name] = rows_NH
        while len(self._kept) > max(_FEWEST, KEPT_BYTES // rows_NH.nbytes):
            self._kept.popitem(last=False)
        return rows_NH
