"""`afserve pilot replay` from the command line: both forms of output, classes of service, and mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest

from afserve.cli.main import run
from afserve.cli.pilot.outcome import beside_bursts, replay_text
from afserve.control.pilot.replay.run import PlayedDay
from afserve.control.pilot.sizes import PoolSizes

CLASSES = "[chat]\npriority = -10\nttft = 0.5\n\n[bulk]\nttft = 20.0\n"
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"


def line(folder: Path, more: str) -> list[str]:
    rows = [
        f"2023-11-16 18:15:{second % 60:02}.0000000,{300 + 400 * (second % 3)},40" for second in range(60)
    ]
    (folder / "trace.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    (folder / "classes.toml").write_text(CLASSES)
    flags = f"pilot replay --trace {folder}/trace.csv --model qwen3-30b-a3b --pool h20=12 {more}"
    return flags.split()


@pytest.mark.slow
def test_a_made_day_with_bursts_and_classes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    day = f"--day 0.5 --peak 20 --bursts 96 --clumped 2 --seed 3 --classes {tmp_path}/classes.toml"
    assert run(line(tmp_path, f"{day} --shares chat=0.8,bulk=0.2 --tick 5 --json")) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["burst_count"] > 0 and values["requests"] > 1000
    assert [one["share"] for one in values["classes"].values()] == [0.8, 0.2]
    assert values["least_class_of_oracle"] == pytest.approx(
        min(one["pilot"] / one["oracle"] for one in values["classes"].values()), abs=1e-3
    )
    assert run(line(tmp_path, "--times 10 --tick 5")) == 0
    said = capsys.readouterr().out
    assert "of the oracle's attainment" in said and "bursts" not in said and "class " not in said


@pytest.mark.parametrize(
    "more, why",
    [
        ("--bursts 3", "--bursts: does nothing without --day HOURS"),
        ("--day 1 --times 2", "--times: does nothing with --day"),
        ("--shares chat=1", "--shares: does nothing without --classes"),
        ("--classes {} --shares chat=0.8", "--shares: add up to 0.8, not to 1"),
        ("--classes {} --shares chat=0.8,night=0.2", "--shares: 'night' is none of chat, bulk"),
        ("--classes {} --shares chat=0.3,chat=0.5,bulk=0.5", "--shares: 'chat' has more than one share"),
        ("--seed 3", "--seed: does nothing without --day HOURS or --classes FILE"),
        ("--classes {} --shares chat=much", "is not NAME=SHARE with a share from 0 to 1"),
    ],
)
def test_mistakes_name_the_flag(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, more: str, why: str
) -> None:
    assert run(line(tmp_path, more.format(tmp_path / "classes.toml"))) == 2
    assert why in capsys.readouterr().err


def test_a_trace_that_comes_all_at_once_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = line(tmp_path, "")
    (tmp_path / "trace.csv").write_text(f"{HEAD}\n" + 3 * "2023-11-16 18:15:00.0000000,300,40\n")
    assert run(asked) == 2
    assert "nothing arrives, or all at once" in capsys.readouterr().err
    assert run(line(tmp_path, "--day 0.1 --peak 0.001")) == 2, "nobody comes on that day"
    assert "nothing arrives, or all at once" in capsys.readouterr().err


def test_where_bursts_leave_no_time_beside_them_nothing_is_said_of_it() -> None:
    row = {"attainment": 1.0, "device_hours": 1.0, "changes": 0, "most_devices": 3}
    ratios = ("attainment_of_oracle", "hours_of_oracle", "hours_of_fixed", "changes_in_10_minutes")
    values: dict[str, Any] = dict.fromkeys(("pilot", "oracle", "fixed", "replicas"), row)
    values |= dict.fromkeys(ratios, 1.0) | dict.fromkeys(("model", "pool", "ttft", "tpot"), "x")
    values |= {"requests": 3, "hours": 1.0, "intervals": {"compared": 0, "held": 0}, "burst_count": 2}
    assert replay_text(values | {"changes_beside_bursts_in_10_minutes": None}).endswith("\n2 bursts")
    assert "2 bursts; 0.5 changes" in replay_text(values | {"changes_beside_bursts_in_10_minutes": 0.5})


def test_changes_of_bursts_are_counted_apart() -> None:
    size = PoolSizes(1, 1, 1)
    times = (0.0, 500.0, 1050.0, 1900.0, 3000.0, 5000.0)
    played = PlayedDay(1.0, 0.0, 0.0, 1.0, 2.0, tuple((at, size) for at in times))
    found = beside_bursts(played, [(1000.0, 1200.0), (1300.0, 1400.0)], 600.0)
    # behind 2,120 s nothing is of a burst: 500, 3000 and 5000 within 7,200 - 1,120 s
    assert found == {"burst_count": 2, "changes_beside_bursts_in_10_minutes": round(3 / (6080 / 600), 2)}
    assert beside_bursts(played, [], 600.0) == {}
