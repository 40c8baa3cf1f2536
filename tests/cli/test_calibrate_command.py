"""The whole of `afserve bench calibrate` with drawn arguments. What stages measure is scripted; the rest is real: one
line of error before anything is measured, or a file that `afserve plan --engine` takes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afserve.cli.bench import calibrate
from afserve.cli.main import run

WORDS = st.sampled_from(["nan", "inf", "0", "-1", "1", "2", "1.5", "1e3", "1025", "1_0", "", "x", "9" * 5000])
OUTS = st.sampled_from(
    ["rows.jsonl", "rows.json", "", ".", "no/rows.jsonl", "folder.jsonl", "rows.jsonl/x.jsonl", "/"]
)
MODELS = st.sampled_from(["nano", "nosuch", "", "mixtral-8x7b", "empty", "broken", "\x1b[31m"])
FLAGS = st.one_of(
    st.tuples(st.just("--threads"), WORDS),
    st.tuples(st.just("--out"), OUTS),
    st.tuples(st.just("--model"), MODELS),
    st.sampled_from([("--quick",), ("--json",), ("--nosuch",), ("word",), ("--threads",)]),
)


def scripted(*_: object) -> Iterator[calibrate.Row]:
    for n in (1, 8, 64):
        yield {"part": "attention", "requests": n, "context": 96, "seconds": 1e-4 * n}
        yield {"part": "experts", "rows": 2 * n, "active": min(n, 8), "seconds": 1e-4 * n}
    yield {"part": "changed", "ratio": 1.5}


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=st.lists(FLAGS, max_size=4), out=st.booleans())
@pytest.mark.slow
def test_a_file_or_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    chosen: list[tuple[str, ...]],
    out: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibrate, "stages", scripted)
    for name, text in (("empty", None), ("broken", "{"), ("folder.jsonl", None)):
        (tmp_path / name).mkdir(exist_ok=True)
        if text is not None:
            (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "rows.jsonl").unlink(missing_ok=True)
    line = ["bench", "calibrate", *(word for words in chosen for word in words)]
    code = run([*line, "--out", "rows.jsonl"] if out else line)
    printed = capsys.readouterr()
    assert code in (0, 2), (line, printed.err)
    if code == 2:
        assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1, line
        assert len(printed.err) < 600 and not (tmp_path / "rows.jsonl").exists()
        return
    assert "the machine changed: stages took +50% at the end" in printed.err
    asked = (
        "plan --model nano --pool cpu-host=2 --precision bf16 --context 96 --max-running 64 --json --engine"
    )
    assert run([*asked.split(), "rows.jsonl"]) == 0
    assert '"rows.jsonl"' not in capsys.readouterr().err
