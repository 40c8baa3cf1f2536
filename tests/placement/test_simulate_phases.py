"""Layouts of prefill and decode, played on requests: what is served, what it takes, and where the highest rate is."""

import math
from dataclasses import replace

import pytest

from afserve.placement.planner.phase_stages import IDLE, Apart, Pieces, Step, Together, Work
from afserve.placement.planner.simulate_phases import (
    Asked,
    Layout,
    Phases,
    Targets,
    at_rate,
    attainment,
    goodput,
)
from bench.goodput import AT_TILES, BY_ROWS, tables

STAGES = tables("h200")
REQUESTS = [Asked(0.05 * i, 200 + 137 * (i % 7), 1 + 11 * (i % 5)) for i in range(120)]
LAYOUTS = {
    "mixed": Layout(128, both=(Together(STAGES, 8), Together(STAGES, 8))),
    "two copies": Layout(
        1024, reads=(Together(STAGES, 8),), decodes=(Together(STAGES, 8),), first_there=True
    ),
    "shared": Layout(1024, reads=(Apart(STAGES, 4, 8),), decodes=(Apart(STAGES, 4, 8),), pieces=AT_TILES),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_request_is_served_once_and_in_order(name):
    layout = LAYOUTS[name]
    run = Phases(layout, REQUESTS)
    assert sorted(run.play()) == list(range(len(REQUESTS)))
    for asked, times in zip(REQUESTS, run.times, strict=True):
        assert asked.at < times.first <= times.ended < math.inf
        assert asked.answer == 1 or times.first < times.ended
    again = Phases(layout, REQUESTS)
    list(again.play())
    assert again.times == run.times


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_pool_gives_its_memory_back(name):
    run = Phases(LAYOUTS[name], REQUESTS)
    list(run.play())
    for station in run._stations:
        assert station.free == pytest.approx(station.pool.kv_tokens) and station.running == 0
        assert not station.waiting and not station.queued


def test_a_request_that_never_fits_misses_its_targets():
    huge = [replace(REQUESTS[0], prompt=int(1e9)), *REQUESTS[1:4]]
    assert attainment(LAYOUTS["mixed"], huge, Targets(1e6, 1e6), 0.0) <= 0.75


def test_goodput_is_the_highest_rate_that_holds():
    layout, targets = LAYOUTS["mixed"], Targets(1.0, 0.05)
    many = [Asked(0.1 * i, 500, 20) for i in range(1500)]
    rate = goodput(layout, many, targets, seconds=4.0)
    assert rate > 1
    assert attainment(layout, at_rate(many, rate, 4.0), targets, 0.9) >= 0.9
    assert attainment(layout, at_rate(many, 1.1 * rate, 4.0), targets, 0.9) < 0.9
    assert goodput(layout, many, targets, above=2 * rate, seconds=4.0) == 0.0
    assert goodput(layout, many, Targets(1.0, 0.001), seconds=4.0) == 0.0, "no step is so short"


def test_prompts_and_decoding_hurt_each_other_at_shared_experts_as_pieces_say():
    decode, prefill = Apart(STAGES, 4, 8), Apart(STAGES, 4, 8)
    running, reading = Work(64, 256, 2000.0), Work(tokens=4096, pairs=4096**2 / 2, all_tokens=4 * 4096)
    alone, read_alone = decode.step(running), prefill.step(reading)
    both = {}
    for pieces in (AT_TILES, BY_ROWS):
        read = prefill.step(reading, alone, pieces)
        both[pieces.by_rows] = decode.step(running, read, pieces).seconds
        assert read.seconds >= read_alone.seconds and read.piece > 0
    assert alone.seconds < both[False] <= both[True]
    assert decode.step(running, IDLE, AT_TILES).seconds == alone.seconds


def test_a_piece_of_rows_is_longer_than_one_cut_at_tiles():
    pool, other = Apart(STAGES, 4, 8), Step(0.03, 0.5, 0.1)
    work = Work(tokens=8192, pairs=8192**2 / 2, all_tokens=4 * 8192)
    pieces = Pieces(100e-6, 0.2, 1 / 16, by_rows=False)
    assert pool.step(work, other, pieces).piece == pytest.approx(100e-6, rel=0.02)
    assert pool.step(work, other, replace(pieces, by_rows=True)).piece > 300e-6, "it reads the experts again"
