"""Plans with drafts: what is accepted, what drafting and verifying cost, and whether it pays."""

import csv
import json
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from afserve.cli.main import run
from afserve.cli.plan.catalog import CONFIGS, load_curves, load_hardware, load_lengths, load_model
from afserve.errors import ConfigError
from afserve.families.drafters.dense import draft_model_spec
from afserve.placement.planner.draft_worth import draft_worth
from afserve.placement.planner.perf.acceptance import (
    CODING,
    OTHER,
    expected_lengths,
    measured_lengths,
    typed_lengths,
)
from afserve.placement.planner.perf.drafting import (
    DRAFTERS,
    NO_DRAFTS,
    Drafts,
    alone,
    model_drafter,
    with_drafter,
)
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.stages import afd_stages, colocated_stages
from afserve.placement.planner.perf.workload import fixed_context
from afserve.placement.planner.question import Question, answer
from afserve.placement.planner.search import DevicePool, GivenLayout, Targets
from afserve.placement.planner.simulate.phases import PhaseLayout

MTP, EAGLE, NGRAM = (DRAFTERS[name] for name in ("mtp", "eagle3", "ngram"))
SMALL = "--model deepseek-v3 --pool h800=16 --context 4096 --tpot 50ms"
PUBLISHED = Path(__file__).resolve().parents[3] / "shared/data/planner/acceptance_lengths.csv"


def call(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, str]:
    code = run(["plan", *line.split()])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def setting(drafts: Drafts = NO_DRAFTS, model: str = "deepseek-v3") -> Setting:
    return Setting(load_model(model), load_curves("h200"), fixed_context(4096), drafts=drafts)


def question(drafts: Drafts = NO_DRAFTS, **given: object) -> Question:
    return Question(setting(drafts), (DevicePool(load_hardware("h800"), 16),), Targets(tpot=0.05), **given)  # type: ignore[arg-type]


# what is accepted


def test_the_table_is_what_was_published() -> None:
    if not PUBLISHED.is_file():
        pytest.skip("the published table is not here")
    with PUBLISHED.open(newline="") as lines:
        published = {
            (row["model"], row["drafter"]): tuple(float(row[f"k{k}"]) for k in range(1, 9))
            for row in csv.DictReader(lines)
        }
    assert {(row.model, row.drafter): row.lengths for row in load_lengths()} == published
    table = tomllib.loads((CONFIGS / "drafts.toml").read_text())
    assert table["meta"]["licence"] == "Apache-2.0"


def test_a_measured_model_has_its_own_lengths_and_others_are_less_sure() -> None:
    rows = load_lengths()
    own = expected_lengths(rows, "qwen3.5-397b-a17b", MTP, CODING)
    other_text = expected_lengths(rows, "qwen3.5-397b-a17b", MTP, OTHER)
    kin = expected_lengths(rows, "glm-5", MTP, CODING)
    nobody = expected_lengths(rows, "mixtral-8x7b", MTP, CODING)
    assert own and other_text and kin and nobody
    assert own.lengths[:3] == (1.93, 2.73, 3.39) and "measured of qwen3.5" in own.source
    assert kin.lengths[2] == pytest.approx(2.99) and "nobody measured glm-5" in kin.source
    assert (
        own.spread < other_text.spread and own.spread < nobody.spread < kin.spread
    )  # one model says less than three
    lengths = [row.lengths[2] for row in rows if row.drafter == "mtp"]
    assert min(lengths) < nobody.lengths[2] < max(lengths) and "the mean of what" in nobody.source
    assert "other text is accepted less often" in other_text.source and "other text" not in own.source
    assert expected_lengths(rows, "qwen3.5-397b-a17b", NGRAM, CODING) is None


