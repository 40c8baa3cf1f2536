"""`afserve plan` and `afserve simulate` from the command line: outputs, files, mistakes. No torch is imported."""

import inspect
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from afserve.cli.main import run
from afserve.cli.plan.command import plan as plan_command
from afserve.cli.plan.flags import GROUPS
from afserve.cli.plan.options import build_question
from afserve.cli.plan.simulate import simulate
from afserve.placement.rebalance.record import encode_header, encode_record

SMALL = "--model qwen3-30b-a3b --pool h20=8 --pool l40s=8 --tpot 30ms --context 2048"


def call(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, str]:
    code = run(line.split())
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.slow
@pytest.mark.usefixtures("larger_pools")
def test_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, f"plan {SMALL}")
    assert code == 0
    for word in ("qwen3-30b-a3b", "best", "next", "$/Mtok", "bound by", "+10 % of each", "Undecided: AFD"):
        assert word in out
    assert "colocated" in out
    assert "AFD" in out


@pytest.mark.slow
def test_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, f"plan {SMALL} --json")
    values = json.loads(out)
    assert code == 0
    assert set(values) >= {"best", "alternatives", "verdict"}
    for found in [values["best"], *values["alternatives"]]:
        assert found["kind"] in ("colocated", "afd")
        assert (
            set(found["attention"])
            == set(found["experts"])
            == {"hardware", "devices", "nodes", "tensor_parallel"}
        )
        assert set(found) >= {
            "micro_batches",
            "batch",
            "tpot_ms",
            "tok_s",
            "tok_s_per_device",
            "usd_per_mtok",
            "bound_by",
        }
        assert 0 < found["tpot_ms"] <= 30
    costs = [found["usd_per_mtok"] for found in [values["best"], *values["alternatives"]]]
    assert costs == sorted(costs)


@pytest.mark.slow
def test_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page, picture, cluster = (tmp_path / name for name in ("p.html", "p.png", "c.toml"))
    small = "--model qwen3-30b-a3b --pool h20=4 --tpot 30ms --context 2048"
    code, _, _ = call(capsys, f"plan {small} --chart {page} --chart {picture} --cluster {cluster}")
    assert code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "<svg" in text
    assert "http" not in text
    assert tomllib.loads(cluster.read_text())["model"]["name"] == "qwen3-30b-a3b"


