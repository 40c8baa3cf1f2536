"""Every number that `plan`, `place` and `simulate` take, from extreme to extreme: used, or refused by its name."""

import json
import warnings

import pytest

from afserve.cli.main import run

VALUES = ("nan", "inf", "-inf", "1e400", "-1", "0", "5e-324", "1e308", "9" * 30, "9" * 5000, "", "x")
PLAN = ("plan", "--model", "mixtral-8x7b", "--pool", "h800=4")
SIMULATE = ("simulate", "--model", "mixtral-8x7b", "--pool", "h800=8", "--requests", "20", "--steps", "2")
LENGTHS = ("--input", "100", "--output", "100")
OPTIONS = {
    "--network": PLAN,
    "--link": PLAN,
    "--tpot": PLAN,
    "--ttft": (*PLAN, *LENGTHS),
    "--context": PLAN,
    "--skew": PLAN,
    "--redundant": PLAN,
    "--expert-copies": PLAN,
    "--rate": (*PLAN, *LENGTHS),
    "--micro-batches": PLAN,
    "--top": PLAN,
    "--attention-devices": PLAN,
    "--expert-devices": PLAN,
    "--devices": PLAN,
    "--tensor-parallel": PLAN,
    "--concurrency": PLAN,
    "--max-running": PLAN,
    "--prefill-devices": (*PLAN, *LENGTHS, "--decode-only", "--concurrency", "8"),
    "--prefill-workers": (*PLAN, *LENGTHS, "--decode-only", "--concurrency", "8"),
    "--steps": SIMULATE,
    "--requests": SIMULATE,
    "--load": SIMULATE,
    "--jitter": SIMULATE,
    "--stall": SIMULATE,
    "--seed": SIMULATE,
}
OF_PLACE = (
    "--nodes",
    "--slots",
    "--memory",
    "--groups",
    "--nodes-per-host",
    "--expert-copies",
    "--speed",
    "--dead",
    "--moves",
    "--protect",
    "--expert-mib",
)


def check(capsys, arguments) -> None:
    """An answer, or one line; no warning of numpy on the way."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code = run(arguments)
    printed = capsys.readouterr()
    assert code in (0, 2), printed.err
    assert "nan" not in printed.out
    if code == 2:
        assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1
        assert len(printed.err) < 400


def named(capsys, arguments, name) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(arguments) == 2
    said = capsys.readouterr().err
    assert name in said and said.count("\n") == 1 and len(said) < 400
    return said


@pytest.mark.usefixtures("larger_pools")
@pytest.mark.parametrize("option", OPTIONS)
def test_numbers_of_plan_and_simulate(capsys, option):
    for value in VALUES:
        check(capsys, [*OPTIONS[option], option, value])
    for value in ("nan", "1e400", "9" * 5000, "x"):
        named(capsys, [*OPTIONS[option], option, value], option)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "form", ["{}", "lognormal 100 {}", "lognormal {} 10", "uniform {} 10", "uniform 100 {}", "exponential {}"]
)
@pytest.mark.parametrize(("option", "other"), [("--input", "--output"), ("--output", "--input")])
def test_lengths(capsys, option, other, form):
    for value in VALUES:
        check(capsys, [*PLAN, option, form.format(value), other, "100"])
    for value in ("nan", "inf", "1e400", "1e308", "x"):
        named(capsys, [*PLAN, option, form.format(value), other, "100"], option)


@pytest.mark.slow
def test_pools(capsys):
    for value in VALUES:
        said = named(capsys, ["plan", "--model", "mixtral-8x7b", "--pool", f"h800={value}"], "--pool")
        assert "h800" in said
        named(capsys, ["plan", "--model", "mixtral-8x7b", "--pool", f"h800=8@{value}"], "--pool")


@pytest.fixture
def counts(tmp_path):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"counts": [[1, 2, 3, 4], [4, 3, 2, 1]]}))
    return str(path)


@pytest.mark.parametrize("option", OF_PLACE)
def test_numbers_of_place(capsys, counts, option):
    for value in VALUES:
        check(capsys, ["place", counts, "--nodes", "2", option, value])
    for value in ("nan", "1e400", "9" * 5000, "x"):
        named(capsys, ["place", counts, "--nodes", "2", option, value], option)


@pytest.mark.parametrize("option", ["--link-gbs", "--horizon"])
def test_prices_of_moves(capsys, counts, option):
    for value in VALUES:
        check(capsys, ["place", counts, "--nodes", "2", "--expert-mib", "1", option, value])


def test_lists_and_weights(capsys, counts):
    for value in VALUES:
        check(capsys, ["place", counts, "--nodes", "2", "--speed", f"1,{value}"])
        check(capsys, ["place", counts, "--nodes", "2", "--scenario", f"counts={value}"])


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-1", "1e400", "1e308", "9" * 30, "9" * 5000, "null", "[]", '"1"', "true"]
)
def test_numbers_in_counts(capsys, tmp_path, number):
    path = tmp_path / "counts.json"
    path.write_text('{"counts": [[1, NUMBER, 3, 4], [4, 3, 2, 1]]}'.replace("NUMBER", number))
    check(capsys, ["place", str(path), "--nodes", "2"])
    check(capsys, [*PLAN, "--counts", str(path)])


@pytest.mark.parametrize("count", ["1_0", "\u0663", "0x10", "\uff15"])
def test_only_digits_that_everybody_reads_are_a_number(capsys, count):
    named(capsys, ("plan", "--model", "qwen3-30b-a3b", "--pool", f"h200={count}"), "--pool")
    named(capsys, (*PLAN, "--top", count), "--top")
