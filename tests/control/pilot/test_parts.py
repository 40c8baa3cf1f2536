"""Parts of a pilot: what is predicted, how long is waited, how sure it says it is, what users may limit."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.control.pilot.advice import Compared
from afserve.control.pilot.judge import Correction, Headroom, Interval
from afserve.control.pilot.measured import MeasuredModel
from afserve.control.pilot.observed import MeanLengths, PoolLoad, SeenWindow
from afserve.control.pilot.predict import DAY, Forecast
from afserve.control.pilot.queue import QueueWait
from afserve.control.pilot.settings import ACT, ADVISE, OFF, PilotSettings, pool_names
from afserve.control.pilot.sizes import Demand, Limits, PoolSizes, TargetTimes, counted_up
from afserve.errors import ConfigError


def told(rate, seconds, step=10.0, start=0.0, forecast=None):
    forecast = forecast or Forecast()
    for number in range(int(seconds / step)):
        at = start + (number + 1) * step
        forecast.note_arrivals(at, step, rate(at) * step)
    return forecast


@pytest.mark.slow
def test_a_steady_rate_stays_and_a_ramp_goes_on():
    assert told(lambda at: 7.0, 900).soon(600) == pytest.approx(7.0)
    ramp = told(lambda at: 5 + 0.001 * at, 900)
    assert ramp.soon(600, 0) == pytest.approx(5 + 0.001 * 1500, rel=0.02)
    steep = told(lambda at: 5 + 0.005 * at, 900)
    assert steep.soon(600, 0) == pytest.approx(1.15 * 9.5, rel=0.02), "a trend says so much and no more"
    assert told(lambda at: 15 - 0.01 * at, 900).soon(600, 0) == pytest.approx(6.0, rel=0.1), (
        "the highest on the way"
    )


@pytest.mark.slow
def test_a_jump_is_seen_before_the_short_window_is_over_and_chance_is_none():
    jumped = told(lambda at: 7.0 if at <= 1000 else 14.0, 1020)
    assert jumped.present_rate == pytest.approx(14.0)
    few = told(lambda at: 0.7 if at <= 1000 else 1.0, 1020)
    assert few.present_rate == pytest.approx(0.8), "six more requests in twenty seconds are chance"
    rare = told(lambda at: 0.2 if at > 2990 else 0.1 if at % 60 == 0 else 0.0, 3000)
    assert not rare.jumped and rare.present_rate < 0.05, "two in ten seconds, of one a minute"


def burst(*spans):
    """Seven requests a second, and twice as many within each span."""
    return lambda at: 14.0 if any(begin < at <= end for begin, end in spans) else 7.0


def test_a_burst_leaves_nothing_behind():
    forecast = told(burst((1000, 1400)), 1390)
    assert forecast.jumped and forecast.present_rate == pytest.approx(14.0)
    assert forecast.trend()[0] == pytest.approx(7.0)
    told(burst((1000, 1400)), 40, start=1390, forecast=forecast)
    assert not forecast.jumped
    assert forecast.present_rate == pytest.approx(7.0) and forecast.soon(600, 2) == pytest.approx(7.0)


@pytest.mark.slow
def test_a_burst_is_taken_to_go_as_far_as_those_before_until_it_is_seen():
    first = told(burst((1000, 1300)), 1010)
    assert first.present_rate == pytest.approx(14.0)
    rising = lambda at: 7.0 if at <= 2500 else 11.0 if at <= 2520 else 14.0  # noqa: E731
    assert told(rising, 2520).present_rate == pytest.approx(11.0)
    again = told(lambda at: burst((1000, 1300))(at) if at <= 2000 else rising(at), 2520)
    assert again.jumped and again.present_rate == pytest.approx(14.0, rel=0.05)
    fades = told(lambda at: burst((1000, 1300))(at) if at <= 2000 else 11.0 if at > 2500 else 7.0, 2600)
    assert fades.jumped and fades.present_rate == pytest.approx(11.0), "what is seen counts"


@pytest.mark.slow
def test_what_lasts_is_the_level():
    forecast = told(lambda at: 7.0 if at <= 1000 else 14.0, 1590)
    assert forecast.jumped and forecast.trend()[0] == pytest.approx(7.0)
    told(lambda at: 14.0, 60, start=1590, forecast=forecast)
    assert not forecast.jumped and forecast.trend()[0] == pytest.approx(14.0)
    told(lambda at: 14.0, 3600, start=1650, forecast=forecast)
    assert forecast.soon(600, 2) == pytest.approx(14.0)


def test_headroom_follows_the_share_of_late_requests():
    calm, late, quiet, crowded = (Headroom() for _ in range(4))
    for _ in range(600):
        calm.note_late(0.0, 100, 1.0)
    for _ in range(30):
        late.note_late(0.05, 100, 1.0)
    assert calm.factor < 1.05 < Headroom().factor < late.factor <= 1.2
    for one, came in ((quiet, 50), (crowded, 200)):
        for _ in range(100):
            one.note_late(0.0, 100, 1.0)
        one.note_late(0.1, came, 1.0)
    assert crowded.factor > quiet.factor + 0.01, "requests count, not minutes"


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_answers_that_are_not_over_count_in_the_beginning(spread):
    """Ten requests a second, a token each tenth of a second: the mean of those that ended is far too short at first."""
    draw, lengths = random.Random(2), MeanLengths()
    asked = [200 * (1 - spread + spread * draw.expovariate(1)) for _ in range(2000)]
    ended_mean = [0.0, 0.0]
    for window in range(20):
        over = [one for n, one in enumerate(asked) if int((n / 10 + one / 10) // 10) == window]
        running = sum(n / 10 < 10 * window + 10 < n / 10 + one / 10 for n, one in enumerate(asked))
        tokens = sum(over)
        load = PoolLoad(
            100, 1e5, ended=len(over), answer_tokens=tokens, rest_tokens=tokens, rest_seconds=tokens / 10
        )
        lengths.note_window(SeenWindow(10.0, PoolSizes(1, 1, 1), load, running))
        ended_mean = [ended_mean[0] + tokens, ended_mean[1] + len(over)]
        if window == 2 and spread:
            assert ended_mean[0] / ended_mean[1] < 0.7 * 200, "short answers end first"
            assert lengths.answer == pytest.approx(200, rel=0.2)
    assert lengths.answer == pytest.approx(200, rel=0.1) and lengths.prompt == pytest.approx(1000)


def test_noise_asks_for_room():
    draw = random.Random(1)
    noisy = told(lambda at: 10 + draw.gauss(0, 3), 900)
    assert noisy.soon(60, 2) > noisy.soon(60, 0) + 0.5


@pytest.mark.slow
def test_a_day_that_was_seen_says_what_comes():
    def day(at):
        return 20.0 if 0.5 * DAY <= at % DAY < 0.6 * DAY else 5.0

    forecast = told(day, 1.49 * DAY, step=60.0)
    assert forecast.present_rate == pytest.approx(5.0)
    assert forecast.soon(0.02 * DAY) == pytest.approx(15.0, rel=0.05), "three times as much at most"
    assert told(day, 0.49 * DAY, step=60.0).soon(0.02 * DAY) == pytest.approx(5.0, rel=0.05)


def test_nothing_noted_is_nothing_expected():
    assert Forecast().present_rate == 0 and Forecast().soon(600) == 0


def test_one_server_waits_as_in_the_books():
    """M/M/1: service * share / (1 - share); M/D/1: half of that."""
    assert QueueWait(2.0, 1, 0.5, 1.0).mean == pytest.approx(2.0)
    assert QueueWait(2.0, 1, 0.5, 0.0).mean == pytest.approx(1.0)


@given(st.integers(1, 200), st.floats(0.0, 1.5), st.floats(0.0, 30.0))
def test_waits_grow_with_the_load_and_a_chance_is_one(servers, share, seconds):
    one, busier = QueueWait(1.0, servers, share, 1.0), QueueWait(1.0, servers, share + 0.05, 1.0)
    assert 0 <= one.longer(seconds) <= 1 and one.mean <= busier.mean
    assert one.longer(seconds) <= one.longer(seconds / 2)


@pytest.mark.parametrize("spread", [0.02, 0.3, 1.5])
def test_intervals_hold_as_often_as_they_promise(spread):
    draw, interval = random.Random(3), Interval()
    for _ in range(2000):
        interval.compare(1.0, Compared(*interval.around(1.0), math.exp(draw.gauss(0, spread))))
    assert 0.77 < interval.held / interval.compared < 0.85
    low, high = interval.around(10.0)
    assert low < 10.0 < high


def test_no_first_interval_is_surer_than_what_was_said_of_sizes_that_stay():
    draw, calm, wild = random.Random(4), Interval(), Interval()
    for _ in range(40):
        calm.note_standing(1.0, math.exp(draw.gauss(0, 0.02)))
        wild.note_standing(1.0, math.exp(draw.gauss(0, 1.0)))
    assert calm.width == Interval().width < wild.width == pytest.approx(1.28, abs=0.4)
    for _ in range(30):
        wild.compare(1.0, Compared(*wild.around(1.0), 1.01))
    assert wild.width < 0.05, "changes that came as they were expected count in the end"


def test_a_correction_follows_what_is_measured():
    correction = Correction()
    for _ in range(200):
        correction.note_error(1.0, 1.3)
    assert correction.factor == pytest.approx(1.3, rel=0.01)
    correction.note_error(0.0, 5.0)
    correction.note_error(math.inf, 5.0)
    assert correction.factor == pytest.approx(1.3, rel=0.01)


def test_sizes_that_are_tried_are_all_small_ones_and_both_ends():
    found = list(counted_up(1, 100))
    assert found[:10] == list(range(1, 11)) and found[-1] == 100 and len(found) < 40
    assert list(counted_up(3, 3)) == [3]


@given(st.tuples(*[st.integers(0, 60)] * 3), st.integers(3, 60))
def test_the_nearest_size_is_inside(sizes, budget):
    limits = Limits(PoolSizes(1, 1, 1), PoolSizes(20, 20, 20), budget, 25)
    found = limits.nearest(PoolSizes(*sizes))
    assert limits.allow(found)
    assert limits.nearest(found) == found


def test_a_mode_is_chosen_by_what_there_is():
    assert PilotSettings().mode(pools=True) == ADVISE and PilotSettings().mode(pools=False) == OFF
    assert PilotSettings(pilot=ACT).mode(pools=False) == ACT
    with pytest.raises(ConfigError, match="off, advise, act"):
        PilotSettings(pilot="fly")


def test_limits_are_typed_by_the_names_of_pools():
    first, most = PoolSizes(2, 2, 3), PoolSizes(7, 8, 32)
    plain = PilotSettings().limits(first, 2, most)
    assert plain == Limits(PoolSizes(1, 1, 2), most, 14, 8)
    asked = PilotSettings(pilot_min=("decode=2",), pilot_max=("experts=5",), pilot_nodes=9)
    assert asked.limits(first, 2, most) == Limits(PoolSizes(1, 2, 2), PoolSizes(7, 8, 5), 9, 8)
    both = PilotSettings(pilot_max=("attention=3",)).limits(PoolSizes(0, 2, 2), 1, PoolSizes(0, 8, 32))
    assert both.most == PoolSizes(0, 3, 32) and both.least == PoolSizes(0, 1, 1)
    assert pool_names(PoolSizes(0, 3, 2)) == {"attention": 3, "experts": 2}
    assert pool_names(PoolSizes(0, 3, 0)) == {"attention": 3}


@pytest.mark.parametrize(
    "settings, why",
    [
        (
            {"pilot_min": ("attention=2",)},
            "--pilot-min: .*attention=2.* is not POOL=N .*prefill, decode, experts",
        ),
        ({"pilot_max": ("experts=many",)}, "--pilot-max: .*experts=many"),
        ({"pilot_max": ("experts=1",)}, "at most 1 experts nodes, but there must be 2"),
        ({"pilot_max": ("experts=4", "experts=5")}, "--pilot-max: says experts more than once"),
        ({"pilot_nodes": 3}, "--pilot-nodes: 3 are fewer than the 4"),
        ({"pilot_usd": 3.0}, "--pilot-usd: does nothing without --pilot-price"),
        ({"pilot_price": ("decode=1",)}, "--pilot-price: does nothing without --pilot-usd"),
        ({"pilot_usd": 3.0, "pilot_price": ("decode=1",)}, "says nothing of prefill; add prefill=USD"),
        ({"pilot_usd": 3.0, "pilot_price": ("decode=nan",)}, "--pilot-price: 'decode=nan' is not POOL=USD"),
        (
            {"pilot_usd": 3.0, "pilot_price": ("prefill=1", "decode=1", "experts=1")},
            "--pilot-usd: the 4 nodes .* cost 4 an hour, more than 3",
        ),
    ],
)
def test_limits_that_cannot_be_are_refused(settings, why):
    with pytest.raises(ConfigError, match=why):
        PilotSettings(**settings).limits(PoolSizes(2, 2, 3), 2, PoolSizes(7, 8, 32))


def test_a_budget_in_dollars_is_kept():
    first, most = PoolSizes(1, 1, 2), PoolSizes(7, 8, 32)
    asked = PilotSettings(
        pilot_usd=12.0, pilot_price=("prefill=2", "decode=3", "experts=1.5"), pilot_nodes=20
    )
    limits = asked.limits(first, 2, most)
    assert limits.cost(PoolSizes(1, 1, 2)) == 8.0
    assert limits.allow(PoolSizes(1, 2, 2)) and not limits.allow(PoolSizes(2, 2, 2))
    near = limits.nearest(PoolSizes(5, 5, 5))
    assert limits.allow(near) and limits.cost(near) > 8.0


@pytest.mark.parametrize("unlike", [(), ("23:30-01:00",), ("00:00-24:00",), ("08:00-09:00", "22:15-23:00")])
def test_hours_of_a_day(unlike):
    hours = PilotSettings(pilot_hours=unlike).hours
    for second in range(0, 86_400, 60):
        clock = second / 3600
        held = {
            (): True,
            ("23:30-01:00",): clock >= 23.5 or clock < 1,
            ("00:00-24:00",): True,
            ("08:00-09:00", "22:15-23:00"): 8 <= clock < 9 or 22.25 <= clock < 23,
        }[unlike]
        assert hours.hold(second) == held


@pytest.mark.parametrize(
    "text", ["8-9", "08:00-08:00", "24:00-05:00", "08:00-24:30", "08:00 - 09:00", "٠8:00-09:00"]
)
def test_hours_that_are_none(text):
    with pytest.raises(ConfigError, match=r"--pilot-hours: .* is not a span of a day"):
        _ = PilotSettings(pilot_hours=(text,)).hours


def test_times_of_the_server_are_taken_where_the_pilot_has_none():
    assert PilotSettings(pilot_ttft=2.0).wanted(9.0, 0.0) == TargetTimes(2.0, math.inf)


def test_steps_are_told_from_tokens_where_both_vary():
    """A step takes a millisecond and a token a tenth of it; an expert node half of it, a token there a fifth."""
    model = MeasuredModel()
    for rows in (1.0, 4.0, 2.0, 6.0) * 10:
        steps = 1000.0
        tokens = rows * steps
        busy = 1e-3 * steps + 1e-4 * tokens
        load = PoolLoad(
            came=10.0,
            prompt_tokens=10.0,
            first=10.0,
            first_seconds=1.0,
            rest_tokens=tokens - 10.0,
            rest_seconds=0.01 * (tokens - 10.0),
            decode_busy=busy,
            experts_busy=5e-4 * 2 * steps + 2e-4 * tokens,
            decode_steps=steps,
        )
        model.learn_rates(SeenWindow(10.0, PoolSizes(1, 2, 2), load))
    found = model.rates
    assert (found.decode_step, found.decode) == pytest.approx((1e-3, 1e-4), rel=0.06)
    assert (found.experts_step, found.experts) == pytest.approx((5e-4, 2e-4), rel=0.06)
    few, many = (
        model.expect(PoolSizes(1, count, 1), Demand(20, 1, 40, 1), TargetTimes()) for count in (1, 4)
    )
    assert few.busy[1] < 2 * many.busy[1], (
        "where few requests run, one node has as many steps as four, and fuller ones"
    )
    assert many.busy[2] > few.busy[2], "expert nodes have a part of each step of all of them"
