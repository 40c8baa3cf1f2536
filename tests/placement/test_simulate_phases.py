"""Layouts of prefill and decode, played on requests: what is served, what it takes, and where the highest rate is."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afserve.placement.planner.perf.drafting import DRAFTERS, NO_DRAFTS, Drafts
from afserve.placement.planner.perf.engine import PLAIN
from afserve.placement.planner.simulate.goodput import at_rate, goodput, holds
from afserve.placement.planner.simulate.phase_stages import (
    IDLE,
    Apart,
    Beside,
    Pieces,
    Together,
    longest_wait,
    pieces_on_gpu,
    together,
)
from afserve.placement.planner.simulate.phase_tables import StageTables, StepTimes, Work, interpolate
from afserve.placement.planner.simulate.phases import GoodputTargets, PhaseLayout, PhasesRun
from afserve.placement.planner.simulate.search_phases import (
    HOSTED,
    KINDS,
    SHARED,
    TWO_COPIES,
    PhasePool,
    PlayedLoad,
    described,
    replay,
    search,
)
from afserve.placement.planner.simulate.station import SimulatedRequest
from bench.goodput import tables

STAGES = tables("h200")
ON_GPU = pieces_on_gpu(STAGES.chip, 7168, "fp8", 1 / 16)
BY_ROWS = Pieces(200e-6, 0.2, 1 / 16)
REQUESTS = [SimulatedRequest(0.05 * i, 200 + 137 * (i % 7), 1 + 11 * (i % 5)) for i in range(120)]
LAYOUTS = {
    "mixed": PhaseLayout(128, both=(Together(STAGES, 8), Together(STAGES, 8))),
    "two copies": PhaseLayout(
        1024, reads=(Together(STAGES, 8),), decodes=(Together(STAGES, 8),), first_there=True
    ),
    "shared": PhaseLayout(1024, reads=(Apart(STAGES, 4, 8),), decodes=(Apart(STAGES, 4, 8),), pieces=ON_GPU),
    "on every device": PhaseLayout(
        1024, reads=(Beside(STAGES, 6, 16),), decodes=(Beside(STAGES, 10, 16),), pieces=ON_GPU
    ),
}


def attainment(layout: PhaseLayout, asked: list[SimulatedRequest], targets: GoodputTargets) -> float:
    """The share of requests that met both targets."""
    run = PhasesRun(layout, asked)
    met = sum(targets.met(asked[number], run.times[number]) for number in run.play())
    return 1 - (len(asked) - met) / len(asked)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_request_is_served_once_and_in_order(name):
    layout = LAYOUTS[name]
    run = PhasesRun(layout, REQUESTS)
    assert sorted(run.play()) == list(range(len(REQUESTS)))
    for asked, times in zip(REQUESTS, run.times, strict=True):
        assert asked.at < times.first <= times.ended < math.inf
        assert asked.answer == 1 or times.first < times.ended
    again = PhasesRun(layout, REQUESTS)
    list(again.play())
    assert again.times == run.times


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_pool_gives_its_memory_back(name):
    run = PhasesRun(LAYOUTS[name], REQUESTS)
    list(run.play())
    for station in run._stations:
        assert station.free == pytest.approx(station.pool.kv_tokens) and station.running == 0
        assert not station.waiting and not station.queued


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(8, 10)), max_size=5))
def test_pools_that_change_size_serve_every_request_once(sizes):
    run, ended = PhasesRun(LAYOUTS["shared"], REQUESTS), []
    for number, (reads, decodes, experts) in enumerate(sizes):
        ended += run.play(1.1 * (number + 1))
        run.resize(Apart(STAGES, reads, experts), Apart(STAGES, decodes, experts))
    ended += run.play()
    assert sorted(ended) == list(range(len(REQUESTS))) and run.over and run.came == len(REQUESTS)
    assert all(one.at < times.first <= times.ended for one, times in zip(REQUESTS, run.times, strict=True))
    decodes = run._decodes[0]
    assert decodes.free == pytest.approx(decodes.pool.kv_tokens) and not run.queued and not run.decoding


def test_more_readers_are_of_use_at_once_and_fewer_are_missed():
    """For what comes later: a prompt stays where it was sent, unless its reader goes."""
    crowd = [SimulatedRequest(0.1 * number, 3000, 4) for number in range(40)]
    last = []
    for readers in (2, 4, 1):
        run = PhasesRun(
            PhaseLayout(1024, reads=(Apart(STAGES, 2, 32),), decodes=(Apart(STAGES, 4, 32),), pieces=ON_GPU),
            crowd,
        )
        list(run.play(0.5))
        run.resize(Apart(STAGES, readers, 32), Apart(STAGES, 4, 32))
        list(run.play())
        last.append(max(times.first for times in run.times))
    assert last[1] < last[0] < last[2]


def test_a_request_that_never_fits_misses_its_targets():
    huge = [replace(REQUESTS[0], prompt=int(1e9)), *REQUESTS[1:4]]
    assert attainment(LAYOUTS["mixed"], huge, GoodputTargets(1e6, 1e6)) <= 0.75


@pytest.mark.slow
@pytest.mark.parametrize("guess", [0.1, 20.0, 3000.0])
def test_goodput_is_the_highest_rate_that_holds(guess):
    layout, targets = LAYOUTS["mixed"], GoodputTargets(1.0, 0.05)
    many = [SimulatedRequest(0.1 * i, 500, 20) for i in range(400)]
    rate = goodput(layout, many, targets, guess=guess)
    assert rate > 1
    assert attainment(layout, at_rate(many, rate), targets) >= 0.9
    assert attainment(layout, at_rate(many, 1.1 * rate), targets) < 0.9
    assert goodput(layout, many, targets, above=2 * rate) == 0.0
    assert goodput(layout, many[:100], GoodputTargets(1.0, 0.001)) == 0.0, "no step is so short"


def test_prompts_and_decoding_hurt_each_other_at_shared_experts_as_pieces_say():
    decode, prefill = Apart(STAGES, 4, 8), Apart(STAGES, 4, 8)
    running, reading = Work(64, 256, 2000.0), Work(tokens=4096, pairs=4096**2 / 2, all_tokens=4 * 4096)
    alone, read_alone = decode.step(running), prefill.step(reading)
    both = {}
    for pieces in (ON_GPU, BY_ROWS):
        read = prefill.step(reading, alone, pieces)
        both[pieces.by_rows] = decode.step(running, read, pieces).seconds
        assert read.seconds >= read_alone.seconds and read.piece > 0
    assert alone.seconds < both[False] <= both[True]
    assert decode.step(running, IDLE, ON_GPU).seconds == alone.seconds


def test_a_floor_for_prompts_slows_decoding_only_by_what_prompts_use():
    decode = Apart(STAGES, 4, 8)
    running, some, much = Work(64, 256, 2000.0), StepTimes(0.1, 0.05, 0.0), StepTimes(0.1, 0.9, 0.0)
    low, high = replace(ON_GPU, floor=1 / 16), replace(ON_GPU, floor=0.5)
    assert decode.step(running, some, low).seconds == decode.step(running, some, high).seconds
    assert decode.step(running, much, low).seconds < decode.step(running, much, high).seconds
    prefill, reading = Apart(STAGES, 4, 8), Work(tokens=4096, pairs=4096**2 / 2, all_tokens=4 * 4096)
    busy = StepTimes(0.03, 0.95, 0.0)
    assert prefill.step(reading, busy, low).seconds > prefill.step(reading, busy, high).seconds


def test_the_pool_that_decodes_draws_a_first_token_between_two_steps():
    """From the row that came with the prompt: no pass over the experts is before it."""
    one = SimulatedRequest(0.0, 1600, 41)
    run = PhasesRun(LAYOUTS["shared"], [one])
    list(run.play())
    (times,) = run.times
    read, decode = (station.pool for station in (run._reads[0], run._decodes[0]))
    steps, done = 0.0, 0
    while done < one.prompt:
        tokens = min(1024, one.prompt - done)
        pairs = tokens * done + tokens * tokens // 2
        steps += read.step(Work(tokens=tokens, pairs=pairs, all_tokens=tokens)).seconds
        done += tokens
    assert times.first == pytest.approx(steps + STAGES.hand_over(one.prompt), rel=1e-9)
    further = sum(decode.step(Work(1, 1, one.prompt + 1 + i)).seconds for i in range(40))
    assert times.ended - times.first == pytest.approx(further, rel=1e-9)


def test_tokens_that_filled_no_block_are_rows_of_the_first_step():
    run = PhasesRun(LAYOUTS["shared"], [SimulatedRequest(0.0, 1615, 2)])
    list(run.play())
    (times,), decode = run.times, run._decodes[0].pool
    rows = 1 + 1615 % 16
    step = decode.step(Work(-(-rows // decode.ranks), rows, 1616.0))
    assert times.ended - times.first == pytest.approx(step.seconds, rel=1e-9)
    assert step.seconds > decode.step(Work(1, 1, 1616.0)).seconds


def test_ranks_that_read_step_each_by_itself_and_share_the_experts():
    few, many = (
        [SimulatedRequest(0.0, 1000, 1)],
        [SimulatedRequest(0.0, 1000, 1), SimulatedRequest(0.0, 3000, 1)],
    )
    firsts = []
    for asked in (few, many):
        run = PhasesRun(LAYOUTS["shared"], asked)
        assert [one.ranks for one in run._reads] == [1] * 4
        list(run.play())
        firsts.append(run.times[0].first)
    alone, beside = firsts
    assert alone <= beside < 1.5 * alone, "it does not wait for the longer prompt of another rank"
    locked = PhasesRun(
        LAYOUTS["two copies"],
        [SimulatedRequest(0.0, 500, 1), SimulatedRequest(0.001, 1000, 1), SimulatedRequest(0.002, 600, 1)],
    )
    list(locked.play())
    assert locked.times[1].first == locked.times[2].first, "ranks with their own experts do"


def test_what_ranks_take_of_the_experts_adds_up_to_what_they_take_together():
    pool = Apart(STAGES, 4, 8)
    one = pool.step(Work(tokens=2048, pairs=2048**2 / 2, all_tokens=4 * 2048))
    all_ = together([one] * 4 + [IDLE])
    assert all_.experts == pytest.approx(4 * one.experts) and all_.links == pytest.approx(4 * one.links)
    assert 0 < all_.experts <= 1
    assert together([StepTimes(0.1, 0.7, 0.6, 0.1), StepTimes(0.2, 0.7, 0.6, 0.3)]) == StepTimes(
        0.2, 1.0, 1.0, 0.3
    )
    assert together([IDLE, IDLE]) is IDLE


def recorded():
    """Arrivals of a seed, and what the first, plain implementation of this simulation said of them."""
    rng, at, asked = random.Random(7), 0.0, []
    for _ in range(600):
        at += rng.expovariate(40)
        asked.append(
            SimulatedRequest(at, 1 + int(rng.expovariate(1 / 1200)), 1 + int(rng.expovariate(1 / 200)))
        )
    return asked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "firsts", "ends", "order"),
    [
        ("mixed", 5245.976729810965, 9755.45893716045, 64496442),
        ("two copies", 4887.056432061232, 8749.846325696946, 65578289),
    ],
)
def test_times_are_those_of_the_plain_implementation(name, firsts, ends, order):
    """Which gave caches all that weights leave, as an engine that is not this project's."""
    other = replace(STAGES.setting, engine=replace(PLAIN, own=False))
    pool = Together(StageTables(other, STAGES.chip), 8)
    layout = {
        "mixed": PhaseLayout(128, both=(pool, pool)),
        "two copies": PhaseLayout(1024, reads=(pool,), decodes=(pool,), first_there=True),
    }[name]
    run = PhasesRun(layout, recorded())
    ended = list(run.play())
    assert sum(times.first for times in run.times) == pytest.approx(firsts, rel=1e-12)
    assert sum(times.ended for times in run.times) == pytest.approx(ends, rel=1e-12)
    assert sum(place * number for place, number in enumerate(ended)) == order


