"""The parts of the load client that are values: arrivals, traces, prompts, answers as bytes, figures."""

import asyncio
import json
import random
from itertools import islice
from unittest.mock import create_autospec

import numpy as np
import pytest

from afserve.cli.load.arrivals import BURSTS, CONSTANT, POISSON, arrivals, read_trace, scaled
from afserve.cli.load.asks import CHAT, COMPLETIONS, RequestForm, from_file, generated
from afserve.cli.load.connection import HttpConnection, Server
from afserve.cli.load.figures import figures, percentile, read_slo, spread
from afserve.cli.load.heard import Heard
from afserve.cli.load.http_answer import Events, HttpAnswer
from afserve.cli.load.loops import Ran
from afserve.errors import ConfigError, ProtocolError


def first(count, *arguments):
    return list(islice(arrivals(*arguments), count))


def test_arrivals_have_their_rate_and_shape():
    assert first(4, CONSTANT, 2.0, 8, 0) == [0.0, 0.5, 1.0, 1.5]
    for kind in (POISSON, BURSTS):
        times = first(8000, kind, 5.0, 8, 3)
        assert times == sorted(times) == first(8000, kind, 5.0, 8, 3) and times[0] == 0
        assert len(times) / times[-1] == pytest.approx(5.0, rel=0.1)
    bursts = first(80, BURSTS, 5.0, 8, 3)
    assert len(set(bursts)) == 10 and bursts[:8] == [0.0] * 8


