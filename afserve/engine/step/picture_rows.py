"""Rows of pictures for a step: what its tokens of tiles are in the first layer, in the place of their embeddings, and
how rows turn where pictures have places of their own.

A tile is encoded before a step may have a row of it, in turns between the steps of others, and its rows are kept for as
long as there is room: a chunk of a prompt may end within it, and the next request may have it too. `EncodingTurns` says
which tile is next. Shapes: P rows of pictures in a step, H hidden.
"""

from collections import OrderedDict
from collections.abc import Generator
from dataclasses import replace
from math import inf

import torch
from torch import Tensor

from afserve.engine.scheduling.sequence import Sequence
from afserve.engine.scheduling.step_plan import StepPlan
from afserve.engine.step.encoding_turns import EncodingTurns
from afserve.engine.step.meter import Meter
from afserve.engine.step.step_input import PlacedRows, StepInput
from afserve.models.decoder import AttentionModel
from afserve.models.vision.sections import SectionedRotary, TokenSpan
from afserve.models.vision.tower import Encoding, PictureEncoder
from afserve.tiles import KEPT_ROW_BYTES, PictureTile

_FEWEST = 4


class PictureRows:
    """Of a node: all its micro-batches share what is kept."""

    def __init__(self, model: AttentionModel) -> None:
        """Of a model without an encoder no request has tiles."""
        self._model, self._sections, self._width = model, model.sections, model.spec.hidden
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._turns = EncodingTurns(self._encode)
        self._rests_until = -inf

    def reach(self, sequence: Sequence, start: int, end: int) -> int:
        """How far its tokens from `start` to `end` can be computed now. The first tile on the way that is not there is
        asked for."""
        for tile in sequence.request.tiles:
            needed = start < self._end(tile) and tile.start < end
            if needed and tile.name not in self._kept:
                self._turns.ask(tile, sequence)
                return max(start, tile.start)
        return end

    def advance(self, meter: Meter, *, idle: bool) -> bool:
        """Whether it has encoded a part of a tile: where the node is not `idle`, in half of the time at most."""
        if not self._turns:
            return False
        begun = meter.now()
        if begun < self._rests_until and not idle:
            return False
        if ended := self._turns.advance(meter.now):
            self._keep(*ended)
        end = meter.encoded(begun, whole=ended is not None)
        self._rests_until = end + (end - begun)
        return True

    def added(self, plan: StepPlan, step: StepInput) -> Generator[None, None, StepInput]:
        """The step with rows for its tokens of tiles, which end where `reach` said."""
        if not any(chunk.sequence.request.tiles for chunk in plan.chunks):
            return step
        step = step if self._sections is None else _turning(plan, step, self._sections)
        at: list[int] = []
        parts: list[Tensor] = []
        for chunk, first in zip(plan.chunks, step.paged.starts[:-1], strict=True):
            for tile in chunk.sequence.request.tiles:
                begin = max(tile.start, chunk.start)
                end = min(self._end(tile), chunk.start + chunk.count)
                if begin < end:
                    self._kept.move_to_end(tile.name)
                    parts.append(self._kept[tile.name][begin - tile.start : end - tile.start])
                    at += range(first + begin - chunk.start, first + end - chunk.start)
        if not parts:
            return step
        rows_PH, *deeper = torch.cat(parts).split(self._width, 1)
        at_P = torch.tensor(at, device=rows_PH.device)
        yield from ()  # nobody is waited for
        return replace(step, placed=PlacedRows(at_P, rows_PH, tuple(deeper)))

    @property
    def _encoder(self) -> PictureEncoder:
        assert self._model.encoder is not None, "`RequestLimits` lets no tile in"
        return self._model.encoder

    def _encode(self, tile: PictureTile) -> Encoding:
        return self._encoder.encode_tile(tile)

    def _end(self, tile: PictureTile) -> int:
        return tile.start + self._encoder.spec.row_count(tile)

    def _keep(self, name: bytes, rows_NX: Tensor) -> None:
        self._kept[name] = rows_NX
        while len(self._kept) > _FEWEST and sum(rows.nbytes for rows in self._kept.values()) > KEPT_ROW_BYTES:
            self._kept.popitem(last=False)


def _turning(plan: StepPlan, step: StepInput, sections: SectionedRotary) -> StepInput:
    spans = [TokenSpan(chunk.sequence.request.tiles, chunk.start, chunk.count) for chunk in plan.chunks]
    turns = sections.rotary_rows(spans)
    further = tuple(replace(paged, turns=turns) for paged in step.further)
    return replace(step, paged=replace(step.paged, turns=turns), further=further)