@pytest.mark.by_day(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_that_stops_early_says_what_the_whole_run_says(name):
    asked, said = recorded()[:200], set()
    for rate in (2.0, 20.0, 80.0):
        for targets in (GoodputTargets(0.5, 0.02), GoodputTargets(2.0, 0.06), GoodputTargets(20.0, 0.5)):
            at = at_rate(asked, rate)
            share = attainment(LAYOUTS[name], at, targets)
            for least in (0.3, 0.9, share):
                held = holds(LAYOUTS[name], at, targets, least)
                assert held == (share >= least)
                said.add(held)
    assert said == {True, False}


def test_a_single_size_is_interpolated_as_numpy_does():
    sizes = np.unique(np.round(np.geomspace(1, 1 << 21, 64)))
    table = (sizes**0.7 + 3).tolist()
    for size in [0.0, 1.0, 1.5, 2.0, 777.7, 4096.0, float(1 << 21), 1e9]:
        assert interpolate(table, size) == float(np.interp(size, sizes, table))


def test_the_longest_wait_of_many_devices_is_that_of_random_ones():
    rng = np.random.default_rng(3)
    for busy, devices in ((0.2, 1), (0.5, 8), (1.0, 16)):
        left = rng.random((20000, devices)) * (rng.random((20000, devices)) < busy)
        assert longest_wait(busy, devices) == pytest.approx(left.max(axis=1).mean(), abs=0.01)
    assert longest_wait(0.0, 8) == 0.0


def test_experts_on_every_device_are_read_sooner_and_leave_more_room_than_two_copies():
    half, every = Together(STAGES, 8), Beside(STAGES, 8, 16)
    work = Work(32, 256, 2000.0)
    assert every.step(work, IDLE, ON_GPU).seconds < half.step(work).seconds
    assert every.kv_tokens > 1.3 * half.kv_tokens
    reading = Beside(STAGES, 8, 16).step(
        Work(tokens=4096, pairs=4096**2 / 2, all_tokens=8 * 4096), IDLE, ON_GPU
    )
    assert 0.0 < reading.experts < reading.busy <= 1.0
    beside = every.step(work, together([reading] * 8), ON_GPU)
    assert beside.seconds > every.step(work, IDLE, ON_GPU).seconds, "a tile of prompts is waited for"


def test_pools_on_one_host_use_its_fast_link():
    near, far = Apart(STAGES, 2, 4, one_host=True), Apart(STAGES, 2, 4)
    work = Work(32, 64, 2000.0)
    assert near.step(work).seconds < far.step(work).seconds


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 6000), st.integers(1, 60)), min_size=1, max_size=40),
    st.sampled_from(sorted(LAYOUTS)),
)
@settings(max_examples=25, deadline=None)
def test_nothing_is_lost_or_left_over(work, name):
    asked = [SimulatedRequest(*one) for one in sorted(work)]
    run = PhasesRun(LAYOUTS[name], asked)
    assert sorted(run.play()) == list(range(len(asked)))
    for station in run._stations:
        assert station.free == pytest.approx(station.pool.kv_tokens)
        assert station.queued == station.reading == station.running == 0
        assert station.context == 0.0 and not station.waiting and not station.ends