def test_typed_acceptance() -> None:
    assert typed_lengths("0.5", MTP, 4).lengths == (1.5, 1.75, 1.875, 1.9375)
    assert typed_lengths("0", MTP, 2).lengths == (1, 1) and typed_lengths("1", MTP, 2).lengths == (2, 3)
    assert typed_lengths("1.8,2.4", MTP, 16).lengths == (1.8, 2.4)
    for wrong in ("2.5", "1.8,3.5", "-1", "nan", "", "a,b", "inf"):
        with pytest.raises(ConfigError, match="--acceptance"):
            typed_lengths(wrong, MTP, 16)
    with pytest.raises(ConfigError, match="known for 1 to 2"):
        typed_lengths("1.8,2.4", MTP, 16).drafts(3)


def test_a_wrong_table_is_refused_by_name() -> None:
    row = {"model": "m", "drafter": "mtp", "domain": "coding", "lengths": [1.8, 2.2]}
    assert measured_lengths("t", {"measured": [row]})[0].lengths == (1.8, 2.2)
    for wrong in (
        {"drafter": "magic"},
        {"lengths": [2.1]},
        {"lengths": [1.0]},
        {"lengths": []},
        {"lengths": ["a"]},
    ):
        with pytest.raises(ConfigError, match=r"t: \[\[measured\]\] 1"):
            measured_lengths("t", {"measured": [row | wrong]})


def test_a_length_stays_possible_however_far_it_is() -> None:
    drafts = Drafts(MTP, 3, 2.99, 0.4)
    assert drafts.further(0) == pytest.approx(2.99)
    assert 1 < drafts.further(-3) < 2.99 < drafts.further(3) <= 4
    assert 0 < drafts.deviation < drafts.spread and NO_DRAFTS.deviation == 0


# what it costs


def test_rows_of_one_sequence_share_experts() -> None:
    """Verifying four tokens loads 2.5 times the experts of one where experts are many."""
    assert Drafts(MTP, 3, 2.0).independent * 4 == pytest.approx(2.5)
    assert NO_DRAFTS.independent == 1.0 and NO_DRAFTS.rows == 1 and NO_DRAFTS.passes == ()


def test_what_a_drafter_holds_and_passes() -> None:
    shape = load_model("deepseek-v3")
    mtp, eagle = with_drafter(shape, MTP), with_drafter(shape, EAGLE)
    assert with_drafter(shape, NGRAM) == shape
    assert mtp.experts.layers == shape.experts.layers + 1 and eagle.experts.layers == shape.experts.layers
    assert (
        10e9 < mtp.total_elems - shape.total_elems < 13e9
    )  # the checkpoint's MTP layer has 11.5B, and no embedding
    assert mtp.kv_elems(1000) - shape.kv_elems(1000) == 1000 * shape.attention[0].kv_elems
    assert 0 < eagle.total_elems - shape.total_elems < 2e9
    assert alone(shape, MTP).experts.layers == 1 and alone(shape, EAGLE).experts.layers == 0
    assert Drafts(MTP, 3, 2.0).passes == (4, 1, 1) and Drafts(NGRAM, 3, 2.0).passes == ()
    assert Drafts(DRAFTERS["dspark"], 7, 3.0).passes == (8,)


@pytest.mark.parametrize("drafter", [MTP, EAGLE, DRAFTERS["dspark"], NGRAM])
def test_a_step_with_drafts_takes_longer_and_more_of_them_longer_still(drafter) -> None:
    chip, one = load_hardware("h800"), np.ones(1)
    for stages in (
        lambda s: colocated_stages(s, chip, 1, 2, 16 * one, 8 * one),
        lambda s: afd_stages(s, chip, chip, 1, 3, 8 * one, 8 * one, 8 * one),
    ):
        steps = [
            float(stages(setting(Drafts(drafter, k, 1.0 + k / 2) if k else NO_DRAFTS)).iteration[0])
            for k in (0, 1, 2, 4, 8)
        ]
        assert steps == sorted(steps) and steps[0] < steps[-1] < 12 * steps[0]


@pytest.mark.slow
def test_no_drafts_are_today_s_plan() -> None:
    """A drafter without tokens is nobody, and an off among the choices changes nothing."""
    plain = answer(question())
    assert answer(question(Drafts())).plans == plain.plans
    never = (NO_DRAFTS, Drafts(MTP, 1, 1.0))  # nothing is ever accepted
    assert answer(question(draftable=never)).plans == plain.plans


