"""Rows of pictures for a step: what its tokens of tiles are in the first layer, in the place of their embeddings, and
how rows turn where pictures have places of their own.

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
from afserve.models.vision.sections import SectionedRotary, TokenSpan
from afserve.models.vision.tower import Encoding, PictureEncoder
from afserve.tiles import KEPT_ROW_BYTES, PictureTile

_FEWEST = 4


class PictureRows:
    """Of a node: all its micro-batches share what is kept."""

    def __init__(self, encoder: PictureEncoder, sections: SectionedRotary | None, width: int) -> None:
        """`sections`: of a model whose rows turn by places in pictures; these have `width` numbers."""
        self._encoder, self._sections, self._width = encoder, sections, width
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._begun: set[bytes] = set()
        self.encoded = 0  # tiles

    def added(self, plan: StepPlan, step: StepInput) -> Generator[None, None, StepInput]:
        """The step with rows for its tokens of tiles. Yields within the encoding of a tile, so that other micro-batches
        have their turns."""
        if not any(chunk.sequence.request.tiles for chunk in plan.chunks):
            return step
        step = step if self._sections is None else _turning(plan, step, self._sections)
        at: list[int] = []
        parts: list[Tensor] = []
        for chunk, first in zip(plan.chunks, step.paged.starts[:-1], strict=True):
            for tile in chunk.sequence.request.tiles:
                begin = max(tile.start, chunk.start)
                end = min(tile.start + self._encoder.spec.row_count(tile), chunk.start + chunk.count)
                if begin < end:
                    rows_NH = yield from self._rows(tile)
                    parts.append(rows_NH[begin - tile.start : end - tile.start])
                    at += range(first + begin - chunk.start, first + end - chunk.start)
        if not parts:
            return step
        rows_PH, *deeper = torch.cat(parts).split(self._width, 1)
        at_P = torch.tensor(at, device=rows_PH.device)
        return replace(step, placed=PlacedRows(at_P, rows_PH, tuple(deeper)))

    def _rows(self, tile: PictureTile) -> Encoding:
        """Another micro-batch may have begun it."""
        while tile.name in self._begun:
            yield None
        if (rows_NH := self._kept.pop(tile.name, None)) is None:
            self._begun.add(tile.name)
            try:
                rows_NH = yield from self._encoder.encode_tile(tile)
            finally:
                self._begun.discard(tile.name)
            self.encoded += 1
        self._kept[tile.name] = rows_NH
        while len(self._kept) > _FEWEST and sum(rows.nbytes for rows in self._kept.values()) > KEPT_ROW_BYTES:
            self._kept.popitem(last=False)
        return rows_NH


def _turning(plan: StepPlan, step: StepInput, sections: SectionedRotary) -> StepInput:
    spans = [TokenSpan(chunk.sequence.request.tiles, chunk.start, chunk.count) for chunk in plan.chunks]
    turns = sections.rotary_rows(spans)
    further = tuple(replace(paged, turns=turns) for paged in step.further)
    return replace(step, paged=replace(step.paged, turns=turns), further=further)
