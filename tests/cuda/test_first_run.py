"""`bench.gpu_first_run` without a GPU: steps and their deadlines, rows at once, what is compared, what is gathered."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from bench import gpu_first_run
from bench.gpu_budget import budget, faults, write_budget
from bench.gpu_compare import NEAR, verdicts
from bench.gpu_plan import steps
from bench.gpu_prepare import unpack, wanted
from bench.gpu_runner import Step, run_steps

ROW = "import json; print(json.dumps({'a': 1}), flush=True)"
KERNEL = {
    "triton": "3.9.0", "arch": 90, "case": "mla", "kernel": "_attend", "registers": 255, "spill": 0,
    "local_in_loops": 0, "shared": 1000, "programs": 2, "wide_loads": 0.5, "wide_bytes": 0.8,
    "matrix": ["HGMMA"], "loop": 100,
}  # fmt: skip


def run(*planned, seconds=60.0):
    written = []
    found = run_steps(planned, seconds, written.append, os.environ)
    assert written == found
    return found


def test_a_crash_costs_one_step_and_what_it_printed_is_kept():
    crash, fine = Step("crash", ("-c", ROW + "; 1 / 0"), 30), Step("fine", ("-c", ROW), 30)
    rows = run(crash, fine)
    assert [(row["step"], row.get("status")) for row in rows] == [
        ("crash", None), ("crash", 1), ("fine", None), ("fine", 0),
    ]  # fmt: skip
    assert "ZeroDivisionError" in rows[1]["tail"][-1] and rows[2]["a"] == 1


def test_a_step_that_hangs_is_given_up_with_what_it_started(tmp_path):
    """Its row was there before it hung; its child holds the pipe open and ends with it."""
    child = f"import pathlib, time; time.sleep(60); pathlib.Path({str(tmp_path / 'late')!r}).touch()"
    code = f"{ROW}; import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    begin = time.monotonic()
    rows = run(Step("hangs", ("-c", code), 3.0))
    assert rows[0]["a"] == 1 and rows[1]["status"] == 124 and time.monotonic() - begin < 50


def test_what_there_is_no_time_or_no_program_for_is_told():
    rows = run(
        Step("late", ("-c", ROW), 30), Step("other", ("-c", ROW), 30, needs="no-such-program"), seconds=0.5
    )
    assert [row["status"] for row in rows] == ["not begun", "skipped"]


def told(topology, tokens, top=()):
    return {"step": topology, "topology": topology, "tokens": tokens, "top": list(top)}


def test_tokens_are_near_where_the_other_one_was_almost_as_likely():
    best = [[[[7, -0.5], [8, -0.5 - NEAR / 2]], [[1, -0.1], [2, -3.0]]]]
    rows = [
        told("colocated", [[7, 1]], best), told("1x1", [[7, 1]]), told("1x2", [[8, 9]]), told("2x2", [[7, 2]]),
        told("3x3", [[7, 5]]), {"step": "about"},
    ]  # fmt: skip
    found = verdicts(rows)
    assert [row["verdict"] for row in found] == ["same", "near", "others", "others"]
    assert [row["largest_gap"] for row in found][2:] == [2.9, float("inf")]


def test_other_tokens_stop_nothing(tmp_path, monkeypatch):
    first = json.dumps(told("colocated", [[1]], [[[[1, -0.1], [2, -3.0]]]]))
    codes = {
        "tokens-a": first,
        "tokens-b": json.dumps(told("1x1", [[2]])),
        "engine": '{"tokens_per_second": 5}',
    }
    planned = [Step(name, ("-c", f"print({line!r})"), 30) for name, line in codes.items()]
    monkeypatch.setattr(gpu_first_run, "steps", lambda *_: planned)
    out = tmp_path / "rows.jsonl"
    assert gpu_first_run.first_run(out, 1.0, "cpu") == 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {"tokens_per_second", "commit", "machine"} <= {
        key for row in rows if row["step"] == "engine" for key in row
    }
    assert rows[-1]["verdict"] == "others"


def test_the_plan_fits_its_time_and_names_what_exists(tmp_path):
    for device in ("cuda:0", "cpu"):
        planned = steps(device, tmp_path / "none", 1.0)
        assert len({step.name for step in planned}) == len(planned)
        files = [word for step in planned for word in step.command if word.startswith("tests/")]
        assert all((gpu_first_run.ROOT / name).exists() for name in files)
    assert sum(step.seconds for step in steps("cuda:0", tmp_path, 1.0)) <= 2 * 60 * gpu_first_run.MINUTES


def test_elsewhere_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr("bench.gpu_first_run.cuda.count_gpus", lambda: 0)
    assert gpu_first_run.main([]) == 0
    assert capsys.readouterr().out == "not measured: no CUDA device\n"


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(900)
def test_all_of_it_runs_on_a_cpu(tmp_path):
    """The same program as on the GPU: tokens of three topologies, the sampler, copies, the engine."""
    out = tmp_path / "rows.jsonl"
    assert gpu_first_run.first_run(out, 28.0, "cpu") == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    ended = {row["step"]: row["status"] for row in rows if "status" in row}
    assert {"about", "sampler", "copies", "tokens-1x2", "engine-1x1"} <= set(ended) and set(
        ended.values()
    ) == {0}
    assert {row["verdict"] for row in rows if row["step"] == "compare"} <= {"same", "near"}


def test_a_kernel_beyond_its_budget_is_named(tmp_path):
    file = tmp_path / "budget.jsonl"
    write_budget([KERNEL, {**KERNEL, "case": "gqa", "spill": 8}], file)
    known = budget(file)
    assert faults(KERNEL, known) == []
    worse = {
        **KERNEL,
        "registers": 256,
        "spill": 16,
        "local_in_loops": 2,
        "programs": 1,
        "wide_loads": 0.25,
        "wide_bytes": 0.5,
        "matrix": [],
        "loop": 200,
    }
    assert len(faults(worse, known)) == 8
    assert faults({**KERNEL, "shared": 228 << 10}, known)
    assert len(faults({**worse, "triton": "3.6.0"}, known)) == 2, (
        "without a row: no spill, no local load in a loop"
    )
    assert "no tile" in faults({"triton": "3.9.0", "arch": 90, "case": "gqa", "error": "no tile"}, known)[0]
    write_budget([{**KERNEL, "spill": 4}], file)
    assert len(budget(file)) == 2 and faults({**KERNEL, "spill": 4}, budget(file)) == []


@pytest.mark.parametrize("arch", [90, 100])
def test_every_launch_has_a_budget_for_both_tritons(arch):
    """That of constraints.txt, and 3.6, which comes with torch 2.11. None has local loads in a loop."""
    rows = {key: row for key, row in budget().items() if key[1] == arch}
    by_triton = {triton: {key[2:] for key in rows if key[0] == triton} for triton in ("3.6.0", "3.9.0")}
    assert len(by_triton["3.9.0"]) > 100 and by_triton["3.9.0"] == by_triton["3.6.0"]
    assert {key[2] for key, row in rows.items() if row["local_in_loops"]} == set()


def test_code_is_read_as_the_disassembler_prints_it():
    pytest.importorskip("triton")
    from bench.gpu_chip import read_code

    code = """
        /*0000*/                   LDL R1, [R2] ;
        /*0010*/                   LDG.E.LTC128B.128 R4, [R2.64] ;
        /*0018*/                   LDGDEPBAR ;
        /*0020*/               @P0 LDGSTS.E.64 [R4], [R2.64] ;
        /*0030*/                   STL [R1], R4 ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4] ;
        /*0050*/              @!P0 BRA 0x10 ;
        /*0060*/                   BRA 0x60 ;
    """
    wide = {"wide_loads": 0.5, "wide_bytes": 0.67}
    assert read_code(code) == {"local_in_loops": 1, **wide, "matrix": ("HGMMA",), "loop": 6}


def test_wheels_are_those_that_the_machine_has_not(tmp_path):
    project = '[project]\ndependencies = ["torch>=2.11", "numpy>=2", "uvicorn>=0.30", "google-re2"]\n'
    found = wanted(project, "uvicorn==0.40.0\npytest==9.0.0\n")
    assert found[:3] == ["uvicorn==0.40.0", "google-re2", "pytest==9.0.0"]
    assert not any(name.startswith(("torch", "numpy")) for name in found)


def test_wheels_are_unpacked_and_nothing_is_run(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "one-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("one.py", "x = 1\n")
        archive.writestr("one-1.0.data/scripts/one", "#!python\n")
    assert unpack(tmp_path) == ["one-1.0-py3-none-any.whl"]
    assert [path.name for path in Path(tmp_path, "site").iterdir()] == ["one.py"] and "one" not in sys.modules
