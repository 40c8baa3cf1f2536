"""The fewest devices for a rate, with a typed pool and without, and other answers that were once in wrong words."""

import json
import re

import numpy as np
import pytest

from afserve.cli.main import run
from afserve.placement.planner.perf.stages import lengthened


def answer_of(capsys: pytest.CaptureFixture[str], line: str) -> dict:
    assert run(["plan", *line.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def said(capsys: pytest.CaptureFixture[str], line: str) -> str:
    run(["plan", *line.split()])
    captured = capsys.readouterr()
    return captured.out + captured.err


RATE = "--model qwen3-235b-a22b --objective count --input 2000 --output 500 --engine vllm --prompts here"


@pytest.mark.slow
def test_a_rate_takes_as_many_instances_as_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a count there are as many as it takes, and no fewer serve it."""
    found = answer_of(capsys, f"{RATE} --kind colocated --pool b200 --rate 100")["best"]
    assert found["instances"] > 1 and found["devices"] == found["instances"] * found["attention"]["devices"]
    assert found["instances"] * found["tok_s"] >= 100 * 500 > (found["instances"] - 1) * found["tok_s"]
    typed = answer_of(capsys, f"{RATE} --kind colocated --pool b200={found['devices']} --rate 100")["best"]
    assert typed["devices"] == found["devices"]
    fewer = said(capsys, f"{RATE} --kind colocated --pool b200={found['devices'] - 2} --rate 100")
    assert "sustain at most about" in fewer and "are asked for, which would take about" in fewer


@pytest.mark.slow
def test_no_plan_has_more_devices_than_its_pool(capsys: pytest.CaptureFixture[str]) -> None:
    """Several instances of several that decode, too."""
    line = "--model qwen3-235b-a22b --pool h200=32 --input 128 --output 680 --tpot 40ms --ttft 2s --rate 60"
    found = answer_of(capsys, line)
    plans = [found["best"], *found["alternatives"]]
    assert {plan["decoders"] for plan in plans} > {1} and max(plan["devices"] for plan in plans) <= 32


@pytest.mark.slow
def test_what_a_rate_takes_is_said_in_devices(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, f"{RATE} --pool b200 --rate 100")
    assert "any number of b200 at $4/h" in text and "For 50,000 tok/s it takes " in text
    assert "AFD needs " in text or "need the same number of devices" in text
    assert "higher" not in text and "lower" not in text


@pytest.mark.slow
def test_a_verdict_in_devices_says_what_its_probability_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Colocated needs fewer devices by the engine that leads; most others see it the other way round."""
    line = "--model deepseek-v3 --pool h200 --rate 40 --objective count --input 2000 --output 300 --tpot 50ms"
    text = said(capsys, line)
    counts = re.search(r"AFD needs (\d+) devices for this rate, colocated (\d+)", text)
    chance = re.search(r"AFD is better with probability (0\.\d+)", text)
    assert counts and chance and int(counts[1]) > int(counts[2]) and float(chance[1]) > 0.6
    assert "Disaggregate, although AFD needs" in text and "other engines outweigh it" in text
    beaten = re.search(r"would need (\d+) devices for this rate, not (\d+), though", text)
    assert beaten and int(beaten[1]) < int(beaten[2])


@pytest.mark.slow
def test_a_huge_pool_has_small_instances_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a million devices the best instance is none of thousands, and AFD has one as on 64."""
    few = answer_of(capsys, "--model deepseek-v3 --pool h800=64 --tpot 50ms --engine step-3 --kind afd")
    many = answer_of(capsys, "--model deepseek-v3 --pool h800=1000000 --tpot 50ms --engine step-3 --kind afd")
    assert many["best"]["devices"] <= 512
    assert many["best"]["usd_per_mtok"] < 1.1 * few["best"]["usd_per_mtok"]


@pytest.mark.slow
def test_p99_is_more_than_the_mean(capsys: pytest.CaptureFixture[str]) -> None:
    """Stages jitter even where all lengths are alike; so fewer requests fit the same target."""
    line = "--model deepseek-v3 --pool h800=64 --tpot 50ms --engine step-3 --kind afd"
    mean, p99 = (answer_of(capsys, f"{line} {flag}")["best"] for flag in ("--mean", "--p99"))
    assert 0.8 * mean["tok_s_per_device"] < p99["tok_s_per_device"] < 0.98 * mean["tok_s_per_device"]
    assert (np.diff(lengthened(np.array([1.0, 8.0, 512.0]))) > 0).all()


@pytest.mark.slow
def test_one_request_is_one_request(capsys: pytest.CaptureFixture[str]) -> None:
    """Places of micro-batches that nobody fills are no requests, nor do devices for them pay."""
    found = answer_of(capsys, "--model deepseek-v3 --pool h800=64 --concurrency 1 --kind afd")["best"]
    assert found["requests"] == 1 and found["devices"] < 64
    text = said(capsys, "--model deepseek-v3 --pool h800=64 --concurrency 1 --kind afd")
    assert ": 1 request in decode" in text


@pytest.mark.slow
def test_what_does_not_fit_is_counted_per_device(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--model deepseek-v3 --pool h100=8 --tensor-parallel 8 --devices 8 --kind colocated"
    text = said(capsys, line)
    assert "16 GiB per rank (fp8, 2.0 GiB on each device of a rank of 8)" in text
    assert "It takes at least " in text and "any number of" not in text
    fits = answer_of(
        capsys,
        "--model deepseek-v3 --pool gb200=4 --tensor-parallel 4 --devices 4 --kind colocated --engine vllm",
    )
    assert fits["best"]["devices"] == 4, "measured so; the engine's own share of memory counts"


@pytest.mark.slow
def test_counts_of_other_layers_are_told(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    file = tmp_path / "counts.json"
    file.write_text(json.dumps([[1.0 + expert % 7 for expert in range(256)]] * 4))
    text = said(capsys, f"--model deepseek-v3 --pool h800=64 --tpot 50ms --engine deepseek --counts {file}")
    assert "measured expert counts of 4 layers" in text
    assert "--counts has 4 layers and deepseek-v3 has 58 with experts" in text