@pytest.mark.slow
def test_a_config_json_and_own_hardware(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root = Path(__file__).parents[2] / "configs"
    config = tomllib.loads((root / "models/qwen3-30b-a3b.toml").read_text())["config"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text(json.dumps(config))
    own = tmp_path / "own.toml"
    own.write_text((root / "hardware/h20.toml").read_text().replace('name = "h20"', 'name = "own"'))
    code, out, _ = call(capsys, f"plan --model {tmp_path / 'mine'} --pool {own}=4@0.5")
    assert code == 0
    assert "4 own at $0.5/h" in out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--model deepsek-v3 --pool h800=8", "no such model; did you mean deepseek-v3"),
        ("--model deepseek-v3 --pool h80=8", "no such hardware; did you mean"),
        ("--model deepseek-v3 --pool h800=0", "the count must be a whole number in [1, 1048576], not '0'"),
        ("--model deepseek-v3 --pool h800=-4", "not '-4'"),
        ("--model deepseek-v3 --pool h800=1.5", "not '1.5'"),
        ("--model deepseek-v3 --pool h800", "add --rate, or write h800=COUNT"),
        ("--model deepseek-v3 --pool h800=", "write NAME=COUNT"),
        (
            "--model deepseek-v3 --pool h800=8@free",
            "USD per device hour must be a number in [1e-06, 1e+06], not 'free'",
        ),
        ("--model deepseek-v3 --pool h800=8 --tpot 50ms", "does not fit 8 h800"),
        ("--model deepseek-v3 --pool h800=64 --tpot 1ms", "the fastest is"),
        (
            "--model deepseek-v3 --pool h800=64 --tpot fast",
            "--tpot: 'fast' is not a time of 1e-09 to 1e+06 s",
        ),
        ("--model deepseek-v3 --pool h800=64 --context 0", "--context: 0.0 is not a number in [1, 1e+08]"),
        ("--model deepseek-v3 --pool h800=64 --context 9 --input 4 --output 4", "keep one"),
        ("--model deepseek-v3 --pool h800=64 --input 4", "go together"),
        ("--model deepseek-v3 --pool h800=64 --ttft 1s", "decode-only"),
        ("--model deepseek-v3 --pool h800=64 --micro-batches 5", "counts from 1 to 4"),
        ("--model deepseek-v3 --pool h800=64 --objective count", "Add --rate"),
        (
            "--model deepseek-v3 --pool h800=64 --objective latency --rate 5 --input 9 --output 9",
            "how fast they must be",
        ),
        ("--model deepseek-v3 --pool h800=64 --trace /nowhere", "--trace /nowhere"),
        (
            "--model deepseek-v3 --pool h800=64 --goodput",
            "--goodput: arrivals are played from a trace; add --trace FILE",
        ),
        ("--model deepseek-v3 --pool h800=64 --curves h300", "no such fits file; did you mean h200"),
        ("--model deepseek-v3 --pool h800=64 --chart x.pdf", ".png or .html"),
        ("--model deepseek-v3 --pool h800=64 --pool h800=8", "given twice"),
        ("--model deepseek-v3 --pool h800=64 --engine vlm", "no such engine; did you mean vllm"),
        ("--model deepseek-v3 --pool h800=64 --engine vllm --engine sglang", "name one per kind"),
        (
            "--model deepseek-v3 --pool h800=64 --engine /nowhere.json",
            "--engine '/nowhere.json': no such engine",
        ),
        ("--model deepseek-v3 --pool h800=64 --kind afd --devices 8", "--kind afd has none"),
        (
            "--model deepseek-v3 --pool h800=64 --kind colocated --expert-devices 8",
            "--kind colocated has none",
        ),
        ("--model deepseek-v3 --pool h800=64 --devices 65", "the pools have 64 devices"),
        ("--model deepseek-v3 --pool h800=64 --concurrency nan", "--concurrency: nan is not a number in"),
        ("--model deepseek-v3 --pool h800=64 --prefill-devices 8", "need --input, --output, --decode-only"),
        (
            "--model deepseek-v3 --pool h800=64 --input 9 --output 9 --concurrency 4 --ttft 1s",
            "is told and not sought",
        ),
        ("--model deepseek-v3 --pool h800=64 --rate 5", "answer length is not known"),
        ("--model qwen3-30b-a3b --pool l40s=4 --input 100000 --output 10", "take more than 95 % of the time"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    code, out, err = call(capsys, f"plan {line}")
    assert code == 2
    assert out == ""
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "--pool h800=1",
            "an AFD deployment takes two devices at least, and 1 h800 is offered; colocated runs on 1 h800",
        ),
        (
            "--pool l40s=64 --attention-devices 63 --expert-devices 1",
            "no AFD deployment fits the memory of 64 l40s with --attention-devices 63 --expert-devices 1; colocated",
        ),
        (
            "--pool h800=8 --tensor-parallel 8",
            "8 h800 make no AFD deployment with --tensor-parallel 8; colocated",
        ),
        ("--pool l40s=2", "no AFD deployment fits the memory of 2 l40s; colocated runs on 2 l40s"),
        (
            "--pool h800=2 --input 20000 --output 2 --prompts here",
            "prompts would take more than 95 % of the time of every colocated deployment; AFD runs on 1 h800 : 1 h800",
        ),
        ("--pool h800=2 --tpot 6ms", "no AFD deployment meets the targets; colocated runs on 2 h800"),
    ],
)
def test_the_verdict_names_what_binds(capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    """Where nobody has set a target, no deployment can have missed one."""
    code, out, _ = call(capsys, f"plan --model mixtral-8x7b --engine afserve {line}")
    assert code == 0
    assert f"isaggregate: {words}" in out


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("m.toml", "[config\n", "m.toml"),
        ("m.toml", "[meta]\n", r"[config] is missing"),
        (
            "m.toml",
            "[config]\nnum_hidden_layers = 2\nhidden_size = -3\n",
            "hidden_size: -3 is not a whole number in [1, 1048576]",
        ),
    ],
)
def test_malformed_model_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str, words: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    code, _, err = call(capsys, f"plan --model {path} --pool h800=8")
    assert code == 2
    assert words in err


