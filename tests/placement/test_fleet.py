"""`afserve fleet`: hours, reserved prices, spares, energy, growth and shared pools."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afserve.cli.main import run
from afserve.errors import ConfigError
from afserve.placement.planner.fleet.bill import SiteCosts, spares_for, worth_reserving
from afserve.placement.planner.fleet.load import read_growth, read_load

SMALL = "--model qwen3-30b-a3b --pool h20 --engine vllm --kind colocated --input 500 --output 200 --tpot 30ms"


def day_file(folder: Path, rates: list[float], name: str = "day.csv") -> Path:
    path = folder / name
    path.write_text(
        "\n".join(["hour,requests_per_s", *(f"{hour},{rate}" for hour, rate in enumerate(rates))])
    )
    return path


def answer_of(capsys: pytest.CaptureFixture[str], line: str) -> dict:
    assert run(["fleet", *line.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_devices_follow_the_hours_and_the_steady_part_is_reserved(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rates = [100.0] * 12 + [500.0] * 12
    file = day_file(tmp_path, rates)
    found = answer_of(capsys, f"{SMALL} --load {file} --reserved h20@0.56 --headroom 0")
    (one,), (bill,) = found["classes"], found["devices"]
    each = bill["peak"] // max(one["instances"])
    for count, rate in zip(one["instances"], rates, strict=True):
        assert count == math.ceil(rate / one["requests_per_s_each"])
    assert bill["reserved"] == each * min(one["instances"]), (
        "0.56 of 0.8: worth it for more than 70 % of the hours"
    )
    assert bill["device_hours"] == each * sum(one["instances"])
    demanded = bill["device_hours"] - 24 * bill["reserved"]
    assert found["usd"] == pytest.approx(24 * bill["reserved"] * 0.56 + demanded * 0.8, abs=0.02)
    assert found["usd"] < found["usd_all_on_demand"] == pytest.approx(bill["device_hours"] * 0.8, abs=0.02)


@pytest.mark.slow
def test_energy_counts_hosts_and_the_building(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = day_file(tmp_path, [50.0] * 24)
    plain = answer_of(capsys, f"{SMALL} --load {file}")
    more = answer_of(capsys, f"{SMALL} --load {file} --pue 1.5 --host-watts 1000 --kwh-price 0.1")
    devices = plain["devices"][0]["peak"]
    hosts = -(-devices // 8)
    assert plain["kwh"] == pytest.approx(24 * devices * 0.5, rel=0.2)
    assert more["kwh"] == pytest.approx(1.5 * (plain["kwh"] + 24 * hosts), rel=1e-3)
    assert more["usd"] == pytest.approx(plain["usd"] + 0.1 * more["kwh"], abs=0.02)
    assert more["joules_per_token"] == pytest.approx(more["kwh"] * 3.6e6 / (50 * 3600 * 24 * 200), rel=1e-3)


@pytest.mark.slow
def test_growth_says_when_to_buy(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer_of(capsys, f"{SMALL} --rate 200 --growth 1,1,3 --months 4")
    peaks = [month["devices"][0]["peak"] for month in found["months"]]
    assert peaks[0] == peaks[1] == found["devices"][0]["peak"] < peaks[2] == peaks[3]
    assert run(["fleet", *f"{SMALL} --rate 200 --growth 1,1,3 --months 4".split()]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if line.strip().startswith(("1 ", "2 ", "3 ", "4 "))]
    assert (
        [row[3] for row in rows][1] == "-" and rows[2][3] == f"{peaks[2] - peaks[1]:,}" and rows[3][3] == "-"
    )


@pytest.mark.slow
def test_a_little_growth_takes_a_little_more(capsys: pytest.CaptureFixture[str]) -> None:
    """Not a second instance that is as large as the first month's peak."""
    found = answer_of(
        capsys, f"{SMALL.replace('--kind colocated ', '')} --rate 200 --growth 1,1.05 --months 2"
    )
    first, second = (month["devices"][0]["peak"] for month in found["months"])
    assert first <= second < 1.5 * first