def test_experts_that_do_not_fit_their_devices_leave_no_room():
    h100 = tables("h100")
    assert Apart(h100, 8, 8).kv_tokens == 0, "32 experts of 58 layers are 82 GB"
    assert Apart(h100, 8, 12).kv_tokens > 0
    assert Together(h100, 8).kv_tokens == 0 and Together(h100, 24).kv_tokens > 0


def test_a_rank_of_several_devices_reads_a_prompt_sooner_and_holds_less():
    four = StageTables(STAGES.setting, STAGES.chip, 4)
    work = Work(tokens=2048, pairs=2048**2 / 2, all_tokens=2048)
    assert Together(four, 16).ranks == 4 and Together(four, 16).held == 16
    assert Together(four, 16).step(work).seconds < 0.6 * Together(STAGES, 16).step(work).seconds
    assert Together(four, 16).kv_tokens < 0.5 * Together(STAGES, 16).kv_tokens, (
        "each device has every head's cache"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_search_finds_the_top_of_a_hill_and_uses_every_device(kind, monkeypatch):
    """Scripted goodput: the best has 11 devices that decode or hold experts, and chunks of 1,024."""
    seen = []

    def scripted(layout, asked, targets, *, above=0.0, guess=1.0):
        seen.append(layout)
        decodes = sum(pool.ranks for pool in (layout.both or layout.decodes))
        held = (layout.reads or layout.both)[0].held
        off = 0 if kind == HOSTED else abs(held - 11)
        rate = 100.0 - off - abs(decodes - 8) - abs(layout.chunk - 1024) / 1024
        return rate if rate > above else 0.0

    monkeypatch.setattr("afserve.placement.planner.simulate.search_phases.goodput", scripted)
    pool, load = (
        PhasePool.from_question(STAGES.setting, STAGES.chip, 32),
        PlayedLoad(REQUESTS, GoodputTargets(2.0, 0.1)),
    )
    found = search(kind, pool, load, ON_GPU)
    rates = [one.rate for one in found.values()]
    assert rates == sorted(rates, reverse=True) and rates[0] > 0
    for reads, one in found.items():
        layout = one.layout
        used = sum(
            part.ranks * part.tables.tensor_parallel
            for part in (*layout.both, *layout.reads, *layout.decodes)
        )
        assert used + (layout.reads[0].held if kind == SHARED else 0) == 32 and reads == one.reads
    words = described(next(iter(found.values())).layout)
    assert "chunks of 1024" in words
    if kind == SHARED:
        assert rates[0] == 100 and "experts 11" in words and len(seen) < 400
        one = next(iter(found.values()))
        assert replay([one], load)[one.reads].layout is one.layout


def test_two_copies_that_do_not_fit_have_no_layout():
    small = PhasePool.from_question(STAGES.setting, replace(STAGES.chip, memory=60e9), 16)
    assert search(TWO_COPIES, small, PlayedLoad(REQUESTS, GoodputTargets(2.0, 0.1)), ON_GPU) == {}


def test_a_gpu_ends_blocks_of_products_by_itself():
    """The example of `pieces_on_gpu`, by hand: 52 us of 0.6 of a multiprocessor's part of 1,979 TFLOP/s, twice."""
    assert STAGES.chip.name == "h200"
    block = 4 * 128 * 128 * 7168 / (0.6 * 1979e12 / 132)
    assert block == pytest.approx(52e-6, rel=0.01) and pytest.approx(2 * block) == ON_GPU.seconds
    narrow = pieces_on_gpu(STAGES.chip, 2048, "bf16", 1 / 2)
    assert narrow.seconds == pytest.approx(2 * block * 2048 / 7168 * 2, rel=0.01) and narrow.floor == 0.5
    assert narrow.cut([], 100.0, 1e-3) == (narrow.seconds, 1e-3), "no expert is read again"


def test_a_piece_of_rows_is_longer_than_one_cut_at_tiles():
    pool, other = Apart(STAGES, 4, 8), StepTimes(0.03, 0.5, 0.1)
    work = Work(tokens=8192, pairs=8192**2 / 2, all_tokens=4 * 8192)
    pieces = Pieces(100e-6, 0.2, 1 / 16, by_rows=False)
    assert pool.step(work, other, pieces).piece == pytest.approx(100e-6, rel=0.02)
    assert pool.step(work, other, replace(pieces, by_rows=True)).piece > 300e-6, "it reads the experts again"


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("drafter", ["mtp", "eagle3", "ngram"])
def test_accepted_drafts_raise_the_goodput_and_refused_ones_lower_it(name, drafter):
    """Few requests at long answers: every layout decodes most of the time."""
    asked = [SimulatedRequest(0.5 * i, 64, 200) for i in range(24)]
    targets, found = GoodputTargets(5.0, 0.2), {}
    for length in (0.0, 1.0, 3.5):
        drafts = Drafts(DRAFTERS[drafter], 3, length) if length else NO_DRAFTS
        stages = StageTables(replace(STAGES.setting, drafts=drafts), STAGES.chip, STAGES.tensor_parallel)
        layout = LAYOUTS[name]
        pools = {
            side: tuple(replace(pool, tables=stages) for pool in getattr(layout, side))
            for side in ("both", "reads", "decodes")
        }
        run = PhasesRun(replace(layout, **pools), asked)
        assert sorted(run.play()) == list(range(len(asked)))
        found[length] = sum(times.ended - times.first for times in run.times)
        assert all(targets.met(one, times) for one, times in zip(asked, run.times, strict=True))
    assert found[3.5] < found[0.0] < found[1.0]
