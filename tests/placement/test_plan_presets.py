"""Targets by a benchmark's name, one request alone, and AgentX's metric."""

import json

import pytest

from afserve.cli.main import run
from afserve.cli.plan.command import plan as plan_command
from afserve.cli.plan.options import asked_question
from afserve.placement.planner.bound_one import alone_bound
from afserve.placement.planner.question import Question, answer
from afserve.placement.planner.simulate.requests import ServedRequests, agentx


def question_of(line: str) -> Question:
    return asked_question(dict(plan_command.make_context("plan", line.split()).params))


@pytest.mark.slow
def test_limits_of_mlperf_are_targets_at_the_99th_percentile() -> None:
    line = "--model {} --pool b200=8 --input 1000 --output 4000 --slo mlperf-interactive"
    for model, ttft, tpot in (("deepseek-r1", 1.5, 0.015), ("gpt-oss-120b", 2.0, 0.02)):
        asked = question_of(line.format(model))
        assert (asked.targets.ttft, asked.targets.tpot) == (ttft, tpot) and asked.setting.percentile99


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--model glm-5 --input 9 --output 9", "MLPerf has no such limits for glm-5; it has for deepseek-v3"),
        ("--model deepseek-r1 --input 9 --output 9 --tpot 9ms", "drop --tpot and --ttft, or --slo"),
        ("--model deepseek-r1", "a decode-only workload has no prompts"),
    ],
)
def test_limits_that_do_not_fit(capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    assert run(["plan", *f"{line} --pool b200=8 --slo mlperf-interactive".split()]) == 2
    assert words in capsys.readouterr().err


def test_one_request_alone_reads_what_bandwidth_allows(capsys: pytest.CaptureFixture[str]) -> None:
    """Experts on more devices than a token chooses are read no sooner, and no plan beats its bandwidth."""
    line = "--model deepseek-v3 --context 4096 --engine step-3 --kind afd --concurrency 1 --objective latency"
    found = {}
    for experts in (12, 40):
        asked = question_of(f"{line} --pool h800=44 --attention-devices 4 --expert-devices {experts}")
        best = answer(asked).best()
        assert best is not None
        found[experts] = alone_bound(asked, best)
        assert found[experts].seconds < best.tpot
    assert found[12] == found[40] and found[12].expert_devices == 8
    assert found[12].experts == 58 * 8 * 3 * 7168 * 2048, "fp8: a byte a weight"
    assert run(["plan", *f"{line} --pool h800=44".split()]) == 0
    out = capsys.readouterr().out
    assert "experts apart pay for memory and for batches, not for this speed" in out
    assert run(["plan", *f"{line} --pool h800=44".replace("--concurrency 1", "--concurrency 9").split()]) == 0
    assert "One request alone" not in capsys.readouterr().out


@pytest.mark.slow
def test_agentx_counts_the_whole_latency(capsys: pytest.CaptureFixture[str]) -> None:
    done = ServedRequests()
    done.ttft, done.tpot, done.weight = [1.0] * 8 + [3.0] * 2, [0.01] * 10, [1.0] * 10
    assert agentx(done, 100.0) == pytest.approx(1 / 0.04) and agentx(ServedRequests(), 9.0) == 0.0
    line = "simulate --model deepseek-v3 --pool h800=16 --tpot 50ms --input 2000 --output 500 --requests 40 --json"
    assert run(line.split()) == 0
    values = json.loads(capsys.readouterr().out)
    assert 0 < values["tok_s_per_user_agentx"] < 1e3 / values["tpot_ms"]["p50"]
    assert 0 <= values["share_inside_targets"] <= 1
