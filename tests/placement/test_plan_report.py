"""`afserve plan --report FILE`: the page is read as a browser reads it, its numbers are those of `--json`."""

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afserve.cli.main import run
from afserve.cli.plan.command import plan as plan_command
from afserve.cli.plan.options import asked_question
from afserve.placement.planner import same_layout
from afserve.placement.planner.question import Question, answer
from afserve.placement.planner.scale import LIKELY, on_more_devices
from afserve.placement.planner.search import Targets
from afserve.placement.planner.sensitivity import probability, sensitivity, verdict
from afserve.placement.planner.tornado import assumptions, tornado

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--model qwen3-30b-a3b --pool h20=4 --context 2048 --tpot 30ms"
LOADS = {"script", "link", "img", "iframe", "object", "embed", "image", "use", "base", "a"}
VOID = {"meta", "br"}


class Read(HTMLParser):
    """Tags must close in their order; text, tags, attributes and table rows are kept."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(self.words)


def write(capsys: pytest.CaptureFixture[str], line: list[str], folder: Path) -> tuple[str, dict, dict]:
    """(the page, the report's JSON, the plan's own JSON) of one command."""
    html, values = folder / "r.html", folder / "r.json"
    code = run(["plan", *line, "--json", "--report", str(html), "--report", str(values)])
    said = capsys.readouterr()
    assert code == 0, said.err
    return html.read_text(encoding="utf-8"), json.loads(values.read_text()), json.loads(said.out)


def question_of(line: str) -> Question:
    return asked_question(dict(plan_command.make_context("plan", line.split()).params))


@pytest.mark.slow
def test_the_page_says_what_the_plan_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, values, printed = write(capsys, SMALL.split(), tmp_path)
    assert {key: values[key] for key in printed} == printed
    read, best = Read(page), printed["best"]
    assert not LOADS & set(read.tags) and not {"src", "href", "onload"} & read.attributes
    assert "@import" not in page and "url(" not in page and read.tags.count("svg") == 4
    assert values["question"] == f"afserve plan {SMALL}" and values["question"] in read.text
    assert printed["verdict"] in read.text
    assert read.text.lower().count(values["what_would_decide"].lower()) == 1
    rounded = printed["probability_afd_better"]  # to three digits, the page has two
    assert {f"{rounded - 0.0005:.2f}", f"{rounded + 0.0005:.2f}"} & set(re.findall(r"0\.\d\d", read.text))
    assert f"{best['tpot_ms']:.1f} ms, 80 % inside" in read.text and "chosen plan" in read.text
    for name in ("attention", "dispatch", "experts", "combine"):
        near = (best["stages_us"][name] + off for off in (0.0, -0.006, 0.006))
        assert any(f"{value:,.1f} us" in read.text for value in near)
    for swing in values["tornado"]:
        assert any(row[:2] == [swing["assumption"], swing["unit"]] for row in read.rows)
    for row in values["assumed"]:
        assert row["source"] and [row["what"], row["value"], row["source"]] in read.rows
    for kind, points in values["pareto"].items():
        assert sum(row[0] == {"afd": "AFD"}.get(kind, kind) for row in read.rows) == len(points)
        users = [point["tok_s_per_user"] for point in points]
        dollars = [point["usd_per_mtok"] for point in points]
        assert points and users == sorted(users, reverse=True) and dollars == sorted(dollars, reverse=True)
    on_its_curve = [point["usd_per_mtok"] for point in values["pareto"][best["kind"]]]
    assert pytest.approx(best["usd_per_mtok"], rel=1e-3) in on_its_curve


@pytest.mark.slow
def test_the_same_question_gives_the_same_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    write(capsys, SMALL.split(), tmp_path)
    write(capsys, [*SMALL.split(), "--top", "1"], tmp_path / "again")
    for name in ("r.html", "r.json"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.slow
def test_flags_stand_as_they_were_given(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = "--tpot 30ms --pool h20=4 --p99 --model qwen3-30b-a3b --context 2048"
    _, values, _ = write(capsys, line.split(), tmp_path)
    assert values["question"] == f"afserve plan {line}"


@pytest.mark.slow
def test_a_small_pool_names_the_devices_from_which_the_answer_turns() -> None:
    asked = question_of("--model qwen3-235b-a22b --pool gb200=16 --context 8192")
    found = answer(asked)
    assert found.plans[0].kind == "colocated"
    said = on_more_devices(asked, found)
    assert said.startswith("On more devices it turns: with 24 gb200, AFD with 19 gb200 for attention")
    assert "; with 32 gb200, AFD with 27 gb200" in said
    assert "fastafd was measured on 32 to 72 gb200." in verdict(asked, found)
    node_less = question_of("--model qwen3-235b-a22b --pool gb200=20 --context 8192")
    assert probability_of(node_less) < LIKELY, "24 are the fewest whole nodes"
    larger = question_of("--model qwen3-235b-a22b --pool gb200=32 --context 8192")
    found = answer(larger)
    assert on_more_devices(larger, found) == "" and "was measured on" not in verdict(larger, found)


def probability_of(asked: Question) -> float:
    found = answer(asked)
    afd, colocated = found.best("afd"), found.best("colocated")
    assert afd is not None and colocated is not None
    return probability(asked, afd, colocated)


@pytest.mark.slow
def test_a_verdict_within_the_error_of_both_is_undecided() -> None:
    asked = question_of("--model qwen3-235b-a22b --pool gb200=20 --context 8192")
    assert abs(probability_of(asked) - 0.5) < 0.1
    assert verdict(asked, answer(asked)).startswith("Undecided: AFD has ")


@pytest.mark.slow
@pytest.mark.parametrize("chance", [0.3, 0.5, 0.8])
def test_a_tie_is_undecided_whatever_other_engines_say(
    monkeypatch: pytest.MonkeyPatch, chance: float
) -> None:
    asked = question_of(SMALL)
    found = answer(asked)
    monkeypatch.setattr("afserve.placement.planner.sensitivity.merit", lambda question, plan: 1.0)
    assert verdict(asked, found, chance).startswith("Undecided: AFD and colocated have the same tokens per ")


@pytest.mark.slow
def test_without_a_batch_a_change_is_none() -> None:
    asked = question_of("--model qwen3-30b-a3b --pool h20=4 --tpot 30ms")
    best = answer(asked).plans[0]
    sooner = replace(asked, targets=Targets(1e-6))
    assert set(sensitivity(sooner, best).values()) == {None}


@pytest.mark.slow
def test_hostile_names_stay_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>&\"'"
    hardware = (ROOT / "configs/hardware/h20.toml").read_text()
    hardware = hardware.replace('name = "h20"', 'name = "<svg onload=alert(2)>"')
    hardware = hardware.replace('"NVIDIA data sheet"', '"</td><script>alert(3)</script>"')
    (tmp_path / "own.toml").write_text(hardware)
    folder = tmp_path / name
    folder.mkdir()
    copied = (ROOT / "configs/nano/config.json").read_text()
    (folder / "config.json").write_text(copied)
    line = ["--model", str(folder), "--pool", f"{tmp_path / 'own.toml'}=2", "--context", "512"]
    page, values, _ = write(capsys, line, tmp_path)
    read = Read(page)
    assert not LOADS & set(read.tags) and read.tags.count("svg") == 4
    assert not {name for name in read.attributes if name.startswith("on")}
    assert name in read.text and "<svg onload=alert(2)>" in read.text
    assert "</td><script>alert(3)</script>" in read.text and values["model"] == name


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("r.pdf", "the name must end in .html or .json or .png"),
        ("r", "the name must end in .html or .json or .png"),
        ("nowhere/r.html", "there is no folder"),
        ("folder.html", "it is a folder"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], tmp_path: Path, file: str, words: str) -> None:
    (tmp_path / "folder.html").mkdir()
    code = run(["plan", *SMALL.split(), "--report", str(tmp_path / file)])
    said = capsys.readouterr()
    assert code == 2 and said.out == ""
    assert said.err.startswith("error: --report ") and said.err.count("\n") == 1 and words in said.err


@pytest.mark.slow
def test_the_picture_and_what_it_needs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["plan", *SMALL.split(), "--report", str(tmp_path / "r.png")]
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "matplotlib", None)
        assert run(line) == 2
    assert "matplotlib is not installed; pip install 'afserve[plot]'" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    assert run(line) == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_tornado_evaluates_one_layout_and_searches_none(monkeypatch: pytest.MonkeyPatch) -> None:
    question = question_of(f"{SMALL} --draft eagle3:1 --acceptance 0.7")
    best = answer(question).best()
    assert best is not None
    evaluated, bisect = [], same_layout.best_batches

    def counted(family, *rest, **named):
        evaluated.append(len(family.ranks))
        return bisect(family, *rest, **named)

    monkeypatch.setattr(same_layout, "best_batches", counted)
    swings = tornado(question, best)
    others = sum(kind == best.kind for kind, _ in question.others)
    assert len(swings) == 8 and set(evaluated) == {1} and len(evaluated) == 14 + others
    engine = next(swing for swing in swings if swing.names)
    assert best.engine == engine.names[1] and others >= 1
    effects = [swing.effect(best.tok_s_per_device) for swing in swings]
    assert effects == sorted(effects, reverse=True)
    assert all(swing.low <= swing.planned <= swing.high for swing in swings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        SMALL,
        "--model qwen3-30b-a3b --pool h20=4 --objective latency",
        "--model qwen3-235b-a22b --pool gb200=32 --context 8192 --kind afd --attention-devices 28 --expert-devices 4 "
        "--engine fastafd --concurrency 2600",
    ],
)
def test_faster_parts_are_never_slower(line: str) -> None:
    question = question_of(line)
    best = answer(question).best()
    assert best is not None
    base = same_layout.conditions_of(question, best)
    targets = same_layout.targets_of(question, best)
    planned = same_layout.tokens_per_second(question, best, targets, base)
    assert planned == pytest.approx(best.tok_s, rel=1e-9)
    for swing in tornado(question, best):
        assert swing.at_low is not None and swing.at_high is not None
        if swing.name in ("link and network bandwidth", "memory bandwidth", "kernel efficiency"):
            assert swing.at_low <= best.tok_s_per_device * (1 + 1e-9) <= swing.at_high * (1 + 2e-9)
        if swing.name in ("exchange latency", "context"):
            assert swing.at_low * (1 + 2e-9) >= best.tok_s_per_device * (1 + 1e-9) >= swing.at_high


@pytest.mark.slow
def test_only_what_the_question_has_is_varied() -> None:
    question = question_of(SMALL)
    best = answer(question).best()
    assert best is not None
    given = same_layout.conditions_of(question, best)
    names = {one.name for one in assumptions(given)}
    assert "expert skew" in names and "acceptance of drafts" not in names
    counted = replace(given.setting.routing, counts=tuple(range(1, 129)))
    measured = replace(given, setting=replace(given.setting, routing=counted))
    assert "expert skew" not in {one.name for one in assumptions(measured)}


@pytest.mark.slow
def test_what_was_typed_is_told_from_defaults(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = [
        "--model",
        "qwen3-30b-a3b",
        "--pool",
        "h20=2@1.5",
        "--network",
        "25",
        "--input",
        "lognormal 800 300",
    ]
    line += ["--output", "100", "--decode-only", "--mean"]
    _, values, _ = write(capsys, line, tmp_path)
    sources = {row["what"]: row["source"] for row in values["assumed"]}
    assert sources["h20: price"] == "typed, --pool NAME=COUNT@USD"
    assert sources["h20: network per device"] == "typed, --network"
    assert sources["h20: memory bandwidth"] == "Step-3, arXiv 2507.19427"
    assert sources["cache"] == "default" and "OLMoE" in sources["expert popularity"]
    assert sources["requests"] == "typed, --input 'lognormal 800 300' --output 100 --decode-only"
    assert values["question"].endswith("--input 'lognormal 800 300' --output 100 --decode-only --mean")


@pytest.mark.slow
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pool=st.sampled_from(["h20=2@1e-6", "cpu-host=2@1e6", "dgx-spark=3"]),
    context=st.sampled_from(["1", "1e5", "1e7"]),
    more=st.sampled_from(
        [
            [],
            ["--draft", "ngram:2", "--acceptance", "1"],
            ["--skew", "4"],
            ["--link", "1e5"],
            ["--network", "1e-3"],
        ]
    ),
)
def test_extremes_are_drawn_or_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, pool: str, context: str, more: list[str]
) -> None:
    file = tmp_path / "r.html"
    line = ["plan", "--model", "nano", "--pool", pool, "--context", context, *more, "--report", str(file)]
    code = run(line)
    said = capsys.readouterr().err
    assert code in (0, 2), (line, said)
    if code == 0:
        text = file.read_text(encoding="utf-8")
        Read(text)
        assert not re.search(r"\b(nan|inf)\b", text), line