def qwen3(folder: Path, **fields: object) -> Path:
    """The config.json of Qwen3-0.6B."""
    config: dict[str, object] = {
        "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
        "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def test_a_draft_model_passes_all_of_its_layers(tmp_path: Path) -> None:
    """Held, cached and read are what its own config.json says: 28 layers, 2 x 8 x 128 values of a token in each."""
    folder = str(qwen3(tmp_path / "small"))
    drafter, shape = model_drafter(draft_model_spec(folder), folder), load_model("qwen3-30b-a3b")
    held = with_drafter(shape, drafter)
    own = 28 * (1024 * 128 * (16 * 2 + 8 * 2) + 3 * 1024 * 3072) + 2 * 151936 * 1024
    assert held.total_elems - shape.total_elems == pytest.approx(own, rel=0.001)
    assert held.kv_elems(1000) - shape.kv_elems(1000) == 1000 * 28 * 2 * 8 * 128
    assert alone(shape, drafter).active_elems == pytest.approx(own - 151936 * 1024, rel=0.001)
    assert Drafts(drafter, 3, 2.0).passes == (4, 1, 1)
    chip, one = load_hardware("h800"), np.ones(1)
    steps = [
        float(
            colocated_stages(
                setting(Drafts(who, 3, 2.0), "qwen3-30b-a3b"), chip, 1, 2, 16 * one, 8 * one
            ).iteration[0]
        )
        for who in (NGRAM, EAGLE, drafter)
    ]
    assert steps == sorted(steps)


@pytest.mark.slow
def test_a_draft_model_is_planned_with(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small, path = qwen3(tmp_path / "small"), tmp_path / "cluster.toml"
    line = f"--model qwen3-30b-a3b --pool h200=2 --draft model:{small}:3 --acceptance 0.7"
    code, out, err = call(capsys, f"{line} --cluster {path}")
    assert (code, err) == (0, "") and "model:3: 2.53 tokens a step" in out
    assert "Start it with --draft model:PATH:3" in path.read_text()


def test_a_draft_model_with_experts_is_none_for_a_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = f"--model qwen3-30b-a3b --pool h200=2 --draft model:{CONFIGS / 'nano'}:3 --acceptance 0.7"
    code, _, err = call(capsys, line)
    assert code == 2 and "deepseek_v3 has experts" in err


# whether it pays


@pytest.mark.slow
def test_drafts_that_are_never_accepted_never_pay() -> None:
    for drafter in (MTP, EAGLE, NGRAM):
        asked = question(Drafts(drafter, 2, 1.0))
        best = answer(asked).best()
        assert best is not None
        worth = draft_worth(asked, best)
        assert worth is not None and worth.gain < 1 and worth.pays_up_to == 0


@pytest.mark.slow
def test_drafts_that_are_always_accepted_pay_at_one_request() -> None:
    for drafter in (MTP, EAGLE, NGRAM):
        asked = replace(question(Drafts(drafter, 3, 4.0)), objective="latency")
        best = answer(asked).best()
        plain = answer(asked.with_drafts(NO_DRAFTS)).best()
        assert best is not None and plain is not None
        worth = draft_worth(asked, best)
        assert worth is not None and 1.5 < worth.gain <= 4 and worth.chosen
        assert best.tpot < plain.tpot / 1.5


@pytest.mark.slow
def test_more_acceptance_is_never_slower() -> None:
    tpots = []
    for length in (1.0, 1.5, 2.0, 3.0, 4.0):
        best = answer(replace(question(Drafts(MTP, 3, length)), objective="latency")).best()
        assert best is not None
        tpots.append(best.tpot)
    assert tpots == sorted(tpots, reverse=True)


@pytest.mark.slow
def test_what_pays_at_few_requests_may_not_at_many() -> None:
    """Compute-bound experts take each row of a draft as one more row."""
    short = replace(setting(Drafts(MTP, 4, 1.9)), workload=fixed_context(512))
    pool = DevicePool(load_hardware("h800"), 64)
    asked = Question(short, (pool,), kinds=("colocated",), layout=GivenLayout(devices=64, tensor_parallel=1))
    best = answer(asked).best()
    assert best is not None
    worth = draft_worth(asked, best)
    assert worth is not None and worth.gain < 1
    assert worth.pays_up_to is not None and 1 < worth.pays_up_to < best.batch


@pytest.mark.slow
def test_auto_takes_the_best_number_for_each_candidate() -> None:
    accepted = expected_lengths(load_lengths(), "deepseek-v3", MTP, CODING)
    assert accepted is not None
    choices = (NO_DRAFTS, *(accepted.drafts(k) for k in (1, 2, 3, 5, 8)))
    best = answer(question(draftable=choices)).best()
    fixed = [answer(question(drafts)).best() for drafts in choices]
    assert best is not None
    assert best.usd_per_mtok == min(plan.usd_per_mtok for plan in fixed if plan is not None)


@pytest.mark.slow
def test_what_is_not_known_of_acceptance_is_in_the_interval_and_common_to_both_sides() -> None:
    sure, unsure = (answer(question(Drafts(MTP, 2, 2.3, spread))).best() for spread in (0.0, 0.5))
    assert sure is not None and unsure is not None
    assert sure.half_width < unsure.half_width and sure.own_error == pytest.approx(unsure.own_error)


# as typed


@pytest.mark.slow
def test_with_and_without_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, f"{SMALL} --draft mtp:2 --domain coding")
    assert (code, err) == (0, "")
    assert "mtp:2: 2.27 tokens a step" in out and "Without drafts: " in out
    assert "nobody measured deepseek-v3" in out and "Drafts pay" in out
    with_drafts = json.loads(call(capsys, f"{SMALL} --draft mtp:2 --domain coding --json")[1])
    plain = json.loads(call(capsys, f"{SMALL} --json")[1])
    said = with_drafts["drafts"]
    assert said["without"]["tpot_ms"] == plain["best"]["tpot_ms"]
    assert said["without"]["verdict"] == plain["verdict"].partition(" On more devices")[0]
    assert (
        with_drafts["best"]["drafts"] == "mtp:2"
        and plain["best"]["drafts"] == "off"
        and "drafts" not in plain
    )
    assert said["gain_80"][0] < said["gain"] < said["gain_80"][1]


@pytest.mark.slow
def test_auto_may_say_no(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, f"{SMALL} --draft auto --acceptance 0.01")
    assert code == 0 and "Drafts do not pay" in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--draft magic", "--draft: 'magic' is not one of off, auto, mtp"),
        ("--draft mtp:0", "'0' is not a number of tokens from 1 to 16"),
        ("--draft mtp:", "'' is not a number of tokens"),
        ("--draft mtp:9", "known for 1 to 8 drafted tokens"),
        ("--draft off:1", "off takes no number"),
        ("--draft auto:1", "auto takes no number"),
        ("--draft ngram:3", "add --acceptance"),
        ("--draft model:3", "model: 3/config.json: no such file"),
        ("--draft model", "model needs the folder of a draft model"),
        ("--draft mtp:1 --acceptance 7", "--acceptance: '7' is neither"),
        ("--draft mtp:3 --acceptance 1.8,2.2", "known for 1 to 2 drafted tokens"),
        ("--acceptance 0.5", "--acceptance is of drafts"),
        ("--domain coding", "--domain is of drafts"),
        ("--draft mtp:1 --domain coding --acceptance 0.5", "drop one of them"),
        ("--draft mtp:1 --model gpt-oss-120b", "gpt-oss-120b has no MTP layer"),
    ],
)
def test_nonsense_is_refused_in_a_line(capsys: pytest.CaptureFixture[str], flags: str, words: str) -> None:
    code, out, err = call(capsys, f"{SMALL} {flags}")
    assert code == 2 and words in err and err.count("\n") == 1 and out == ""


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["mtp", "eagle3", "dflash", "dspark", "ngram"])
def test_a_plan_with_drafts_is_played(capsys: pytest.CaptureFixture[str], drafter: str) -> None:
    """Closed form and simulation agree, and accepted drafts make the played tokens quicker."""
    line = "simulate --model deepseek-v3 --pool h800=16 --context 4096 --tpot 60ms --kind afd --attention-devices 6"
    line += " --expert-devices 10 --micro-batches 2 --steps 4 --requests 40 --json --concurrency 48"
    found = []
    for more in ("", f" --draft {drafter}:2 --acceptance 0.9"):
        assert run((line + more).split()) == 0
        found.append(json.loads(capsys.readouterr().out))
    plain, drafted = found
    assert abs(drafted["difference"]) < 0.06
    assert drafted["full_batch_tpot_ms"] < plain["full_batch_tpot_ms"]
    assert drafted["tpot_ms"]["p50"] < plain["tpot_ms"]["p50"]


