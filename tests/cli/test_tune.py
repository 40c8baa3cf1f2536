"""`afserve tune` on this machine, as short as it can be, and what it says of machines that are pretended."""

import json
from pathlib import Path

import pytest

from afserve.cli.main import run
from afserve.config import ISAS
from afserve.errors import DoesNotFitError
from afserve.kernels.isa import isas_here
from afserve.launch.measure import clock, tuning
from afserve.launch.measure.choice import choice_here
from afserve.launch.measure.others import CoreTime, OtherLoad, others_before
from afserve.launch.measure.tuning import KINDS, ROWS, measure_machine, thread_counts
from afserve.launch.plan.footprint import GIB
from afserve.launch.plan.machine import Machine, this_machine
from afserve.launch.plan.models import find_model

native = pytest.mark.skipif(not isas_here(), reason="the native library is not built")


@pytest.fixture
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of servers hold hundreds of megabytes, and what is measured is more than they hold."""
    for module in (clock, tuning):
        monkeypatch.setattr(module, "out_of_cache", lambda least=0: 1 << 20)


@pytest.mark.slow
@pytest.mark.usefixtures("small_caches")
@native
def test_what_it_measures_and_what_up_would_choose(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "--json", "--seconds", "1", "--model", "nano"]) == 0
    found = json.loads(capsys.readouterr().out)
    cores = this_machine().cores
    assert [read["threads"] for read in found["reads"]] == thread_counts(cores)
    assert all(read["gb_s"] > 0 for read in found["reads"]) and found["read_again"] > 0
    assert {(row["kept"], row["rows"]) for row in found["kernels"]} == {
        (k.name, r) for k in KINDS for r in ROWS
    }
    best = max(found["reads"][-1]["gb_s"], found["read_again"])
    for row in found["kernels"]:
        assert row["isa"] == isas_here()[0] and row["us"] > 0 and row["gflop_s"] > 0
        assert row["share"] == pytest.approx(row["gb_s"] / best)
    assert (found["hidden"], found["inner"], found["isas"]) == (256, 32, list(isas_here()))
    up = found["up"]
    assert (up["model"], up["expert_dtype"], up["attention"]) == ("nano", "auto", 1) and up["kv_tokens"] > 0
    assert found["others"]["cores"] == cores and isinstance(found["warnings"], list)


@pytest.mark.slow
@pytest.mark.usefixtures("small_caches")
@native
def test_the_report_is_read_in_half_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "--seconds", "1", "--isa", isas_here()[-1], "--model", "nano"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 20 and "cores; instruction sets" in lines[0]
    assert any(line.startswith("memory is read at") and "by 1 thread" in line for line in lines)
    assert f"{isas_here()[-1]}: weights read as a share of that" in "\n".join(lines)
    assert [line.split()[0] for line in lines if line.endswith("GFLOP/s")] == [kind.name for kind in KINDS]
    assert any(line.startswith("afserve up nano: 1 attention x") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--seconds", "0"], "--seconds: 0.0 is not"),
        (["--seconds", "x"], "--seconds"),
        (["--isa", "sse9"], "--isa"),
        (["--model", "nosuch"], "neither a folder"),
        (["more"], "unexpected extra argument"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], arguments: list[str], wanted: str
) -> None:
    assert run(["tune", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and wanted in said and said.count("\n") == 1


@native
def test_an_instruction_set_that_is_not_here_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    missing = [isa for isa in ISAS if isa not in isas_here()]
    if not missing:
        pytest.skip("this machine has all")
    assert run(["tune", "--isa", missing[0]]) == 2
    assert f"--isa: {missing[0]} does not run on" in capsys.readouterr().err


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(DoesNotFitError, match=r"afserve tune needs .* are free; end something"):
        measure_machine(Machine(1, 100 << 20, GIB), ("generic",), 64, 32, 1.0)


def test_threads_are_doubled_up_to_the_cores() -> None:
    assert [thread_counts(cores) for cores in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_experts_are_kept_in_as_many_bits_as_fit(tmp_path: Path) -> None:
    found = find_model("qwen3-30b-a3b", tmp_path)
    fits = {free: choice_here(found, Machine(8, free * GIB, 256 * GIB), "auto") for free in (128, 48, 32, 8)}
    assert [fits[free].expert_dtype for free in fits] == ["auto", "int8", "int4", ""]
    assert fits[128].attention == 1 and fits[128].experts == 2 and not fits[8].attention
    assert list(fits[8].weights) == ["auto", "int8", "int4"]
    assert sorted(fits[8].weights.values(), reverse=True) == list(fits[8].weights.values())


def test_two_nodes_of_one_thread_lend_their_cores(tmp_path: Path) -> None:
    choice = choice_here(find_model("nano", tmp_path), Machine(2, 4 * GIB, 8 * GIB), "auto")
    assert (choice.attention, choice.experts, choice.threads, choice.lends_cores) == (1, 1, 1, True)


def test_who_else_is_at_work_is_read_from_the_system(tmp_path: Path) -> None:
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "cpu").write_text("some avg10=42.50 avg60=1.00 avg300=0.10 total=5\n")
    (tmp_path / "stat").write_text("cpu  100 20 30 800 10 5 5 30 0 0\ncpu0 1 2 3\n")
    assert others_before(2, tmp_path).pressure == 0.425
    now = CoreTime.now(tmp_path)
    assert (now.every, now.busy, now.stolen) == (1000, 160, 30) and now.own > 0
    begin, end = CoreTime(0, 0, 0, 0), CoreTime(1000, 600, 50, 400)
    assert end.others_since(begin) == 0.2 and end.stolen_since(begin) == 0.05
    assert CoreTime.now(tmp_path / "none") == CoreTime() and others_before(2, tmp_path / "none").pressure == 0
    assert begin.others_since(begin) == 0


def test_a_busy_machine_is_told() -> None:
    assert OtherLoad(4, load=1.5, pressure=0.03, others=0.05, stolen=0.01).said() == []
    assert OtherLoad(4, load=3.0, pressure=0.0).said() == ["busy before: load 3.0 on 4 cores, pressure 0%"]
    said = OtherLoad(4, load=0.0, pressure=0.5, others=0.3, stolen=0.1).said()
    assert len(said) == 3 and "30%" in said[1] and "10%" in said[2]
