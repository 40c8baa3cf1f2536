"""When tiles are encoded: before a step may have them, in turns between steps of others, for who still wants them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from afserve.clock import FakeClock
from afserve.engine.step.meter import Meter
from afserve.engine.step.picture_rows import PictureRows
from afserve.tiles import PictureTile
from afserve.tracing.trace import PICTURES, Trace

ROWS, TURNS = 3, 2
SMALL, LARGE = 3, 12  # bytes


class _Encoder:
    """A turn takes a second; larger tiles than a small one have as many times more of them."""

    spec = SimpleNamespace(row_count=lambda tile: ROWS)

    def __init__(self, clock):
        self._clock = clock

    def encode_tile(self, tile):
        for _ in range(TURNS * len(tile.pixels) // SMALL):
            self._clock.advance(1.0)
            yield None
        return torch.full((ROWS, 2), float(tile.start))


def model_of(encoder) -> Any:
    return SimpleNamespace(encoder=encoder, sections=None, spec=SimpleNamespace(hidden=2))


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def meter(clock):
    return Meter(clock, Trace("attention-0"))


@pytest.fixture
def pictures(clock):
    return PictureRows(model_of(_Encoder(clock)))


def prompt(*starts, size=SMALL):
    tiles = tuple(PictureTile(start, 1, bytes([start] * size)) for start in starts)
    return SimpleNamespace(request=SimpleNamespace(tiles=tiles), cancelled=False)


def turns_of(pictures, meter, *, idle=True):
    count = 0
    while pictures.advance(meter, idle=idle):
        count += 1
    return count


def test_a_chunk_ends_before_the_first_tile_that_is_missing(pictures, meter):
    one = prompt(4, 9)
    assert pictures.reach(one, 0, 3) == 3 and not turns_of(pictures, meter), "no tile, and none was asked for"
    assert pictures.reach(one, 0, 20) == 4 == pictures.reach(one, 4, 20)
    assert turns_of(pictures, meter) == TURNS + 1
    assert pictures.reach(one, 0, 20) == pictures.reach(one, 6, 20) == 9, "the second tile is asked for now"
    assert pictures.reach(one, 12, 20) == 20, "whose rows were found in the cache"
    assert turns_of(pictures, meter) == TURNS + 1 and pictures.reach(one, 0, 20) == 20
    assert meter.pictures == 2


def test_others_have_half_of_the_time(pictures, meter, clock):
    pictures.reach(prompt(0), 0, 3)
    assert pictures.advance(meter, idle=False)
    assert not pictures.advance(meter, idle=False), "it took a second, and rests for one"
    clock.advance(0.9)
    assert not pictures.advance(meter, idle=False)
    clock.advance(0.1)
    assert pictures.advance(meter, idle=False)
    assert turns_of(pictures, meter) == TURNS - 1 and meter.pictures == 1, "nobody else computes"


def test_what_nobody_wants_any_more_is_left(pictures, meter):
    one, other = prompt(0), prompt(5)
    pictures.reach(one, 0, 3)
    pictures.reach(other, 0, 8)
    assert pictures.advance(meter, idle=True)
    one.cancelled = True
    assert turns_of(pictures, meter) == TURNS + 1 and meter.pictures == 1
    assert pictures.reach(other, 0, 8) == 8
    assert meter.encoding == meter.busy == 1 + TURNS, "that of what was left counts, too"
    assert {(track, name) for track, name, *_ in meter.trace.slices} == {(PICTURES, "encode")}


def test_small_ones_have_half_of_the_time_of_a_large_one_in_turns(pictures, meter, clock):
    """The smallest of those with a quarter of its pixels; one that is hardly smaller waits, and no other overtakes the
    first for ever."""
    large, middle, first, second = prompt(0, size=LARGE), prompt(3, size=LARGE - 3), prompt(6), prompt(9)
    order, waiting = [], {0: large, 3: middle, 6: first, 9: second}
    for start in (0, 3):
        pictures.reach(waiting[start], 0, 20)
    pictures.advance(meter, idle=True)
    for start in (6, 9):
        pictures.reach(waiting[start], 0, 20)
    while pictures.advance(meter, idle=True):
        for start in [start for start, one in waiting.items() if pictures.reach(one, 0, 20) == 20]:
            order.append((start, clock.now()))
            del waiting[start]
    assert order == [(6, 6.0), (9, 11.0), (0, 12.0), (3, 18.0)], (
        "8, 6, 2 and 2 turns, of which the first was over"
    )


def test_the_last_tiles_are_kept_and_those_of_before_as_long_as_there_is_room(pictures, meter, monkeypatch):
    monkeypatch.setattr("afserve.engine.step.picture_rows.KEPT_ROW_BYTES", 1)
    many = prompt(*range(0, 18, ROWS))
    for start in range(0, 18, ROWS):
        assert pictures.reach(many, start, 18) == start
        turns_of(pictures, meter)
    assert [pictures.reach(many, start, start + ROWS) - start for start in range(0, 18, ROWS)] == [
        0,
        0,
        3,
        3,
        3,
        3,
    ]
