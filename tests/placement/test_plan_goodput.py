"""`afserve plan --goodput`: what it says which pays, and what it refuses."""

import json
from pathlib import Path

import pytest

from afserve.cli.plan.goodput import PlannedGoodput, how_to_start, which_pays
from afserve.launch.plan.cluster import read_cluster
from afserve.placement.planner.simulate.phases import GoodputTargets, PhaseLayout
from afserve.placement.planner.simulate.search_phases import KINDS, BestLayout, split_of
from afserve.placement.planner.simulate.station import SimulatedRequest
from tests.placement.test_plan_cli import call

ASKED = "plan --model qwen3-30b-a3b --pool h200=4 --ttft 1s --tpot 50ms --goodput"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    lines = [f"{0.1 * i + 0.5 * (i // 9)},{200 + 311 * (i % 7)},{10 + 13 * (i % 5)}" for i in range(60)]
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *lines]))
    return path


@pytest.mark.slow
def test_the_three_are_played_and_the_best_is_named(
    capsys: pytest.CaptureFixture[str], trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scripted(
        layout: PhaseLayout, asked: list[SimulatedRequest], targets: GoodputTargets, **_: float
    ) -> float:
        assert targets == GoodputTargets(1.0, 0.05) and asked[1] == SimulatedRequest(0.1, 511, 23)
        return 30.0 if layout.both else 20.0 if layout.pieces else 10.0

    monkeypatch.setattr("afserve.placement.planner.simulate.search_phases.goodput", scripted)
    code, out, _ = call(capsys, f"{ASKED} --trace {trace}")
    assert code == 0
    lines = [line for line in out.splitlines() if "requests/s  " in line]
    rates = [float(line.split()[0]) for line in lines]
    assert rates == [30.0, 20.0, 20.0, 10.0]
    assert {line.split("requests/s")[1].partition(":")[0].strip() for line in lines} == set(KINDS)
    assert "--cluster writes the layout of shared experts where its ranks are of one device" in out
    code, out, _ = call(capsys, f"{ASKED} --trace {trace} --json")
    values = json.loads(out)["goodput"]
    assert [one["requests_per_s"] for one in values["layouts"]] == pytest.approx(rates, abs=0.01)
    assert values["verdict"] == which_pays_of(values["layouts"])


@pytest.mark.parametrize("kind", KINDS)
def test_how_a_layout_is_started_is_said(kind: str) -> None:
    said = how_to_start(scripted(kind, 1.0))
    assert "`afserve up" in said and said.endswith("else the plan above.")


@pytest.mark.slow
@pytest.mark.parametrize("best", [20.0, 40.0], ids=["another one is better", "it is the best"])
def test_the_layout_that_can_be_started_is_written_and_read_back(
    capsys: pytest.CaptureFixture[str],
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    best: float,
) -> None:
    def scripted(
        layout: PhaseLayout, asked: list[SimulatedRequest], targets: GoodputTargets, **_: float
    ) -> float:
        apart = layout.pieces is not None and split_of(layout).experts
        return 30.0 if layout.both else best if apart and split_of(layout).degrees == (1, 1) else 10.0

    monkeypatch.setattr("afserve.placement.planner.simulate.search_phases.goodput", scripted)
    path = tmp_path / "cluster.toml"
    code, out, err = call(capsys, f"{ASKED} --trace {trace} --cluster {path}")
    assert code == 0
    assert ("starts no mixed, chunked prefill from a file" in err) == (best < 30)
    cluster = read_cluster(path)
    assert cluster.prefill and cluster.decode_nodes and cluster.experts
    assert cluster.attention + cluster.experts == 4 and cluster.model == "qwen3-30b-a3b"
    assert {(host.role, host.hardware) for host in cluster.hosts} == {
        ("attention", "h200"),
        ("experts", "h200"),
    }
    line = next(line for line in out.splitlines() if "  shared experts: " in line)
    assert f"prefill 1 x {cluster.prefill}, decode 1 x {cluster.decode_nodes} with" in line
    assert f"experts {cluster.experts}, chunks of {cluster.prefill_tokens}" in line
    assert cluster.prompt_share is not None and f"{cluster.prompt_share:.0%} of the experts' time" in line
    assert cluster.batch >= cluster.micro_batches


@pytest.mark.slow
def test_where_no_played_layout_can_be_started_the_plan_is_written(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("afserve.placement.planner.simulate.search_phases.goodput", lambda *_, **__: 0.0)
    path = tmp_path / "cluster.toml"
    code, _, err = call(capsys, f"{ASKED} --trace {trace} --cluster {path}")
    assert code == 0 and f"note: {path} is the plan above" in err
    assert read_cluster(path, placeholders=True).prefill is None


def which_pays_of(layouts: list[dict[str, object]]) -> str:
    return which_pays(tuple(scripted(str(one["kind"]), float(str(one["requests_per_s"]))) for one in layouts))


def scripted(kind: str, rate: float) -> PlannedGoodput:
    return PlannedGoodput(kind, BestLayout(rate, PhaseLayout(1)) if rate else None)


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ((30.0, 20.0, 10.0), "shared experts pays: 1.50 times P/D, two copies"),
        ((21.0, 20.0, 10.0), "shared experts and P/D, two copies are as good as equal"),
        ((21.0, 0.0, 0.0), "Only shared experts serves this"),
        ((0.0, 0.0, 0.0), "None of the four"),
    ],
)
def test_what_pays_in_words(rates: tuple[float, ...], words: str) -> None:
    found = tuple(scripted(kind, rate) for kind, rate in zip((KINDS[0], *KINDS[2:]), rates, strict=True))
    assert words in which_pays(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--pool h800=64 --input 9 --output 9 --ttft 1s --tpot 50ms", "add --trace FILE"),
        ("--pool h800=64 --trace {trace} --decode-only --tpot 50ms", "without --decode-only"),
        ("--pool h800=64 --trace {trace} --tpot 50ms", "add --ttft and --tpot"),
        (
            "--pool h800=64 --pool h20=8 --trace {trace} --tpot 50ms --ttft 1s",
            "not h800, h20; keep one --pool",
        ),
        ("--pool h800=64 --trace {trace} --tpot 50ms --ttft 1s --engine vllm", "leave out --engine"),
        ("--pool h800=64 --trace {trace} --tpot 50ms --ttft 1s --kind afd", "leave out --kind"),
        (
            "--pool h800=64 --trace {trace} --tpot 50ms --ttft 1s --attention-devices 8",
            "leave out --attention-devices",
        ),
    ],
)
def test_what_cannot_be_played_is_refused_in_a_line(
    capsys: pytest.CaptureFixture[str], trace: Path, line: str, words: str
) -> None:
    code, _, err = call(capsys, f"plan --model deepseek-v3 --goodput {line.format(trace=trace)}")
    assert code == 2 and words in err and err.count("\n") == 1