@pytest.mark.slow
def test_classes_share_pools(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One has its peak by day and one by night: together they take less than two pools."""
    day_file(tmp_path, [200.0] * 12 + [2.0] * 12)
    day_file(tmp_path, [2.0] * 12 + [200.0] * 12, "night.csv")
    file = tmp_path / "classes.toml"
    file.write_text(
        '[[class]]\nname = "chat"\nload = "day.csv"\n\n[[class]]\nname = "batch"\nload = "night.csv"\ntpot = "60ms"\n'
        'model = "gpt-oss-20b"\nprecision = "fp8"\n'
    )
    found = answer_of(capsys, f"{SMALL} --classes {file}")
    assert [one["name"] for one in found["classes"]] == ["chat", "batch"]
    assert all("Only colocated plans were asked for" in one["verdict"] for one in found["classes"])
    assert found["devices"][0]["peak"] < found["peaks_apart"]["h20"]
    assert found["classes"][0]["tpot_ms"] <= 30 < 60 and found["classes"][1]["tpot_ms"] <= 60
    few = found["devices"][0]["peak"] - 1
    assert run(["fleet", *f"{SMALL.replace('h20', f'h20={few}')} --classes {file}".split()]) == 2
    assert "1 more. Offer more, or h20 without a count" in capsys.readouterr().err


def test_spares_are_enough_with_that_chance() -> None:
    site = SiteCosts(available=0.999, mtbf=50_000 * 3600.0, repair=48 * 3600.0)
    assert spares_for(0, site) == 0 and spares_for(64, SiteCosts()) == 0
    for devices in (8, 64, 1024, 2_000_000):
        mean = devices * 48 / 50_000
        count = spares_for(devices, site)
        drawn = np.random.default_rng(0).poisson(mean, 200_000)
        assert (drawn <= count).mean() >= 0.998 and (drawn <= count - 1).mean() < 0.9995


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.floats(0.05, 1.5))
def test_no_other_number_of_reserved_devices_is_cheaper(hours: list[int], share: float) -> None:
    standing = np.array(hours, dtype=float)

    def cost(reserved: int) -> float:
        return reserved * len(hours) * share + float(np.maximum(standing - reserved, 0).sum())

    assert cost(worth_reserving(standing, share)) <= min(map(cost, range(42))) + 1e-9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the first line must be hour,requests_per_s"),
        ("hour,requests_per_s", "it has 0 hours"),
        ("hour,requests_per_s\n0,1\n2,1", "row 3: the hour must be 1, not '2'"),
        ("hour,requests_per_s\n0,x", "row 2: 'x' is no number of requests per second"),
        ("hour,requests_per_s\n0,-1", "'-1' is no number"),
        ("hour,requests_per_s\n0,nan", "'nan' is no number"),
        ("hour,requests_per_s\n0,1,2", "row 2 has 3 columns, not 2"),
        ("hour,requests_per_s\n0,0", "no request comes in any hour"),
    ],
)
def test_odd_loads_are_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_load("day.csv", text.splitlines())


@pytest.mark.parametrize("text", ["", "%", "x%", "-100%", "1,,2", "nan", "0,1", "1e9%", "1e6%"])
def test_odd_growth_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write 8% "):
        read_growth(text, 12)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"{SMALL}", "how many requests come?"),
        ("--pool h20 --rate 5 --input 5 --output 5", "--model is missing"),
        ("--model qwen3-30b-a3b --rate 5 --input 5 --output 5", "--pool is missing"),
        (f"{SMALL} --rate 5 --reserved h20", "write NAME@USD"),
        (f"{SMALL} --rate 5 --reserved h30@1", "no --pool has that name; offered are h20"),
        (f"{SMALL} --rate 5 --mtbf soon", "--mtbf: 'soon' is not a time"),
        (f"{SMALL} --rate 5 --classes /nowhere.toml", "--classes /nowhere.toml"),
        (f"{SMALL} --rate 5 --load /nowhere.csv", "--load /nowhere.csv"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    assert run(["fleet", *line.split()]) == 2
    said = capsys.readouterr()
    assert said.out == "" and words in said.err and said.err.count("\n") == 1


def test_odd_classes_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "classes.toml"
    for text, words in (
        ("", "it must have 1 to 64 tables [[class]]"),
        ("[[class]", "Expected ']]'"),
        ('[[class]]\nname = "a"\nrate = "x"', "class 'a': rate must be a number"),
        ('[[class]]\nrate = 5\nspeed = "fast"', "class 'class 1': No such option"),
        ("[[class]]\nrate = 5\ntpot = 50\nttft = 1e-9", "class 'class 1': --ttft: '1e-09' is not a time of"),
    ):
        file.write_text(text)
        assert run(["fleet", *SMALL.split(), "--classes", str(file)]) == 2
        assert words in capsys.readouterr().err