@pytest.mark.slow
def test_goodput_is_told_with_drafts_and_without(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"{0.1 * i},{200 + 311 * (i % 7)},{10 + 13 * (i % 5)}" for i in range(60)]
    trace.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *lines]))

    def scripted(layout: PhaseLayout, *_: object, **__: object) -> float:
        pool = (layout.both or layout.decodes)[0]
        return 30.0 if pool.tables.setting.drafts.tokens else 20.0

    monkeypatch.setattr("afserve.placement.planner.simulate.search_phases.goodput", scripted)
    asked = f"--model qwen3-30b-a3b --pool h200=4 --ttft 1s --tpot 50ms --goodput --trace {trace}"
    drafts = "--draft ngram:2 --acceptance 0.9"
    out = call(capsys, f"{asked} {drafts}")[1]
    assert "inside both targets, ngram:2:" in out and "Drafts pay: 1.50 times the 20.00 requests/s" in out
    assert "Drafts pay: 1.50 times" not in call(capsys, asked)[1]
    values = json.loads(call(capsys, f"{asked} {drafts} --json")[1])["goodput"]
    assert values["drafts"] == "ngram:2" and values["without_drafts"][0]["requests_per_s"] == 20.0


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["0", "1"])
@pytest.mark.parametrize(
    "flags", ["--pool dgx-spark=1 --context 1", "--pool h800=2 --context 1e6 --objective latency"]
)
def test_extremes_are_planned(capsys: pytest.CaptureFixture[str], flags: str, acceptance: str) -> None:
    line = f"--model qwen3-30b-a3b {flags} --draft eagle3:16 --acceptance {acceptance} --json"
    code, out, err = call(capsys, line)
    assert (code, err) == (0, "") and "NaN" not in out and "Infinity" not in out
    found = json.loads(out)
    low, high = found["best"]["tpot_interval_80_ms"]
    assert 0 < low < found["best"]["tpot_ms"] < high
    assert (found["drafts"]["gain"] > 1) == (acceptance == "1")


