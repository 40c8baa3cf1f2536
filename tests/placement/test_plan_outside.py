"""Where nobody measured anything the interval says so; readers that are full; several instances that decode."""

import json
from dataclasses import replace

import numpy as np
import pytest

from afserve.cli.main import run
from afserve.cli.plan.catalog import load_engine
from afserve.placement.planner.perf.engine_rows import MANY


def best_of(capsys: pytest.CaptureFixture[str], line: str) -> dict:
    assert run(["plan", *line.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["best"]


def width(best: dict) -> float:
    low, high = best["tpot_interval_80_ms"]
    return float(np.sqrt(high / low))


MINIMAX = "--model minimax-m2 --concurrency 32 --input 1024 --output 1024 --engine sglang --kind colocated --devices 8"


@pytest.mark.slow
def test_chips_of_a_maker_that_nobody_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Published rows of such chips are 1.8 to 3.6 times what is planned."""
    other, known = (best_of(capsys, f"{MINIMAX} --pool {chip}=8") for chip in ("mi300x", "h200"))
    assert other["outside_of_measured"] == ["no engine was measured on chips of amd"]
    assert width(other) >= 2.99 and not known["outside_of_measured"] and width(known) < 1.6
    run(["plan", *f"{MINIMAX} --pool mi300x=8".split()])
    assert "Outside of what was measured: no engine was measured on chips of amd" in capsys.readouterr().out


def test_a_rank_over_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--model deepseek-v3 --pool h100=16 --tensor-parallel 16 --kind colocated --engine vllm --concurrency 16"
    best = best_of(capsys, line)
    assert width(best) >= 2.19 and "a tensor-parallel rank of 16 over hosts" in best["outside_of_measured"][0]


def test_many_requests_have_a_quantile_of_their_own() -> None:
    rows = replace(load_engine("sglang").rows, quantile=1.0, quantile_many=2.0)
    like = rows.like[0]
    few, many = (rows.half_width(like, requests, 8.0) for requests in (MANY, MANY + 1))
    assert many > 1.8 * few


@pytest.mark.slow
def test_a_full_reader_lets_clients_wait_and_send_less(capsys: pytest.CaptureFixture[str]) -> None:
    """With one reader for three instances clients wait for first tokens, and no tokens come meanwhile."""
    line = (
        "--model gpt-oss-120b --pool h200=2 --precision fp4 --attention-precision bf16 --input 2046 --output 67 "
        "--engine sglang --kind colocated --devices 2 --tensor-parallel 2 --expert-slices --decode-only "
        "--prefill-devices 2 --concurrency 42"
    )
    one, third = (best_of(capsys, f"{line} --prefill-workers {count}") for count in (3, 0.3333))
    assert third["tok_s"] < 0.8 * one["tok_s"]
    assert third["tok_s"] < 42 / third["tpot_ms"] * 1e3


@pytest.mark.slow
def test_several_instances_that_decode_share_their_readers(capsys: pytest.CaptureFixture[str]) -> None:
    """Long answers to short prompts: readers are few beside those that decode."""
    line = (
        "--model gpt-oss-120b --pool h200=8 --precision fp4 --attention-precision bf16 --engine sglang "
        "--kind colocated --prompts apart --tpot 15ms"
    )
    long, short = (best_of(capsys, f"{line} --input {n} --output {m}") for n, m in ((128, 680), (2048, 66)))
    share = [found["prefill"]["devices"] / found["attention"]["devices"] for found in (long, short)]
    assert share[0] <= 0.5 and share[1] >= 3
    assert run(["plan", *f"{line} --input 2048 --output 66 --top 9".split()]) == 0
    assert "2 x 1 h200" in capsys.readouterr().out


@pytest.mark.slow
def test_only_as_many_decode_as_readers_bring(capsys: pytest.CaptureFixture[str]) -> None:
    """By Little's law: requests in flight are those that decode, and the rate times the wait for the first token."""
    line = (
        "--model deepseek-v3 --pool gb200=32 --engine sglang --kind colocated --devices 32 --tensor-parallel 1 "
        "--input 8192 --output 1024 --decode-only --prefill-devices 8 --concurrency 6144"
    )
    many, few = (best_of(capsys, f"{line} --prefill-workers {count}") for count in (40, 5))
    assert many["requests"] == 6144 and many["limited_by"] == "requests"
    assert few["requests"] < 3072 and few["limited_by"] == "readers" and few["tpot_ms"] < many["tpot_ms"]
    rate = few["requests"] / (1024 * few["tpot_ms"])
    assert few["requests"] + rate * few["ttft_ms"] == pytest.approx(6144, rel=0.1)


@pytest.mark.slow
def test_sliced_experts_of_several_ranks_are_a_layout_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = "--model deepseek-v3 --pool gb200=32 --engine sglang --kind colocated --devices 32 --tensor-parallel 1"
    work = (
        "--input 8192 --output 1024 --decode-only --prefill-devices 8 --prefill-workers 5 --concurrency 1024"
    )
    whole, sliced = (best_of(capsys, f"{line} {work} {more}") for more in ("", "--expert-slices"))
    assert sliced["tpot_ms"] > whole["tpot_ms"]
