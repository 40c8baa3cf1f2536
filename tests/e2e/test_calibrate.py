"""`afserve bench calibrate` on the bundled model, and predictions from what it wrote. No times are judged."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest

from afserve.cli.bench import calibrate
from afserve.cli.bench.calibrate import _CROWDED, Grid, changed, deployments, rows, stolen, wholes
from afserve.cli.bench.case import Case
from afserve.cli.bench.ours import Shape, Turn
from afserve.cli.bench.stages import AttentionSide
from afserve.cli.main import run
from afserve.comm.m2n.link import ExpertLink
from afserve.config import ModelSource
from afserve.kernels.ops import open_ops
from afserve.launch.measure.others import CoreTime
from afserve.launch.plan.models import find_model
from afserve.placement.planner.perf.calibration import read_calibration
from bench.planner_rounds import LAYOUTS, Measured, Record, append_rounds, middle, read_record
from bench.planner_self import judged_all, main, summaries
from tests.patching import patch_library

TINY = Grid((1, 2, 3), (24,), 128, 4, 4, 2, (1, 2, 3), (2,), 16, 24, 1, (1,))
PARTS = {
    "attention",
    "step",
    "exchange",
    "kernel",
    "answer",
    "experts",
    "gateway",
    "control",
    "run",
    "drafts",
}
WHOLE = "whole"
BESIDE = {"attention beside", "experts beside"}


def cores_of(patch: pytest.MonkeyPatch, cores: int) -> None:
    patch.setattr("afserve.cli.bench.calibrate.this_machine", lambda: SimpleNamespace(cores=cores))


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory, warm_bench_nodes: None) -> Path:
    """As on a machine of one core: the nodes of no crowd are started. `test_real_rounds_...` starts them by night."""
    path = tmp_path_factory.mktemp("calibration") / "nano.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        cores_of(patch, 1)
        path.write_text("".join(json.dumps({"threads": 1, **row}) + "\n" for row in rows("nano", 1, TINY)))
    return path


@pytest.mark.process
def test_every_part_is_measured(calibration: Path) -> None:
    found = read_calibration("nano.jsonl", calibration.read_text().splitlines())
    assert set(found) == PARTS | BESIDE | {WHOLE}
    assert all(len(found[part]) >= 3 for part in PARTS) and all(len(found[part]) == 1 for part in BESIDE)
    assert all(row["seconds"] > 0 for part in found for row in found[part])
    assert [row["requests"] for row in found["attention"]] == [1, 2, 3]
    assert len(found[WHOLE]) in (0, 6), "with one expert node and with two, where steps are one call"
    assert bool(found[WHOLE]) == (find_spec("afserve.kernels._native") is not None)
    for row in found["experts"]:
        assert 0 < row["active"] <= row["rows"]


@pytest.mark.process
@pytest.mark.usefixtures("warm_bench_nodes")
def test_where_no_step_is_one_call_none_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ExpertLink, "exchange", lambda self, micro_batch, layers: None)
    found = find_model("nano", tmp_path)
    engine = AttentionSide(ModelSource(str(found.folder), found.name), open_ops("cpu", 1), 128)
    assert list(wholes(engine, TINY, dict.fromkeys(TINY.requests, 1e-4))) == []


def test_an_unknown_model_is_one_line_on_a_busy_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_library(monkeypatch, calibrate, "os", getloadavg=lambda: (9.0, 9.0, 9.0))
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
def test_the_smallest_deployments_are_served(calibration: Path) -> None:
    found = [row for row in map(json.loads, calibration.read_text().splitlines()) if row["part"] == "run"]
    assert {(row["attention"], row["experts"]) for row in found} == {(1, 0), (1, 1)}
    assert {row["micro_batches"] for row in found if row["attention"] == row["experts"] == 1} == {1, 2}
    assert all(row["seconds"] > 0 for row in found)


@pytest.mark.parametrize("cores", [1, 2, _CROWDED, _CROWDED + 1])
def test_every_crowd_is_asked_for(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_turns(case: Case, shape: Shape) -> Iterator[Turn]:
        assert case.batches == TINY.apart and not shape.colocated and shape.share_cores is False
        return iter([Turn(requests, 0.01 * requests, 0.001) for requests in case.batches])

    cores_of(monkeypatch, cores)
    monkeypatch.setattr("afserve.cli.bench.ours.in_turns", in_turns)
    found = list(deployments("nano", TINY))
    crowds = {(1, cores, 2), (cores, 1, 2)} if 1 < cores <= _CROWDED else set()
    asked = {(row["attention"], row["experts"], row["micro_batches"]) for row in found}
    assert asked == {(1, 1, 1), (1, 1, 2), *crowds} and len(found) == len(asked) * len(TINY.apart)
    assert all(row["seconds"] == pytest.approx(0.01 * int(str(row["requests"]))) for row in found)


@pytest.mark.process
def test_the_machine_itself_is_judged(calibration: Path) -> None:
    (row,) = [
        row for row in map(json.loads, calibration.read_text().splitlines()) if row["part"] == "changed"
    ]
    assert 0 < row["ratio"] < 100


def test_a_machine_that_changed_is_named() -> None:
    assert changed(1.05) == changed(0.95) == ""
    assert "+25%" in changed(1.25) and "-20%" in changed(0.8)
    before = CoreTime(100.0, stolen=5.0)
    assert stolen(before, CoreTime(300.0, stolen=5.0)) == stolen(CoreTime(), CoreTime()) == ""
    assert "13%" in stolen(before, CoreTime(300.0, stolen=31.0))


@pytest.mark.process
def test_every_layout_is_asked_for_and_judged(calibration: Path) -> None:
    """Each run becomes arguments of `afserve plan`; what it prints is judged."""
    measured = [
        Measured(
            attention,
            experts,
            2 if experts else 1,
            1,
            batch,
            96.0 if prefill else 24.0,  # prompts of 64 and answers of 64
            5.0,
            batch / 5e-3,
            prefill=prefill,
        )
        for (prefill, attention, experts), batch in zip(LAYOUTS, cycle((1, 3, 8)))
    ]
    measured.append(replace(measured[0], draft="mtp:2", yielded=2.5))
    record = Record({1: calibration.read_text().splitlines()}, [measured])
    rows = judged_all("nano", record, cores=2)
    assert len({row["case"] for row in rows}) == len(measured)
    for row in rows:
        planned = float(str(row["predicted_tpot_ms"]))
        assert 0 < planned < 60_000
        assert float(str(row["tpot_error"])) == pytest.approx(planned / 5.0 - 1, abs=1e-3)
    in_vain = replace(record, rounds=[[replace(measured[-1], yielded=1.0)]])
    (wrong,) = judged_all("nano", in_vain, cores=2)
    assert float(str(rows[-1]["predicted_tpot_ms"])) < float(str(wrong["predicted_tpot_ms"]))
    assert [row["case"] for row in summaries(rows)][-2:] == ["drafts, median of 1", f"median of {len(rows)}"]


@pytest.mark.process
@pytest.mark.long
def test_real_rounds_beside_their_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "rounds.jsonl"
    for _ in range(2):
        append_rounds(record, 1, Case("nano", (1, 4), 16, 24, 2), 2, 1, TINY, ("mtp:1",))
    found = read_record(record)
    assert len(found.rounds) == 2 and all(len(runs) == len(LAYOUTS) * 2 + 2 for runs in found.rounds)
    *others, drafted = found.runs()
    assert len(others) == len(LAYOUTS) * 2 + 1 and drafted.draft == "mtp:1" and 1 < drafted.yielded <= 2
    main(["--model", "nano", "--record", str(record)])
    printed = capsys.readouterr().out
    assert "median of 12, absolute errors: TPOT" in printed
    assert all(f"{kind}, median of" in printed for kind in ("colocated", "AFD", "prompts apart", "drafts"))


def test_rounds_become_medians() -> None:
    rounds = [Measured(1, 1, 2, 1, 8, 80.0, tpot, 8e3 / tpot) for tpot in (5.0, 20.0, 4.0)]
    one = middle(rounds)
    assert (one.tpot_ms, one.tok_s, one.low, one.high) == (5.0, 1600.0, 400.0, 2000.0)
    timed = [[replace(run, pace=pace)] for run, pace in zip(rounds, (1e-3, 2e-3, 1e-3))]
    (one,) = Record({1: [json.dumps({"part": "pace", "seconds": 1e-3})]}, timed).runs()
    assert (one.tpot_ms, one.low, one.high, one.pace) == (5.0, 800.0, 2000.0, 1.0), (
        "the slow one was half as slow"
    )


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
