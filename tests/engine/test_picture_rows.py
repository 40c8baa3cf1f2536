"""When tiles are encoded: before a step may have them, in turns between steps of others, for who still wants them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from afserve.clock import FakeClock
from afserve.engine.step.picture_rows import PictureRows
from afserve.tiles import PictureTile

ROWS, TURNS = 3, 2


class _Encoder:
    """A turn takes a second."""

    spec = SimpleNamespace(row_count=lambda tile: ROWS)

    def __init__(self, clock):
        self._clock = clock

    def encode_tile(self, tile):
        for _ in range(TURNS):
            self._clock.advance(1.0)
            yield None
        return torch.full((ROWS, 2), float(tile.start))


def model_of(encoder) -> Any:
    return SimpleNamespace(encoder=encoder, sections=None, spec=SimpleNamespace(hidden=2))


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def pictures(clock):
    return PictureRows(model_of(_Encoder(clock)))


def prompt(*starts):
    tiles = tuple(PictureTile(start, 1, bytes([start] * 3)) for start in starts)
    return SimpleNamespace(request=SimpleNamespace(tiles=tiles), cancelled=False)


def turns_of(pictures, clock, *, idle=True):
    count = 0
    while pictures.advance(clock.now, idle=idle):
        count += 1
    return count


def test_a_chunk_ends_before_the_first_tile_that_is_missing(pictures, clock):
    one = prompt(4, 9)
    assert pictures.reach(one, 0, 3) == 3 and not turns_of(pictures, clock), "no tile, and none was asked for"
    assert pictures.reach(one, 0, 20) == 4 == pictures.reach(one, 4, 20)
    assert turns_of(pictures, clock) == TURNS + 1
    assert pictures.reach(one, 0, 20) == pictures.reach(one, 6, 20) == 9, "the second tile is asked for now"
    assert pictures.reach(one, 12, 20) == 20, "whose rows were found in the cache"
    assert turns_of(pictures, clock) == TURNS + 1 and pictures.reach(one, 0, 20) == 20
    assert pictures.encoded == 2


def test_others_have_half_of_the_time(pictures, clock):
    pictures.reach(prompt(0), 0, 3)
    assert pictures.advance(clock.now, idle=False)
    assert not pictures.advance(clock.now, idle=False), "it took a second, and rests for one"
    clock.advance(0.9)
    assert not pictures.advance(clock.now, idle=False)
    clock.advance(0.1)
    assert pictures.advance(clock.now, idle=False)
    assert turns_of(pictures, clock) == TURNS - 1 and pictures.encoded == 1, "nobody else computes"


def test_what_nobody_wants_any_more_is_left(pictures, clock):
    one, other = prompt(0), prompt(5)
    pictures.reach(one, 0, 3)
    pictures.reach(other, 0, 8)
    assert pictures.advance(clock.now, idle=True)
    one.cancelled = True
    assert turns_of(pictures, clock) == 1 + TURNS + 1 and pictures.encoded == 1
    assert pictures.reach(other, 0, 8) == 8


def test_the_last_tiles_are_kept_and_those_of_before_as_long_as_there_is_room(pictures, clock, monkeypatch):
    monkeypatch.setattr("afserve.engine.step.picture_rows.KEPT_ROW_BYTES", 1)
    many = prompt(*range(0, 18, ROWS))
    for start in range(0, 18, ROWS):
        assert pictures.reach(many, start, 18) == start
        turns_of(pictures, clock)
    assert [pictures.reach(many, start, start + ROWS) - start for start in range(0, 18, ROWS)] == [
        0,
        0,
        3,
        3,
        3,
        3,
    ]
