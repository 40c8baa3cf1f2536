"""`afserve bench calibrate` on the bundled model, and predictions from what it wrote. No times are judged."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from afserve.cli.bench.calibrate import _CROWDED, Grid, changed, rows, stolen
from afserve.cli.main import run
from afserve.launch.machine import this_machine
from afserve.placement.planner.calibration import read_calibration
from bench.planner_self import LAYOUTS, Measured, Predictor, compare, judged, main, middle, summary

TINY = Grid((1, 2, 3), (24,), 128, 4, 4, 2, (1, 2, 3), (2,), 16, 24, 1)
PARTS = {"attention", "step", "exchange", "kernel", "answer", "experts", "gateway", "control", "run"}


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "nano.jsonl"
    path.write_text("".join(json.dumps({"threads": 1, **row}) + "\n" for row in rows("nano", 1, TINY)))
    return path


@pytest.mark.process
def test_every_part_is_measured(calibration: Path) -> None:
    found = read_calibration("nano.jsonl", calibration.read_text().splitlines())
    assert set(found) == PARTS
    assert all(len(found[part]) >= 3 for part in PARTS)
    assert all(row["seconds"] > 0 for part in PARTS for row in found[part])
    assert [row["requests"] for row in found["attention"]] == [1, 2, 3]
    for row in found["experts"]:
        assert 0 < row["active"] <= row["rows"]


def test_an_unknown_model_is_one_line_on_a_busy_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (9.0, 9.0, 9.0))
    assert run(["bench", "calibrate", "--model", "nosuch", "--out", str(tmp_path / "rows.jsonl")]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: --model nosuch") and printed.err.count("\n") == 1


@pytest.mark.process
def test_cores_are_measured_beside_each_other(calibration: Path) -> None:
    rows = [json.loads(line) for line in calibration.read_text().splitlines()]
    beside = {row["stage"]: row for row in rows if row["part"] == "beside"}
    assert set(beside) == {"experts", "attention"}
    assert all(row["alone"] > 0 and row["seconds"] > 0 for row in beside.values())


@pytest.mark.process
def test_served_runs_are_met(calibration: Path, tmp_path: Path) -> None:
    """Runs of a kind that took thrice as long as their stages do so at every size, and those of no other kind."""
    lines = [json.loads(line) for line in calibration.read_text().splitlines()]
    found = [row for row in lines if row["part"] == "run"]
    cores = this_machine().cores
    apart = {1, cores} if cores <= _CROWDED else {1}
    assert {row["experts"] for row in found} == {0, *apart}
    assert all(row["seconds"] > 0 for row in found)
    others = [row for row in lines if row["part"] != "run"]
    run, crowd = (Measured(1, nodes, 2, 1, 2, 28.0, 5.0, 1e3) for nodes in (1, 2))
    together = Measured(1, 0, 1, 1, 2, 28.0, 5.0, 1e3)
    without = _predictor(tmp_path, others, cores=2)
    known = {"part": "run", "requests": 2, "context": 28.0, "attention": 1, "micro_batches": 2, "threads": 1}
    slow = [
        *others,
        known | {"experts": 1, "seconds": 3 * without.tpot(run)},
        known | {"experts": 2, "seconds": 2 * without.tpot(crowd)},
    ]
    with_runs = _predictor(tmp_path, slow, cores=2)
    assert with_runs.tpot(run) == pytest.approx(3 * without.tpot(run), rel=0.02)
    assert with_runs.tpot(crowd) == pytest.approx(2 * without.tpot(crowd), rel=0.02)
    assert with_runs.tpot(together) == pytest.approx(without.tpot(together))
    double = known | {"experts": 0, "micro_batches": 1, "seconds": 2 * without.tpot(together)}
    both = _predictor(tmp_path, [*others, double], cores=2)
    assert both.tpot(together) == pytest.approx(2 * without.tpot(together), rel=0.02)


def _predictor(folder: Path, rows: list[dict[str, float]], cores: int) -> Predictor:
    path = folder / f"{len(rows)}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Predictor("nano", [path], cores=cores)


@pytest.mark.process
def test_the_machine_itself_is_judged(calibration: Path) -> None:
    (row,) = [
        row for row in map(json.loads, calibration.read_text().splitlines()) if row["part"] == "changed"
    ]
    assert 0 < row["ratio"] < 100


def test_a_machine_that_changed_is_named() -> None:
    assert changed(1.05) == changed(0.95) == ""
    assert "+25%" in changed(1.25) and "-20%" in changed(0.8)
    assert stolen((100.0, 5.0), (300.0, 5.0)) == stolen((0.0, 0.0), (0.0, 0.0)) == ""
    assert "13%" in stolen((100.0, 5.0), (300.0, 31.0))


@pytest.mark.process
def test_every_layout_is_predicted(calibration: Path, tmp_path: Path) -> None:
    predictor = Predictor("nano", [calibration], cores=2)
    measured = [
        Measured(attention, experts, 2, 1, batch, 24.0, 5.0, batch / 5e-3, prefill=prefill)
        for prefill, attention, experts in LAYOUTS
        for batch in (1, 3, 8)
    ]
    judgements = [judged(predictor, one) for one in measured]
    assert all(0 < predictor.tpot(one) < 60 for one in measured)
    assert len({row["case"] for row in judgements}) == len(measured)
    assert math.isfinite(float(str(summary(judgements)["tpot_error"])))
    earlier = tmp_path / "measured.jsonl"
    earlier.write_text("".join(json.dumps(row) + "\n" for row in [*judgements, summary(judgements)]))
    assert len(compare(calibration, earlier, "nano")) == len(measured)


@pytest.mark.process
@pytest.mark.long
def test_real_runs_beside_their_predictions(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "planner_self.jsonl"
    flags = f"--model nano --calibration {calibration} --batch 1,4 --output-len 24 --repeats 1 --out {out}"
    main(flags.split())
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(written) == len(LAYOUTS) * 2 + 4
    assert {"colocated, median of 2", "AFD, median of 6", "prompts apart, median of 2"} < {
        row["case"] for row in written
    }
    assert all({"machine", "commit", "date", "tpot_error", "tok_s_error"} <= row.keys() for row in written)
    assert "median of 10, absolute errors: TPOT" in capsys.readouterr().out


def test_rounds_become_medians() -> None:
    rounds = [Measured(1, 1, 2, 1, 8, 80.0, tpot, 8e3 / tpot) for tpot in (5.0, 20.0, 4.0)]
    one = middle(rounds)
    assert (one.tpot_ms, one.tok_s, one.low, one.high) == (5.0, 1600.0, 400.0, 2000.0)


@pytest.mark.process
def test_calibrations_with_equal_threads_are_fitted_together(calibration: Path, tmp_path: Path) -> None:
    """One made in a minute when everything took twice as long is met half way, whichever is named last."""
    rows = [json.loads(line) for line in calibration.read_text().splitlines()]
    usual, slow = (tmp_path / f"{name}.jsonl" for name in ("usual", "slow"))
    for path, factor in ((usual, 1.0), (slow, 2.0)):
        path.write_text("".join(json.dumps(_timed(row, factor)) + "\n" for row in rows))
    run = Measured(1, 1, 2, 1, 8, 24.0, 5.0, 1.6e3)
    fast, both, turned, late = (
        Predictor("nano", files, cores=2).tpot(run)
        for files in ([usual], [usual, slow], [slow, usual], [slow])
    )
    assert fast < both < late
    assert both == pytest.approx(turned, rel=1e-3)


def _timed(row: dict[str, float], factor: float) -> dict[str, float]:
    """The row with seconds that grow with its counts, so that no pause of this machine is in what is fitted."""
    work = sum(value for name, value in row.items() if isinstance(value, int) and name != "threads")
    seconds = factor * (1e-4 + 1e-7 * work)
    return row | {name: seconds for name in ("seconds", "alone") if name in row}


def test_a_model_without_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "none.jsonl"
    assert run(["bench", "calibrate", "--model", "mixtral-8x7b", "--out", str(out)]) == 2
    assert "no weights" in capsys.readouterr().err
    assert not out.exists()


def test_a_folder_that_is_not_there_is_refused_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "calibrate", "--out", str(tmp_path / "no" / "file.jsonl")]) == 2
    assert "--out" in capsys.readouterr().err


def test_the_command_is_there_without_torch() -> None:
    code = "import sys, afserve.cli.bench.calibrate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
