"""The whole of `afserve simulate` with drawn arguments: an answer, or one line. Plays that would take minutes are
refused before they begin."""

import json
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afserve.cli.main import run
from afserve.cli.plan import play

SMALL = "simulate --model qwen3-30b-a3b --pool h20=4 --pool l40s=4"
WORDS = st.sampled_from(
    ["nan", "inf", "-inf", "0", "-1", "1", "2", "8", "0.5", "1e3", "1e9", "1e-9", "1e400", "", "x", "50ms", "30s"]
)  # fmt: skip
VALUED = st.sampled_from(
    [
        "--steps", "--requests", "--load", "--jitter", "--stall", "--seed", "--tpot", "--ttft", "--context", "--skew",
        "--micro-batches", "--attention-devices", "--expert-devices", "--devices", "--concurrency", "--max-running",
        "--lose", "--mtbf", "--days", "--timeline", "--trace",
    ]
)  # fmt: skip
CHOSEN = st.one_of(
    st.tuples(VALUED, WORDS),
    st.tuples(st.just("--kind"), st.sampled_from(["afd", "colocated", "both"])),
    st.tuples(
        st.just("--input"),
        st.sampled_from(["100", "1e8"]),
        st.just("--output"),
        st.sampled_from(["50", "1e7"]),
    ),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=st.lists(CHOSEN, max_size=5))
def test_an_answer_or_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    chosen: list[tuple[str, ...]],
) -> None:
    monkeypatch.chdir(tmp_path)  # drawn names of files to write
    monkeypatch.setattr(play, "LONGEST", 1e6)  # a tenth of a second
    line = [*SMALL.split(), *(word for words in chosen for word in words), "--json"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code = run(line)
    printed = capsys.readouterr()
    assert code in (0, 2), (line, printed.err)
    if code == 2:
        assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1, line
        return
    values = json.loads(printed.out, parse_constant=pytest.fail)
    assert values["tok_s"] > 0 and values["requests"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--kind afd --steps 10000", "--steps 10000: of a plan of"),
        (
            "--input 100 --output 1e6",
            "are played, in half a minute; give fewer --requests or shorter answers",
        ),
        ("--input 100 --output 10000 --load 0.001", "steps at --load 0.001"),
        (
            "--input 100 --output 10000 --load 10 --requests 200000",
            "--requests 200000: their 2,000,000,000 tokens",
        ),
    ],
)
def test_a_play_of_minutes_is_refused_with_the_most_that_is_played(
    capsys: pytest.CaptureFixture[str], flags: str, words: str
) -> None:
    assert run([*SMALL.split(), *flags.split()]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and printed.out == ""


@pytest.mark.slow
def test_the_most_steps_that_are_named_are_played(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"{SMALL} --kind afd --attention-devices 1 --expert-devices 4 --micro-batches 1 --json --steps".split()
    for passes, most in ((5, 3), (20, 16)):
        monkeypatch.setattr(play, "LONGEST", 48 * 257 * passes)
        assert run([*line, "64"]) == 2
        assert f"at most {most} are played" in capsys.readouterr().err
        run([*line, str(most)])
        assert "--steps" not in capsys.readouterr().err
    monkeypatch.setattr(play, "LONGEST", 48 * 257)
    assert run([*line, "64"]) == 2
    assert "too many to play" in capsys.readouterr().err


@pytest.mark.slow
def test_a_trace_shorter_than_the_ranks_that_are_played(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 100, "output_length": 10}\n')
    line = f"simulate --model qwen3-30b-a3b --pool h20=8 --attention-devices 4 --expert-devices 4 --trace {trace}"
    assert run(line.split()) == 2
    assert "it has 1 requests, and 4 of the plan's 4 attention ranks" in capsys.readouterr().err
