"""`afserve plan --cores`: nodes that are processes of one machine, from a calibration to the printed plan."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afserve.cli.main import run
from afserve.cli.plan.catalog import load_curves, load_hardware, load_model
from afserve.placement.planner.one_machine import ALONE, ATTENTION, EXPERTS, IDLE, OneMachine, Processes
from afserve.placement.planner.perf.attention import Precision
from afserve.placement.planner.perf.experts import Routing
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.workload import fixed_context

WIDTH = Precision("bf16", "bf16", "bf16")
ASKED = (
    "plan --model nano --pool cpu-host=4 --precision bf16 --skew 0 --context 96 --micro-batches 2 --kind afd"
)
LAYOUT = "--attention-devices 1 --expert-devices 1 --concurrency 16 --cores 2"


def calibration(folder: Path, *more: dict[str, object]) -> Path:
    """Halves of 0.1 ms and 10 us a request, and what else was measured."""
    rows: list[dict[str, object]] = list(more)
    for n in (1, 4, 16, 64):
        seconds = 1e-4 + 1e-5 * n
        rows.append({"part": "attention", "requests": n, "context": 96, "seconds": seconds})
        rows.append({"part": "experts", "rows": 2 * n, "active": min(2 * n, 8), "seconds": seconds})
        rows.append({"part": "step", "requests": n, "seconds": 1e-4})
    path = folder / f"{len(more)}.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def machine(path: Path, cores: int) -> OneMachine:
    shape, chip = load_model("nano"), load_hardware("cpu-host")
    curves = load_curves(str(path), shape, chip, WIDTH)
    return OneMachine(Setting(shape, curves, fixed_context(96), WIDTH, Routing(0.0)), chip, cores)


def planned(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, float]:
    code = run([*ASKED.split(), *line.split(), "--json"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return dict(json.loads(printed.out)["best"])


def test_which_nodes_have_no_core() -> None:
    assert Processes(1, 1, 2, 8).crowd(2) == ALONE
    assert Processes(1, 2, 2, 8).crowd(2) == EXPERTS
    assert Processes(2, 1, 2, 8).crowd(2) == ATTENTION
    assert Processes(2, 1, 2, 1).crowd(2) == IDLE, "one request is with one attention node"
    assert Processes(1, 1, 2, 8, prefill=1).crowd(2) == IDLE
    assert Processes(1, 1, 2, 8, prefill=1).crowd(3) == ALONE
    assert Processes(1, 2, 2, 1).crowd(2) == ALONE, "its experts do not compute meanwhile"
    assert Processes(2, 1, 2, 8).crowd(3) == ALONE


@pytest.mark.slow
def test_fewer_cores_take_longer_and_a_core_each_is_the_closed_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = f"--engine {calibration(tmp_path)}"
    layout = LAYOUT.replace("--cores 2", "")
    alone = planned(capsys, f"{layout} {own}")["tpot_ms"]
    many, two, one = (planned(capsys, f"{layout} {own} --cores {cores}")["tpot_ms"] for cores in (8, 2, 1))
    assert many == pytest.approx(alone, rel=0.15), "messages of both micro-batches sometimes merge"
    assert two == pytest.approx(many, rel=0.01), "nobody but two nodes has work"
    assert one > 1.4 * two


@pytest.mark.slow
def test_an_idle_node_makes_every_step_longer(tmp_path: Path) -> None:
    """By what it cost one request; busy nodes with a core each are not touched."""
    plain = machine(calibration(tmp_path), 2)
    alone, beside = Processes(2, 1, 2, 1), Processes(1, 1, 2, 8, prefill=1)
    known = {"part": "run", "context": 96, "micro_batches": 2, "attention": 2, "experts": 1, "requests": 1}
    slow = machine(calibration(tmp_path, known | {"seconds": plain.tpot(alone, 96) + 4e-4}), 2)
    for nodes in (alone, beside):
        assert slow.tpot(nodes, 96) == pytest.approx(plain.tpot(nodes, 96) + 4e-4, rel=1e-6)
    assert slow.tpot(Processes(1, 1, 2, 8), 96) == plain.tpot(Processes(1, 1, 2, 8), 96)


@pytest.mark.slow
def test_runs_of_a_crowd_are_taken_over_to_that_crowd_alone(tmp_path: Path) -> None:
    known = {"part": "run", "context": 96, "micro_batches": 2}
    plain = machine(calibration(tmp_path), 2)
    sizes = [Processes(*nodes, 2, 8) for nodes in ((1, 1), (1, 2), (2, 1))]
    runs = [
        known
        | {
            "attention": one.attention,
            "experts": one.experts,
            "requests": 8,
            "seconds": factor * plain.tpot(one, 96),
        }
        for one, factor in zip(sizes, (1.1, 1.3, 2.0), strict=True)
    ]
    served = machine(calibration(tmp_path, *runs), 2)
    for one, factor in zip(sizes, (1.1, 1.3, 2.0), strict=True):
        assert served.tpot(one, 96) / plain.tpot(one, 96) == pytest.approx(factor, rel=1e-3)
    assert served.tpot(Processes(1, 1, 2, 8, prefill=1), 96) == pytest.approx(served.tpot(sizes[0], 96))
    wide = Processes(2, 2, 2, 8)
    assert served.tpot(wide, 96) / plain.tpot(wide, 96) == pytest.approx(2.0, rel=1e-3)


def whole(peers: int, half: float) -> list[dict[str, object]]:
    """Steps in one call: such halves, and 2 us each way."""
    known = {"part": "whole", "peers": peers, "kernel": 1e-6, "seconds": 2e-6}
    return [
        known | {"requests": n, "bytes": 256 * n, "half": half * (1e-4 + 1e-5 * n)} for n in (1, 4, 16, 64)
    ]


SLOW_WAY: list[dict[str, object]] = [
    {"part": part, "requests": n, "peers": 1, "bytes": 256 * n, "seconds": seconds}
    for n in (1, 4, 16, 64)
    for part, seconds in (("kernel", 3e-5), ("exchange", 8e-5), ("answer", 2e-5))
]


@pytest.mark.slow
def test_a_step_in_one_call_has_stages_of_its_own(tmp_path: Path) -> None:
    """One micro-batch of one attention node: half the attention, and 4 us a layer in place of 160."""
    layers = load_model("nano").experts.layers
    apart = machine(calibration(tmp_path, *SLOW_WAY), 2)
    once = machine(calibration(tmp_path, *SLOW_WAY, *whole(1, 0.5)), 2)
    for requests in (1, 8, 64):
        one = Processes(1, 1, 1, requests)
        saved = 0.5 * (1e-4 + 1e-5 * requests) + 156e-6
        assert apart.tpot(one, 96) - once.tpot(one, 96) == pytest.approx(layers * saved, rel=0.2)
    assert once.tpot(Processes(1, 1, 2, 1), 96) == once.tpot(Processes(1, 1, 1, 1), 96), "one is filled"
    for nodes in (Processes(1, 1, 2, 8), Processes(2, 1, 1, 8)):
        assert once.tpot(nodes, 96) == pytest.approx(apart.tpot(nodes, 96))


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shares=st.tuples(st.floats(0.2, 3.0), st.floats(0.2, 3.0)),
    ways=st.tuples(st.floats(1e-6, 1e-3), st.floats(1e-6, 1e-3)),
    requests=st.integers(1, 64),
)
def test_a_longer_half_or_way_never_makes_a_step_shorter(
    tmp_path: Path, shares: tuple[float, float], ways: tuple[float, float], requests: int
) -> None:
    """Whatever was measured of steps in one call; and two micro-batches never feel it."""
    shorter, longer = (
        machine(
            calibration(
                tmp_path, *SLOW_WAY, *({**row, "kernel": 1e-7, "seconds": way} for row in whole(1, share))
            ),
            2,
        )
        for share, way in ((min(shares), min(ways)), (max(shares), max(ways)))
    )
    one, two = Processes(1, 1, 1, requests), Processes(1, 1, 2, 2 * requests)
    assert shorter.tpot(one, 96) <= longer.tpot(one, 96) * (1 + 1e-6)
    assert shorter.tpot(two, 96) == longer.tpot(two, 96)


@pytest.mark.slow
def test_runs_of_steps_in_one_call_say_nothing_of_others(tmp_path: Path) -> None:
    rows = [*SLOW_WAY, *whole(1, 0.5)]
    plain, one, two = machine(calibration(tmp_path, *rows), 2), Processes(1, 1, 1, 8), Processes(1, 1, 2, 8)
    known = {"part": "run", "context": 96, "attention": 1, "experts": 1, "requests": 8}
    runs = [
        known | {"micro_batches": nodes.micro_batches, "seconds": factor * plain.tpot(nodes, 96)}
        for nodes, factor in ((one, 1.2), (two, 1.5))
    ]
    served = machine(calibration(tmp_path, *rows, *runs), 2)
    for nodes, factor in ((one, 1.2), (two, 1.5), (Processes(1, 2, 2, 1), 1.2)):
        assert served.tpot(nodes, 96) / plain.tpot(nodes, 96) == pytest.approx(factor, rel=0.02)
    only = machine(calibration(tmp_path, *rows, runs[1]), 2)
    assert only.tpot(one, 96) / plain.tpot(one, 96) == pytest.approx(1.5, rel=0.02), "of the nearest kind"


@pytest.mark.slow
def test_stages_beside_a_busy_core_are_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beside = [
        {"part": "beside", "stage": stage, "alone": 1e-4, "seconds": 1.5e-4}
        for stage in ("attention", "experts")
    ]
    before = planned(capsys, f"{LAYOUT} --engine {calibration(tmp_path)}")["tpot_ms"]
    after = planned(capsys, f"{LAYOUT} --engine {calibration(tmp_path, *beside)}")["tpot_ms"]
    assert 1.2 * before < after <= 1.5 * before


@pytest.mark.slow
def test_the_plan_says_so_and_counts_the_requests_in_flight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = calibration(tmp_path)
    best = planned(capsys, f"{LAYOUT} --engine {own}")
    assert best["tok_s"] == pytest.approx(16e3 / best["tpot_ms"], rel=1e-3)
    assert run([*ASKED.split(), *LAYOUT.split(), "--engine", str(own)]) == 0
    assert "processes of one machine, played over 2 cores" in capsys.readouterr().out
    assert (
        run([*ASKED.split(), *LAYOUT.split(), "--engine", str(own), "--tpot", f"{best['tpot_ms'] / 2}ms"])
        == 2
    )
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--concurrency 8 --cores 2 --engine OWN", "one layout is played"),
        ("--attention-devices 1 --expert-devices 1 --cores 2 --engine OWN", "so many requests are in flight"),
        (LAYOUT, "only a calibration says"),
        (f"{LAYOUT} --engine OWN --tensor-parallel 2", "a node is one process"),
        (f"{LAYOUT} --engine OWN --draft eagle3:1", "--draft is not played"),
        (f"{LAYOUT} --engine OWN --cores 0", "--cores: 0 is not a whole number in [1, 1024]"),
        ("--devices 1 --concurrency 8 --cores 2 --kind colocated --engine OWN", "one layout is played"),
    ],
)
def test_what_is_not_played_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    own = str(calibration(tmp_path))
    assert run([*ASKED.split(), *line.replace("OWN", own).split()]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and printed.out == ""


@pytest.mark.slow
def test_prompts_are_not_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ASKED.replace("--context 96", "--input 64 --output 64")
    assert run([*line.split(), *LAYOUT.split(), "--engine", str(calibration(tmp_path))]) == 2
    assert "prompts are not played" in capsys.readouterr().err
