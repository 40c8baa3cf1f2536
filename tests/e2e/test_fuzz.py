"""The battery of `bench.fuzz` against a real server: no failure, no endless wait, nothing of its inside shown."""

import argparse
import asyncio

import pytest

from bench.fuzz import Found, logged, play
from bench.fuzz_requests import Sent, Way, drawn
from bench.served import served

FLAGS = ("--attention", "1", "--experts", "2", "--head-deadline", "5", "--read-deadline", "5")


@pytest.mark.process
@pytest.mark.parametrize(
    "count", [100, pytest.param(3000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_no_request_makes_it_fail(count, warm_benches):
    with served(*FLAGS) as here:
        options = argparse.Namespace(requests=count, seed=count, at_once=16)
        found, controls = asyncio.run(play(here, options))
        assert found.faults + logged(here.printed()) == []
    assert controls["altered"] == controls["failed"] == 0 and controls["controls"] > 0
    assert {200, 400} <= set(found.statuses)


def test_the_battery_draws_the_same_again_and_all_kinds():
    some = [drawn(3, number) for number in range(400)]
    assert some == [drawn(3, number) for number in range(400)]
    assert {sent.way for sent in some} == set(Way)
    assert any(b"chunked" in sent.raw for sent in some) and any(b"multipart" in sent.raw for sent in some)


@pytest.mark.parametrize(
    ("answer", "bad"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n{}", False),
        (b"HTTP/1.1 400 Bad Request\r\n\r\nprompt: is missing", False),
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\n", True),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error":{"type":"internal_error"}}', True),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nsilent (pid 21706)", True),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n/home/a/config.json", True),
    ],
)
def test_the_battery_sees_what_is_wrong(answer, bad):
    found = Found()
    found.judge(1, Sent(b"", Way.WHOLE), answer, 0.1)
    assert bool(found.faults) is bad


def test_the_battery_reads_the_log():
    assert logged("INFO all is well\nTraceback (most recent call last):\n") and not logged(
        "INFO all is well\n"
    )
