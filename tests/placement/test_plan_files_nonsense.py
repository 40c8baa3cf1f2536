"""Files of one's own with absurd values, through the whole of `afserve plan`: an answer without nan, or one line."""

import json
import tomllib
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from afserve.cli.main import run

CONFIGS = Path(__file__).parents[2] / "configs"
ABSURD = st.one_of(
    st.sampled_from(
        [0, -1, 1, 3, 0.5, 1e-300, 1e-9, 1e9, 1e18, 1e308, 10**25, 1 << 40, float("inf"), float("nan")]
    ),
    st.sampled_from([True, None, "x", "", [], {}, [1]]),
)
ASKED = ["plan", "--model", "qwen3-30b-a3b", "--pool", "h20=8", "--json"]
DRAWN = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def places(value: object, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested tables and lists; of a list the first twelve."""
    inside = list(value.items()) if isinstance(value, dict) else []
    inside += list(enumerate(value[:12])) if isinstance(value, list) else []
    return [*([at] if at else []), *(place for key, one in inside for place in places(one, (*at, key)))]


@st.composite
def spoiled(draw: st.DrawFn, whole: Any) -> Any:
    """The same with one to three values that are absurd."""
    whole = deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        table, place = whole, draw(st.sampled_from(places(whole)))
        for key in place[:-1]:
            table = table[key]
        table[place[-1]] = deepcopy(draw(ABSURD))
    return whole


def as_toml(table: dict[str, Any], prefix: str = "") -> str:
    """TOML has no null: such a key is left out."""

    def spelled(value: object) -> str:
        return str(value) if isinstance(value, float) else json.dumps(value)

    plain = {key: value for key, value in table.items() if value is not None and not isinstance(value, dict)}
    lines = [f"{json.dumps(key)} = {spelled(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += [f"[{prefix}{json.dumps(key)}]", as_toml(value, f"{prefix}{json.dumps(key)}.")]
    return "\n".join(lines)


def check(capsys: pytest.CaptureFixture[str], line: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code = run(line)
    printed = capsys.readouterr()
    assert code in (0, 2), (line, printed.err)
    if code == 2:
        assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1
    else:
        json.loads(printed.out, parse_constant=pytest.fail)


def hardware() -> list[Any]:
    return [
        tomllib.loads((CONFIGS / f"hardware/{name}.toml").read_text())
        for name in ("h20", "gb200", "cpu-host")
    ]


def engine() -> Any:
    values = json.loads((CONFIGS / "engines/sglang.json").read_text())
    return values | {"rows": values["rows"][:12]}


def model() -> Any:
    return tomllib.loads((CONFIGS / "models/deepseek-v3.toml").read_text())["config"]


def calibration() -> list[dict[str, Any]]:
    """Rows of a slow host, of every part."""
    rows: list[dict[str, Any]] = []
    for n in (1, 4, 16, 64):
        rows += [
            {"part": "attention", "requests": n, "context": 96, "seconds": 1e-4 + 1e-5 * n},
            {"part": "experts", "rows": 8 * n, "active": min(8 * n, 100), "seconds": 1e-4 + 1e-5 * n},
            {"part": "exchange", "requests": n, "bytes": 4096 * n, "seconds": 5e-5 + 1e-6 * n},
            {"part": "kernel", "requests": n, "peers": 1, "seconds": 1e-5},
            {"part": "answer", "requests": n, "seconds": 1e-5},
            {"part": "whole", "requests": n, "peers": 1, "bytes": 4096 * n, "half": 9e-5 + 1e-5 * n}
            | {"kernel": 4e-6, "seconds": 2e-5},
            {"part": "step", "requests": n, "seconds": 1e-3},
            {"part": "control", "requests": n, "seconds": 1e-4, "served": 5e-3 + 1e-3 * n},
            {"part": "gateway", "requests": n, "seconds": 1e-4},
        ]
        run_ = {"part": "run", "requests": n, "context": 64, "attention": 1, "micro_batches": 2}
        rows += [run_ | {"experts": experts, "seconds": 5e-3 + 1e-3 * n} for experts in (0, 1)]
        rows.append(run_ | {"experts": 1, "micro_batches": 1, "seconds": 4e-3 + 1e-3 * n})
    return rows


@pytest.mark.slow
@DRAWN
@given(table=st.sampled_from(hardware()).flatmap(spoiled), count=st.sampled_from([1, 8, 64]))
@example(table=hardware()[0] | {"chip": hardware()[0]["chip"] | {"usd_per_hour": 0}}, count=8)
def test_hardware(tmp_path: Path, capsys: pytest.CaptureFixture[str], table: Any, count: int) -> None:
    own = tmp_path / "own.toml"
    own.write_text(as_toml(table))
    check(capsys, ["plan", "--model", "qwen3-30b-a3b", "--pool", f"{own}={count}", "--json"])


@pytest.mark.slow
@DRAWN
@given(values=spoiled(engine()))
@example(values=engine() | {"fit": {"rows": float("inf")}})
def test_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str], values: Any) -> None:
    own = tmp_path / "own.json"
    own.write_text(json.dumps(values))
    check(capsys, [*ASKED, "--engine", str(own)])


@pytest.mark.slow
@DRAWN
@given(config=spoiled(model()))
def test_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], config: Any) -> None:
    own = tmp_path / "config.json"
    own.write_text(json.dumps(config))
    check(capsys, ["plan", "--model", str(own), "--pool", "h200=64", "--json"])


ONE_MACHINE = (
    "--kind afd --attention-devices 1 --expert-devices 1 --micro-batches 1 --concurrency 4 --cores 2 "
    "--context 96 --precision bf16"
)


@pytest.mark.slow
@settings(DRAWN, max_examples=20)  # each fits a whole engine
@given(rows=spoiled(calibration()), more=st.sampled_from(["", ONE_MACHINE]))
@example(rows=calibration(), more=ONE_MACHINE)
def test_a_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[Any], more: str
) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text("\n".join(map(json.dumps, rows)))
    line = ["plan", "--model", "qwen3-30b-a3b", "--pool", "cpu-host=2", "--engine", str(own), "--json"]
    check(capsys, [*line, *more.split()])


@DRAWN
@given(first=st.booleans(), data=st.data())
def test_answers_to_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: bool, data: st.DataObject
) -> None:
    sound = {
        "best": {
            "kind": "afd",
            "attention": {"hardware": "h20", "devices": 4},
            "experts": {"hardware": "l40s", "devices": 4},
            "batch": 64,
            "engine": "step-3",
            **dict.fromkeys(("tpot_ms", "tok_s", "tok_s_per_device", "usd_per_mtok", "usd_per_hour"), 5.0),
        },
        "probability_afd_better": 0.6,
    }
    texts = [json.dumps(sound), json.dumps(data.draw(spoiled(sound)))]
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for file, text in zip(files, texts if first else reversed(texts), strict=True):
        file.write_text(text)
    code = run(["plan", "--compare", *map(str, files)])
    printed = capsys.readouterr()
    if code == 2:
        assert (
            printed.out == "" and printed.err.startswith("error: --compare") and printed.err.count("\n") == 1
        )
    else:
        assert code == 0 and len(printed.out) < 2000 and printed.out.count("\n") == 8
        assert not {"nan", "inf"} & set(printed.out.split())