@pytest.mark.slow
def test_the_bundled_model_on_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "plan --model nano --pool cpu-host=3 --precision bf16 --context 128")
    assert code == 0
    assert out.startswith("nano")
    assert "curves of h200 are of GPU kernels" in out
    assert "+-100%" in out


@pytest.mark.slow
def test_counts_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps({"counts": [[float(1 + expert % 7) for expert in range(128)]] * 2}))
    assert call(capsys, f"plan {SMALL} --counts {counts}")[0] == 0
    counts.write_text(json.dumps({"counts": [[1.0] * 8]}))
    code, _, err = call(capsys, f"plan {SMALL} --counts {counts}")
    assert code == 2
    assert "8 experts, the model has 128" in err


@pytest.mark.slow
def test_counts_of_several_domains_and_recordings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Whatever `afserve place` takes."""
    even, skewed = [[1.0] * 128] * 2, [[float(1 + expert % 7) for expert in range(128)]] * 2
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps({"domains": {"code": even, "prose": skewed}}))
    assert "measured expert counts" in call(capsys, f"plan {SMALL} --counts {counts}")[1]
    recorded = tmp_path / "counts.afroute"
    recorded.write_bytes(encode_header("m", 2, 128) + encode_record(1.0, 1, skewed))
    assert call(capsys, f"plan {SMALL} --counts {recorded}")[0] == 0
    counts.write_text("layer,expert\n")
    code, _, err = call(capsys, f"plan {SMALL} --counts {counts}")
    assert code == 2
    assert f"--counts {counts}: the counts are not JSON" in err


@pytest.mark.slow
def test_the_heading_says_what_was_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--input lognormal:2000,900 --output exponential:300 --ttft 2s --redundant 8 --kv-precision fp8"
    line += " --draft eagle3:1 --acceptance 0.5"
    out = call(capsys, f"plan --model qwen3-30b-a3b --pool a100=8 --tpot 60ms {line}")[1]
    for words in (
        "input lognormal 2000 +-900, output exponential 300", "TTFT <= 2000 ms", "8 spare expert slots",
        "eagle3:1: 1.50 tokens a step", "cache fp8", "a100 without fp8 units", "TTFT ms",
    ):  # fmt: skip
        assert words in out
    assert "round trip" not in out


@pytest.mark.slow
def test_simulate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    timeline = tmp_path / "t.json"
    code, out, _ = call(
        capsys,
        "simulate --model qwen3-30b-a3b --pool h20=4 --tpot 30ms --input 800 --output 100 --kind afd --steps 3 "
        f"--requests 60 --json --timeline {timeline}",
    )
    values = json.loads(out)
    assert code == 0
    assert set(values["tpot_ms"]) == set(values["ttft_ms"]) == {"p50", "p90", "p99"}
    assert values["goodput_requests_per_s"] > 0
    assert json.loads(timeline.read_text())["traceEvents"]
    code, out, _ = call(capsys, "simulate --model qwen3-30b-a3b --pool h20=4 --tpot 30ms --requests 40")
    assert code == 0
    assert "requests played" in out
    code, _, err = call(capsys, f"simulate {SMALL} --load 0")
    assert code == 2
    assert "--load" in err


PILOTED = "simulate --model qwen3-30b-a3b --pool h20=12 --ttft 2s --tpot 40ms --input 800 --output 60"


@pytest.mark.slow
def test_simulate_with_a_pilot(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{PILOTED} --kind afd --prompts apart --load 0.2 --pilot --pilot-hold 10 --pilot-start 2 --requests 2000"
    code, out, err = call(capsys, f"{line} --json")
    values = json.loads(out)
    assert code == 0 and values["requests"] == 2000, err
    alone, pilot = values["left_alone"], values["pilot"]
    assert not alone["changes"] and pilot["changes"], "a fifth of the load needs fewer devices"
    assert pilot["device_hours"] < alone["device_hours"] and pilot["attainment"] > 0.9
    assert "inside both targets" in call(capsys, line)[1]
    for flags, why in (
        ("--kind afd --prompts apart --pilot --lose experts@3s", "--lose is not played with it"),
        ("--kind colocated --pilot", "--pilot: sizes prefill, attention and experts"),
        ("--kind afd --pilot-hold 5", "--pilot-hold: does nothing without --pilot"),
    ):
        code, _, err = call(capsys, f"{PILOTED} {flags}")
        assert code == 2 and why in err


@pytest.mark.slow
def test_planning_imports_no_torch() -> None:
    code = f"""
