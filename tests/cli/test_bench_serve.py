"""`afserve bench serve` against a scripted server on a socket: counts are exact, delays are never understated."""

import asyncio
import json

import pytest
from click.testing import CliRunner

from afserve.cli.bench.serve import serve
from bench.live_load import Answers, steady
from bench.scripted_server import Script, serving

LONGEST = 30_000  # ms: a machine may stall


def rows(url, *arguments):
    done = CliRunner().invoke(serve, ["--url", url, "--json", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_closed_loop_counts_and_delays(tmp_path):
    script = Script(first=0.05, gap=0.01)
    with serving(script) as url:
        flags = (
            "--concurrency",
            "2,4",
            "--requests",
            "8",
            "--output-len",
            "5",
            "--warm-up",
            "2",
            "--slo",
            "e2e=60s",
        )
        out, plot = tmp_path / "rows.jsonl", tmp_path / "load.png"
        found = rows(
            url + "/v1", *flags, "--out", str(out), "--requests-out", str(tmp_path / "r"), "--plot", str(plot)
        )
    assert [(row["loop"], row["concurrency"]) for row in found] == [("closed", 2), ("closed", 4)]
    for row in found:
        assert (row["sent"], row["completed"], row["good"]) == (8, 8, 8) and row["model"] == "scripted"
        assert (row["prompt_tokens"], row["completion_tokens"]) == (56, 40)
        assert 49 <= row["ttft_ms"]["p50"] < LONGEST and 88 <= row["e2e_ms"]["p50"] < LONGEST
        assert row["client"]["cpu_us_per_token"] > 0 and row["finished"] == {"length": 8}
        assert row["requests_per_s"] <= row["concurrency"] / 0.088
    assert script.connections <= 2 + 4 + 3 and len(script.bodies) == 2 * (8 + 2)
    assert out.read_text().count("\n") == 2 and (tmp_path / "r").read_text().count("\n") == 16
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_open_loop_sends_when_due_whatever_is_open():
    script = Script(together=12)
    with serving(script) as url:
        flags = ("--arrivals", "bursts", "--burst", "4", "--requests", "12", "--output-len", "2")
        (row,) = rows(url, "--rate", "100", "--endpoint", "chat", *flags)
    assert (row["sent"], row["completed"], row["rate"], row["loop"]) == (12, 12, 100, "bursts")
    assert script.connections >= 12
    assert all("messages" in body for body in script.bodies)


def test_a_trace_gives_arrivals_and_lengths_up_to_the_most(tmp_path):
    lines = [{"timestamp": 10 * n, "input_length": 3 + n, "output_length": 1 + n} for n in range(4)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    script = Script()
    with serving(script) as url:
        flags = (
            "--trace",
            str(tmp_path / "t.jsonl"),
            "--vocabulary",
            "99",
            "--input-len",
            "5",
            "--output-len",
            "3",
        )
        (row,) = rows(url, *flags)
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in script.bodies) == [
        (3, 1),
        (4, 2),
        (5, 3),
        (5, 3),
    ]
    assert row["completion_tokens"] == 9 and row["trace"] == "t.jsonl"


def test_refusals_breaks_and_errors_are_told_apart():
    script = Script(errors={1: 429, 2: 503, 3: 400, 4: "break"}, usage=False)
    with serving(script) as url:
        (row,) = rows(url, "--concurrency", "1", "--requests", "7", "--output-len", "3")
    assert (row["sent"], row["completed"], row["refused"], row["failed"]) == (7, 3, 2, 2)
    assert row["completion_tokens"] == 9 and "400: as scripted" in row["reasons"]
    assert any("broke off" in why for why in row["reasons"])


@pytest.mark.parametrize(
    "script", [Script(chunked=False), Script(close_after=True)], ids=["until-close", "closes"]
)
def test_servers_that_close_connections_are_measured_too(script):
    with serving(script) as url:
        (row,) = rows(url, "--concurrency", "2", "--requests", "6", "--output-len", "2")
    assert (row["completed"], row["completion_tokens"]) == (6, 12)


def test_keys_are_sent_and_a_table_is_shown(tmp_path):
    (tmp_path / "key").write_text("secret\n")
    script = Script()
    with serving(script) as url:
        flags = [
            "--url",
            url,
            "--requests",
            "2",
            "--api-key-file",
            str(tmp_path / "key"),
            "--output-len",
            "2",
        ]
        done = CliRunner().invoke(serve, flags, catch_exceptions=False)
    assert done.exit_code == 0 and "8 streams" in done.output and "2 of 2" in done.output
    assert all("authorization: bearer secret" in head.lower() for head in script.heads)


def test_nothing_answered_is_an_error_and_options_that_do_not_go_together_are_refused():
    with serving(Script(errors={0: 500, 1: 500})) as url:
        done = CliRunner().invoke(serve, ["--url", url, "--requests", "2", "--json"])
        assert "500: as scripted" in done.exception.message
    for flags in (
        ["--rate", "1", "--concurrency", "1"],
        ["--arrivals", "constant"],
        ["--vocabulary", "9", "--endpoint", "chat"],
    ):
        done = CliRunner().invoke(serve, ["--model", "m", *flags])
        assert flags[0] in done.exception.message or flags[2] in done.exception.message


@pytest.mark.parametrize("option", ["--plot", "--out", "--requests-out"])
def test_a_file_without_a_folder_is_refused_before_the_load(tmp_path, option):
    script = Script()
    with serving(script) as url:
        flags = ["--url", url, "--model", "m", "--requests", "2", option, str(tmp_path / "no" / "x.png")]
        done = CliRunner().invoke(serve, flags)
    assert "there is no folder" in done.exception.message and done.exception.message.startswith(option)
    assert not script.heads


def test_a_steady_load_keeps_what_was_said_and_counts_what_broke_off():
    found = Answers()
    with serving(Script(gap=0.002, errors={1: "break"})) as url:
        asyncio.run(steady(url, ["a", "b"], 0.3, 1, 4, found))
    assert found.failed == 1 and found.texts.keys() == {"a", "b"}
    assert all(len(said) == 1 for said in found.texts.values())
    assert len(found.gaps) >= 3 and found.percentile(0.5) > 0 and found.tokens > 4
