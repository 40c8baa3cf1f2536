"""The whole of `afserve plan` with drawn arguments, sensible and not: an answer without nan, or one line of error."""

import json
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afserve.cli.main import run

LONG = "x" * 300  # no file has such a name
WORDS = st.sampled_from(
    [
        "nan", "inf", "-inf", "0", "-1", "1", "2", "4", "8", "16", "64", "0.5", "1e9", "1e-9", "1e400", "", "x", "50ms",
        LONG,
    ]
)  # fmt: skip
MODELS = st.sampled_from(["mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-120b", "nano", "nosuch", "", LONG])
POOLS = st.builds(
    "{}={}{}".format,
    st.sampled_from(["h800", "h20", "l40s", "gb200", "cpu-host", "rtx-pro-6000", "h80", "", LONG]),
    st.sampled_from(["1", "2", "7", "8", "16", "0", "-4", "nan", "1e3", ""]),
    st.sampled_from(["", "", "@2.5", "@0", "@nan", "@free"]),
)
ENGINES = st.sampled_from(
    ["vllm", "sglang", "deepseek", "fastafd", "step-3", "megascale", "afserve", "nosuch", "", LONG]
)
VALUED = st.sampled_from(
    [
        "--tpot", "--ttft", "--context", "--input", "--output", "--rate", "--skew", "--redundant", "--expert-copies",
        "--draft", "--acceptance", "--domain", "--network", "--link", "--micro-batches", "--attention-devices",
        "--expert-devices", "--devices", "--tensor-parallel", "--concurrency", "--max-running", "--prefill-devices",
        "--prefill-workers", "--top", "--curves", "--counts", "--trace", "--cluster", "--report", "--chart",
        "--attention-precision", "--kv-precision",
    ]
)  # fmt: skip
CHOSEN = st.one_of(
    st.tuples(VALUED, WORDS),
    st.tuples(st.just("--engine"), ENGINES),
    st.tuples(st.just("--prompts"), st.sampled_from(["here", "apart", "either", ""])),
    st.sampled_from([("--input", "500", "--output", "100"), ("--input", "1e8", "--output", "1")]),
    st.tuples(st.just("--kind"), st.sampled_from(["afd", "colocated", "both"])),
    st.tuples(
        st.just("--objective"), st.sampled_from(["dollar", "device", "watt", "latency", "count", "none"])
    ),
    st.tuples(st.just("--precision"), st.sampled_from(["bf16", "fp8", "fp4", "int4", "fp2"])),
    st.sampled_from([("--decode-only",), ("--p99",), ("--expert-slices",)]),
)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--attention-devices 60 --expert-devices 60", "are 120 devices: the pools have 64"),
        ("--kind afd --expert-devices 8", "does not fit 64 h800 with --expert-devices 8"),
        ("--kind colocated --devices 4", "does not fit 64 h800 with --devices 4"),
        ("--engine fastafd --kind colocated", "no plans of --kind colocated"),
        ("--engine vllm --kind afd", "no plans of --kind afd"),
        ("--engine mine.jsonl", "a calibration is of CPU hosts"),
        ("--curves mine.jsonl", "a calibration is of CPU hosts"),
        ("--curves h200 --engine mine.jsonl", "drop one of them"),
        ("--counts rows.json --skew 1.1", "--counts rows.json and --skew 1.1 both say"),
        (
            "--input 9 --output 9 --concurrency 4 --decode-only --prefill-devices 65",
            "--prefill-devices 65: the pools have 64",
        ),
        ("--cluster /nowhere/cluster.toml", "there is no folder"),
        ("--cluster /", "it is a folder"),
        (
            "--expert-memory 40GiB",
            "--expert-memory 40GiB: plans count every expert in the memory of its device",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(
    capsys: pytest.CaptureFixture[str], flags: str, words: str
) -> None:
    assert run(["plan", "--model", "deepseek-v3", "--pool", "h800=64", *flags.split()]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and printed.out == ""


@pytest.mark.parametrize(
    "line",
    [
        "plan --model LONG --pool h800=64",
        "plan --model LONG/config.json --pool h800=64",
        "plan --model nano --pool LONG=2",
        "plan --model nano --pool LONG.toml=2",
        *(
            f"plan --model nano --pool cpu-host=2 {flag} LONG{ending}"
            for flag, ending in (
                ("--engine", ""),
                ("--engine", ".jsonl"),
                ("--curves", ".toml"),
                ("--report", "/a.html"),
                ("--report", ".html"),
                ("--chart", ".png"),
                ("--cluster", ".toml"),
                ("--counts", ""),
                ("--trace", ""),
            )
        ),
        "plan --compare LONG LONG",
        "simulate --model nano --pool cpu-host=2 --trace LONG",
        "simulate --model nano --pool cpu-host=2 --kind afd --context 96 --timeline LONG",
        "bench calibrate --out LONG.jsonl",
        "bench calibrate --out LONG/a.jsonl",
        "bench calibrate --model LONG --out a.jsonl",
    ],
)
def test_a_name_that_no_file_can_have_is_one_line(capsys: pytest.CaptureFixture[str], line: str) -> None:
    assert run(line.replace("LONG", LONG).split()) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1


def test_a_calibration_that_is_not_there_is_named_by_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--engine", "--curves"):
        assert run(["plan", "--model", "nano", "--pool", "cpu-host=2", flag, "missing.jsonl"]) == 2
        assert f"{flag} missing.jsonl" in capsys.readouterr().err


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    model=MODELS,
    pools=st.lists(POOLS, min_size=1, max_size=2),
    chosen=st.lists(CHOSEN, max_size=5),
    as_json=st.booleans(),
)
def test_an_answer_or_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    pools: list[str],
    chosen: list[tuple[str, ...]],
    as_json: bool,
) -> None:
    monkeypatch.chdir(tmp_path)  # drawn names of files to write
    line = ["plan", "--model", model, *(word for pool in pools for word in ("--pool", pool))]
    line += [word for words in chosen for word in words] + ["--json"] * as_json
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code = run(line)
    printed = capsys.readouterr()
    assert code in (0, 2), (line, printed.err)
    if code == 2:
        assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1, line
        return
    assert "nan" not in printed.out.replace("nano", ""), line
    if as_json:
        best = json.loads(printed.out)["best"]
        low, high = best["tpot_interval_80_ms"]
        assert 0 < low <= best["tpot_ms"] <= high
        assert best["tok_s"] > 0
