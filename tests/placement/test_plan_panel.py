"""The verdict over every engine whose rows bear on a question: shares, disagreements, and names that change nothing."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from afserve.cli.main import run
from afserve.cli.plan.command import plan as plan_command
from afserve.cli.plan.options import asked_question
from afserve.placement.planner.panel import asked_of_all

ROOT = Path(__file__).resolve().parents[2]


def values_of(capsys: pytest.CaptureFixture[str], line: str) -> dict:
    assert run(["plan", *line.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_verdict_that_hangs_on_the_engine_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """The engines with rows of 8 H200 say do, the one with a row of 128 H800 does not know."""
    found = values_of(capsys, "--model deepseek-v3 --pool h200=32 --tpot 50ms")
    heard = {one["engine"]: one for one in found["heard"]}
    assert {"tensorrt-llm", "sglang", "deepseek", "fastafd", "step-3"} <= set(heard)
    assert heard["tensorrt-llm"]["says"] == "do" and heard["deepseek"]["says"] == "even"
    assert 0.5 < found["probability_afd_better"] < 0.9
    assert (
        "even under deepseek" in found["verdict"]
        and "Another model makes it 0.22 times" in found["likeness_rule"]
    )
    for kind in ("colocated", "afd"):
        shares = [one["share"] for one in found["heard"] if one["kind"] == kind]
        assert sum(shares) == pytest.approx(1, abs=0.01)


@pytest.mark.slow
def test_no_plan_is_recommended_that_another_profile_beats_unsaid(capsys: pytest.CaptureFixture[str]) -> None:
    """Few devices: the one row of 128 devices says nothing of 16."""
    found = values_of(capsys, "--model deepseek-v3 --pool h800=16 --tpot 50ms")
    assert found["best"]["kind"] == "colocated" and found["best"]["usd_per_mtok"] < 0.9
    assert found["probability_afd_better"] < 0.4 and found["verdict"].startswith("Do not disaggregate")
    told = values_of(capsys, "--model gpt-oss-120b --pool h200=8 --precision fp4 --tpot 8ms")
    most = max(one["tok_s_per_device"] for one in told["heard"])
    assert most > 1.05 * told["best"]["tok_s_per_device"]
    assert "vllm's profile beats the best plan: " in told["verdict"]


@pytest.mark.slow
def test_named_engines_are_heard_alone(capsys: pytest.CaptureFixture[str]) -> None:
    found = values_of(capsys, "--model deepseek-v3 --pool h200=32 --tpot 50ms --engine deepseek")
    assert [one["engine"] for one in found["heard"]] == ["deepseek", "step-3"]
    assert "Engines differ" not in found["verdict"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-r1", "file"])
def test_the_verdict_hangs_on_no_name(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str) -> None:
    """A chip's file and a model's under other names are the same chip and the same model."""
    chip = (ROOT / "configs/hardware/h200.toml").read_text()
    (tmp_path / "mine.toml").write_text(
        re.sub(r'name = "h200"', 'name = "superchip"', chip).replace("aliases", "other")
    )
    if model == "file":
        text = (ROOT / "configs/models/deepseek-v3.toml").read_text()
        (tmp_path / "moe.toml").write_text(text.replace('name = "deepseek-v3"', 'name = "moe"'))
        model = str(tmp_path / "moe.toml")
    plain = values_of(capsys, "--model deepseek-v3 --pool h200=32 --tpot 50ms")
    other = values_of(capsys, f"--model {model} --pool {tmp_path / 'mine.toml'}=32 --tpot 50ms")
    assert other["heard"] == [
        one | {"plan": one["plan"].replace("h200", "superchip")} for one in plain["heard"]
    ]
    assert other["probability_afd_better"] == plain["probability_afd_better"]


@pytest.mark.slow
def test_a_known_name_with_other_figures_has_no_rows_of_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chip = (ROOT / "configs/hardware/h200.toml").read_text().replace("memory_tb_s = 4.8", "memory_tb_s = 9.6")
    (tmp_path / "h200.toml").write_text(chip)
    plain = values_of(capsys, "--model deepseek-v3 --pool h200=8 --tpot 50ms")
    other = values_of(capsys, f"--model deepseek-v3 --pool {tmp_path / 'h200.toml'}=8 --tpot 50ms")
    assert (
        max(one["likeness"] for one in other["heard"]) < 0.5 < max(one["likeness"] for one in plain["heard"])
    )


@pytest.mark.slow
def test_another_engine_leads_where_the_nearest_has_no_plan() -> None:
    """The nearest is given memory for nothing; the other of its kind then leads and has all of the verdict's share."""
    line = "--model deepseek-v3 --pool h800=64 --tpot 50ms"
    context = plan_command.make_context("plan", line.split())
    question = asked_question(dict(context.params))
    full = replace(dict(question.engines)["afd"], memory=0.1)
    engines = tuple((kind, full if kind == "afd" else engine) for kind, engine in question.engines)
    asked, found, panel = asked_of_all(replace(question, engines=engines))
    best = found.best("afd")
    assert full.name == "step-3" and best is not None and best.engine == "fastafd"
    assert dict(asked.engines)["afd"].name == "fastafd"
    assert [(voice.engine.name, voice.share) for voice in panel.of("afd")] == [("fastafd", 1.0)]
