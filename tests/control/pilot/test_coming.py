"""What is coming, in requests and in tokens: long answers are seen, one long prompt is not, and tokens fall too."""

import random
from dataclasses import replace

import pytest

from afserve.control.pilot.coming import ComingDemand
from afserve.control.pilot.observed import PoolLoad, SeenWindow
from afserve.control.pilot.predict import Windows
from afserve.control.pilot.sizes import PoolSizes


def seen(seconds: float, prompts: list[float], running: float, answer: float = 100) -> SeenWindow:
    """As many requests come as end; a token takes 20 ms."""
    came = len(prompts)
    rest = came * (answer - 1)
    load = PoolLoad(
        came=came, prompt_tokens=sum(prompts), first=came, ended=came, answer_tokens=came * answer
    )
    return SeenWindow(
        seconds, PoolSizes(1, 1, 1), replace(load, rest_tokens=rest, rest_seconds=rest * 0.02), running
    )


def test_long_answers_and_prompts_are_seen_while_the_rate_stays():
    """Answers that still run say that more tokens are wanted, before any of them has ended."""
    coming, at = ComingDemand(Windows()), 0.0

    def play(seconds, prompt, running):
        nonlocal at
        for _ in range(int(seconds / 10)):
            at += 10
            load = PoolLoad(came=100, prompt_tokens=100 * prompt, first=100, ended=100, answer_tokens=10_000)
            load = replace(load, rest_tokens=9_900, rest_seconds=198)  # 20 ms a token
            coming.note_window(at, SeenWindow(10, PoolSizes(1, 1, 1), load, running), running)

    play(1200, 500, 20)
    calm = coming.within(60, 1)
    assert calm.rate == pytest.approx(10) and calm.computed == pytest.approx(500, rel=0.02)
    assert calm.answer == pytest.approx(100, rel=0.02)
    play(60, 1000, 40)
    busy = coming.within(60, 1)
    assert busy.rate == pytest.approx(10) and coming.lengths.answer == pytest.approx(100, rel=0.02)
    assert busy.answer > 180 and busy.computed > 900


@pytest.mark.parametrize(("waits", "most"), [(0.0, 900), (2.0, 900), (20.0, 700)])
def test_prompts_that_may_wait_are_counted_over_longer(waits, most):
    """A minute with twice as long prompts among others: who waits 20 s for a first token reads them later."""
    coming, at = ComingDemand(Windows(), waits), 0.0
    for look in range(126):
        at += 10
        prompts = [1000.0 if look >= 120 else 500.0] * 100
        coming.note_window(at, seen(10, prompts, 20), 20)
    busy = coming.within(60, 1)
    assert busy.rate == pytest.approx(10) and (busy.computed > most if waits < 20 else busy.computed < most)


@pytest.mark.slow
def test_one_long_prompt_among_few_requests_is_no_jump():
    """Lengths of a lognormal distribution (mean 1,000, sigma 1) at 0.2 requests/s."""
    draw, coming = random.Random(7), ComingDemand(Windows())
    much = []
    for look in range(1000):
        prompts = [draw.lognormvariate(6.408, 1) for _ in range(20) if draw.random() < 0.05]
        coming.note_window(5.0 * (look + 1), seen(5.0, prompts, 0.4), 0.4)
        much.append(coming.within(60, 1).computed > 1.9 * coming.lengths.computed)
    assert sum(much[200:]) < 0.06 * len(much[200:])


@pytest.mark.slow
def test_tokens_fall_as_requests_do():
    """Ten requests a second, then one a minute with nothing running between them."""
    coming, at = ComingDemand(Windows()), 0.0
    for look in range(240):
        at += 10
        quiet = look >= 120
        prompts = [1000.0] * (100 if not quiet else look % 6 == 0)
        coming.note_window(at, seen(10, prompts, 0 if quiet else 20), 0 if quiet else 20)
        if look > 60:
            likely = coming.within(60, 1)
            assert likely.answer <= 200 and likely.computed <= likely.prompt
    assert likely.rate * likely.answer < 5
    assert likely.answer == pytest.approx(100, rel=0.02)


def test_another_kind_of_requests_is_seen_where_few_come():
    """Looks of a second and trends of ten, as with `--pilot-hold 6`: from six answers of 85 tokens a second to sixteen
    of eight, which no mean over 2,000 requests would follow."""
    coming, at = ComingDemand(Windows(2, 10)), 0.0
    for look in range(120):
        at += 1
        few = look >= 90
        came, answer = (16, 8) if few else (6, 85)
        coming.note_window(at, seen(1, [1000.0] * came, came * answer * 0.02, answer), came * answer * 0.02)
    likely = coming.within(60, 1)
    assert likely.rate * likely.answer < 2 * 16 * 8


def test_while_no_answer_ends_tokens_are_made_at_the_last_pace():
    coming, at = ComingDemand(Windows()), 0.0
    for look in range(132):
        at += 10
        busy = look >= 120
        window = seen(10, [1000.0] * 100, 60 if busy else 20)
        if busy:
            load = replace(window.load, rest_tokens=0, rest_seconds=0, ended=0, answer_tokens=0)
            window = replace(window, load=load)
        coming.note_window(at, window, 60 if busy else 20)
    assert coming.within(60, 1).answer == pytest.approx(200, rel=0.02), "twice the mean at most"