@pytest.mark.slow
def test_a_cluster_file_says_how_drafts_are_started(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "cluster.toml"
    for drafter, words in (
        ("ngram", "Start it with --draft ngram:2"),
        ("dflash", "Start it with --draft dflash:PATH:2"),
        ("dspark", "Start it with --draft dspark:PATH:2"),
    ):
        line = f"--model nano --pool cpu-host=2 --context 512 --draft {drafter}:2 --acceptance 0.9 --cluster {path}"
        assert call(capsys, line)[0] == 0
        assert words in path.read_text()


@pytest.mark.slow
def test_a_report_says_whether_drafts_pay_and_what_was_assumed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, page = tmp_path / "r.json", tmp_path / "r.html"
    line = f"--model qwen3-30b-a3b --pool h800=2 --draft eagle3 --acceptance 1.8,2.4 --report {path} --report {page}"
    assert call(capsys, line)[0] == 0
    report = json.loads(path.read_text())
    said = next(row for row in report["assumed"] if row["what"] == "speculation")
    assert said["value"] == "eagle3: 1.80, 2.40 tokens a step with 1, 2 drafted"
    assert "as typed" in said["source"] and "--draft" in said["source"]
    assert report["drafts"]["verdict"] in page.read_text()
    assert any(swing["assumption"] == "acceptance of drafts" for swing in report["tornado"])