def test_traces_of_both_forms_are_read_and_scaled(tmp_path):
    (tmp_path / "m.jsonl").write_text(
        '{"timestamp": 1000, "input_length": 9, "output_length": 2}\n\n'
        '{"timestamp": 3000, "input_length": 5, "output_length": 0, "hash_ids": [1]}\n'
    )
    (tmp_path / "a.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.1805900,5,6\n"
    )
    mooncake, azure = read_trace(tmp_path / "m.jsonl", None), read_trace(tmp_path / "a.csv", None)
    assert [(one.at, one.input, one.output) for one in mooncake] == [(0, 9, 2), (2, 5, 1)]
    assert azure[1].at == pytest.approx(3.5) and azure[0].input == 374
    assert scaled(mooncake, None) == [0, 2] and scaled(mooncake, 4.0) == [0, 0.25]
    assert len(read_trace(tmp_path / "a.csv", 1)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "x",
        "[" * 100_000,
        '{"timestamp": 1}',
        '{"timestamp": 1, "input_length": "a", "output_length": 1}',
        '{"timestamp": 1, "input_length": 16777217, "output_length": 1}',
        '{"timestamp": 1e400, "input_length": 1, "output_length": 1}',
        '{"timestamp": %s, "input_length": 1, "output_length": 1}' % ("9" * 400),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(tmp_path, line):
    (tmp_path / "t.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=r"t\.jsonl:1: "):
        read_trace(tmp_path / "t.jsonl", None)


def test_prompts_are_of_their_length_and_all_different():
    draw = generated(RequestForm(COMPLETIONS, "m", vocabulary=40), 12, 3, 0)
    prompts = [next(draw).prompt["prompt"] for _ in range(20)]
    assert all(len(prompt) == 12 and 16 <= min(prompt) <= max(prompt) < 40 for prompt in prompts)
    assert len(set(map(tuple, prompts))) == 20
    form = RequestForm(CHAT, "m", extra={"temperature": 1})
    body = json.loads(form.request_body(form.made(5, 9, random.Random(0))))
    assert len(body["messages"][0]["content"].split()) == 5
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"], body["model"]) == (9, 1, True, "m")
    assert "ignore_eos" not in json.loads(
        RequestForm(CHAT, "m", ignore_eos=False).request_body(form.made(5, 9, random.Random(0)))
    )


def test_prompts_from_a_file_come_again_and_a_wrong_line_is_named(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": [1, 2], "max_tokens": 4}\n')
    found = list(islice(from_file(file, COMPLETIONS, 9), 3))
    assert [(one.prompt["prompt"], one.output) for one in found] == [("a", 9), ([1, 2], 4), ("a", 9)]
    with pytest.raises(ConfigError, match='line 1: has no "messages"'):
        from_file(file, CHAT, 9)
    file.write_text('{"prompt": "a", "max_tokens": 0}')
    with pytest.raises(ConfigError, match="max_tokens: 0"):
        from_file(file, COMPLETIONS, 9)


def test_only_a_newline_ends_a_line_of_prompts(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a\u2028b\u0085c"}\n', encoding="utf-8")
    assert next(from_file(file, COMPLETIONS, 9)).prompt["prompt"] == "a\u2028b\u0085c"


ANSWER = (
    b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n"
    b"5;x=y\r\ndata:\r\n8\r\n a\n\ndata\r\n2\r\n: \r\n2\r\nb\n\r\n0\r\nTrailer: 1\r\n\r\n"
)


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_an_answer_is_read_however_it_is_cut(step):
    answer, events, found = HttpAnswer(), Events(), []
    for at in range(0, len(ANSWER), step):
        found += events.feed(answer.feed(ANSWER[at : at + step]))
    assert found == [b"a", b"b"] and answer.done and answer.status == 200 and answer.keeps_open


def test_lengths_closes_and_nonsense():
    plain = HttpAnswer()
    assert plain.feed(b"HTTP/1.1 429 No\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabcd") == b"abc"
    assert plain.done and not plain.keeps_open and plain.status == 429
    until = HttpAnswer()
    assert until.feed(b"HTTP/1.0 200 OK\r\n\r\nab") + until.feed(b"c") == b"abc"
    assert not until.done and until.closed()
    for wrong in (
        b"SSH-2.0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"x" * 70_000,
    ):
        with pytest.raises(ProtocolError):
            HttpAnswer().feed(wrong)


def heard(first, gaps, tokens=None, sent=10.0):
    one = Heard(due=sent - 0.001, output=4, sent=sent)
    at = sent + first
    one.event(b'{"choices": [{"text": "a"}]}', at)
    for gap in gaps:
        at += gap
        one.event(b'{"choices": [{"text": "a", "finish_reason": "length"}]}', at)
    if tokens is not None:
        one.event(json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}).encode(), at)
    one.end(at, whole=one.event(b"[DONE]", at))
    return one


def test_figures_count_exactly_and_tell_the_client_apart():
    refused, failed = Heard(0.0, 4, sent=1.0), heard(0.1, [])
    refused.refuse(429, b'{"error": {"message": "full"}}', 2.0)
    failed.outcome, failed.why = "failed", "broke"
    ran = Ran(
        [heard(0.1, [0.2, 0.4]), heard(0.3, [0.1], tokens=3), refused, failed],
        seconds=2.0,
        cpu=0.5,
        lags=[0.001],
    )
    found = figures(ran, read_slo("ttft=200ms"))
    assert (found.sent, found.completed, found.refused, found.failed, found.good) == (4, 2, 1, 1, 1)
    assert found.completion_tokens == 6 and found.tokens_per_s == 3 and found.goodput_per_s == 0.5
    assert found.ttft_ms.p50 == pytest.approx(200) and found.itl_ms.max == pytest.approx(400)
    assert found.tpot_ms.mean == pytest.approx((300 + 50) / 2) and found.e2e_ms.max == pytest.approx(700)
    assert found.reasons == {"429: full": 1, "broke": 1} and found.finished == {"length": 2}
    assert found.client["cpu_us_per_token"] == pytest.approx(0.5e6 / 6) and found.client["core_share"] == 0.25
    assert found.client["lag_ms_p99"] == pytest.approx(1) and json.dumps(found.row())


def test_percentiles_are_numpys():
    values = sorted(random.Random(0).random() for _ in range(101))
    for share in (0, 50, 90, 99, 100):
        assert percentile(values, share) == pytest.approx(np.percentile(values, share))
    assert spread([]).p50 is None


def test_slos_and_urls_are_read_or_refused():
    assert read_slo("ttft=0.5s, tpot=50ms,e2e=3") == {"ttft": 500, "tpot": 50, "e2e": 3000}
    for wrong in ("ttf=1s", "ttft", "ttft=-1s", "ttft=xs"):
        with pytest.raises(ConfigError, match="--slo"):
            read_slo(wrong)
    assert (
        Server.from_url("https://h/base/v1/", None).prefix == "/base"
        and Server.from_url("https://h", "k").port == 443
    )
    for wrong in ("h:80", "http://", "http://h:99999"):
        with pytest.raises(ConfigError, match="--url"):
            Server.from_url(wrong, None)


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, b'data: {"usage": {"completion_tokens": 1e999}}\n\n'), (200, b"data: " + b"[" * 200_000 + b"\n\n"),
     (500, b"[" * 200_000)],
)  # fmt: skip
def test_an_answer_that_no_parser_takes_fails_its_request_only(status, body):
    async def play():
        connection, heard = HttpConnection(), Heard(0.0, 1)
        connection.connection_made(create_autospec(asyncio.Transport, instance=True))
        asked = asyncio.create_task(connection.exchange(b"", heard))
        await asyncio.sleep(0)
        head = f"HTTP/1.1 {status} OK\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.data_received(head.encode() + body)
        await asyncio.wait_for(asked, 60)
        assert heard.outcome == "failed" and heard.why

    asyncio.run(play())