import sys
from afserve.cli.main import run
assert run({("plan " + SMALL + " --json").split()!r}) == 0
assert not {{"torch", "grpc", "matplotlib", "transformers"}} & set(sys.modules)
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[2]
    )


@pytest.mark.slow
def test_a_cluster_file_is_of_a_plan_that_can_be_started(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "c.toml"
    code, out, err = call(
        capsys,
        "plan --model mixtral-8x22b --pool h200=16 --engine afserve --objective latency --context 2048 "
        f"--cluster {file}",
    )
    table = tomllib.loads(file.read_text())
    assert code == 0
    assert table["attention"]["tensor_parallel"] == 1
    assert re.search(r"^best +\w+ +\d+ h200 +\w+( h200)? +[248]", out, re.MULTILINE)
    assert "cannot start the best plan, its nodes span several devices" in err


@pytest.mark.slow
def test_a_cluster_file_names_the_folder_of_a_model_without_a_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = Path(__file__).parents[2] / "configs"
    config = tomllib.loads((root / "models/qwen3-30b-a3b.toml").read_text())["config"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text(json.dumps(config))
    file = tmp_path / "c.toml"
    for given in ("mine", "mine/config.json"):
        assert call(capsys, f"plan --model {tmp_path / given} --pool h20=4 --cluster {file}")[0] == 0
        assert tomllib.loads(file.read_text())["model"] == {"path": str((tmp_path / "mine").resolve())}


def test_the_flags_of_a_question_travel_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(inspect.signature(build_question).parameters) == len(GROUPS) <= 6
    in_groups = [field.name for group in GROUPS for field in fields(group)]
    of_plan, of_simulate = (
        {option.name for option in command.params} for command in (plan_command, simulate)
    )
    assert len(in_groups) == len(set(in_groups)) and set(in_groups) <= of_plan & of_simulate
    code, _, err = call(capsys, "plan --pool h20=8")
    assert code == 2 and "--model" in err


@pytest.mark.slow
def test_copies_of_every_expert_are_priced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pool = "plan --model qwen3-30b-a3b --pool h20=8 --tpot 30ms --context 2048"
    once = json.loads(call(capsys, f"{pool} --json")[1])["best"]
    twice = json.loads(call(capsys, f"{pool} --expert-copies 2 --json")[1])["best"]
    assert twice["usd_per_mtok"] > once["usd_per_mtok"]
    assert "2 copies of every expert" in call(capsys, f"{pool} --expert-copies 2")[1]
    file = tmp_path / "cluster.toml"
    assert call(capsys, f"plan {SMALL} --expert-copies 2 --cluster {file}")[0] == 0
    afd = tomllib.loads(file.read_text())["experts"]["nodes"] > 0
    assert ("# Start it with --expert-copies 2" in file.read_text()) == afd
    one = "--model qwen3-30b-a3b --pool h20=1 --tpot 30ms --context 2048 --expert-copies 2"
    for command in ("plan", "simulate"):
        code, _, err = call(capsys, f"{command} {one}")
        assert code == 2
        assert "2 copies of every expert take 2 devices of one kind, and 1 h20 is offered" in err
    code, _, err = call(capsys, f"{pool.replace('h20=8', 'l40s=2')} --expert-copies 2 --precision bf16")
    assert code == 2 and "(bf16, 2 copies)" in err and "It takes at least" in err


def test_a_layout_as_typed_with_requests_in_flight(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "plan --model qwen3-235b-a22b --pool gb200=32 --context 8192 --engine fastafd --attention-devices 28 "
        "--expert-devices 4 --devices 4 --concurrency 2688 --json"
    )
    code, out, _ = call(capsys, line)
    values = json.loads(out)
    assert code == 0
    by_kind = {found["kind"]: found for found in (values["best"], *values["alternatives"])}
    assert by_kind["afd"]["attention"]["devices"] == 28
    assert by_kind["afd"]["experts"]["devices"] == 4
    assert by_kind["colocated"]["attention"]["devices"] == 4
    assert by_kind["afd"]["batch"] == 48
    assert {kind: found["engine"] for kind, found in by_kind.items()} == {
        "afd": "fastafd",
        "colocated": "vllm",
    }
    assert values["probability_afd_better"] > 0.7
    low, high = by_kind["afd"]["tpot_interval_80_ms"]
    assert low < by_kind["afd"]["tpot_ms"] < high
    assert "AFD is better with probability" in values["verdict"]


@pytest.mark.slow
def test_a_crowd_waits_longer_for_its_first_token(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "plan --model gpt-oss-120b --pool h200=2 --engine vllm --kind colocated --devices 2 --tensor-parallel 2 "
        "--input 1024 --output 1024 --json --concurrency"
    )
    waits = [json.loads(call(capsys, f"{line} {count}")[1])["best"]["ttft_ms"] for count in (4, 64)]
    assert waits[1] > 1.5 * waits[0]
    elsewhere = json.loads(
        call(capsys, f"{line} 64 --decode-only --prefill-devices 2 --prefill-workers 4")[1]
    )["best"]
    assert 0 < elsewhere["ttft_ms"] < waits[1]


@pytest.mark.slow
def test_the_engine_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "engines: colocated as vllm (" in call(capsys, "plan --model minimax-m2 --pool gb200=8")[1]
    assert "colocated as afserve" in call(capsys, "plan --model nano --pool cpu-host=2 --context 512")[1]


@pytest.mark.slow
def test_two_answers_side_by_side(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, count in (("a", 8), ("b", 16)):
        _, out, _ = call(
            capsys, f"plan --model minimax-m2 --pool gb200={count} --kind colocated --devices {count} --json"
        )
        (tmp_path / f"{name}.json").write_text(out)
    code, out, _ = call(capsys, f"plan --compare {tmp_path / 'a.json'} {tmp_path / 'b.json'}")
    assert code == 0
    assert "colocated 8 gb200" in out
    assert "colocated 16 gb200" in out
    assert re.search(r"^tok/s +[\d,.]+ +[\d,.]+ +\+\d", out, re.MULTILINE)
    (tmp_path / "b.json").write_text('{"best": {"tpot_ms": NaN}}')
    code, _, err = call(capsys, f"plan --compare {tmp_path / 'a.json'} {tmp_path / 'b.json'}")
    assert code == 2
    assert "best.tpot_ms is not a number of 1e-09 to 1e+18" in err
