"""Engine profiles: fitted to rows, written and read back, and what they say of rows that they have not seen."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from afserve.cli.plan.catalog import load_curves, load_engine, load_hardware, load_model
from afserve.errors import ConfigError
from afserve.placement.planner.perf.drafting import DRAFTERS, NO_DRAFTS, Drafts
from afserve.placement.planner.perf.engine import PLAIN, Engine, Rates
from afserve.placement.planner.perf.engine_file import engine_from_values
from afserve.placement.planner.perf.engine_rows import Like, local_error
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.workload import fixed_context
from afserve.placement.planner.question import Question, answer
from afserve.placement.planner.search import DevicePool, GivenLayout
from bench.planner_alike import likeness
from bench.planner_drafts import SWEEP, read_drafted
from bench.planner_engine_file import engine_values
from bench.planner_engine_fit import PARTS, Evidence, evidence, fit_engine
from bench.planner_rows import unsaid
from bench.planner_served import ServedRow

TRUE = Rates(layer=1.4, core=1.2, experts=0.8, reduce=2.0, prompt_attention=2.0)


def rows_at(rates: Rates) -> list[ServedRow]:
    """Served rows of an engine that takes exactly these rates; the first token is a line in the prompt."""
    shape, chip, curves = load_model("qwen3-30b-a3b"), load_hardware("h100"), load_curves("h200")
    rows = []
    for n in (1, 2, 4):
        for prompt in (512.0, 8192.0):
            for c in (1.0, 16.0, 64.0):
                row = ServedRow(
                    f"{n} {c} {prompt}", shape, chip, "vllm", "bf16", "bf16", "bf16", n, False, False, c, prompt,
                    512.0, 1.0, 0.02 + prompt * 1e-5 * (1 + c / 30), f"{n} {prompt}",
                )  # fmt: skip
                setting = row.setting(curves, replace(PLAIN, rates=rates))
                rows.append(replace(row, tpot=float(row.stages(setting).tpot[0])))
    return rows


@cache
def found() -> Evidence:
    return evidence(rows_at(TRUE), load_curves("h200"))


@pytest.mark.slow
def test_parts_add_up_to_what_the_planner_says() -> None:
    rates = np.array([getattr(TRUE, name) for name in PARTS])
    assert (found().parts * rates).sum(axis=1) == pytest.approx(found().tpot, rel=1e-9)


@pytest.mark.slow
def test_a_fit_predicts_series_that_it_has_not_seen() -> None:
    unseen = np.array([row.devices == 2 for row in found().rows])
    engine = fit_engine(Engine("mine"), found().some(~unseen))
    held = found().some(unseen)
    for row in held.rows:
        setting = row.setting(load_curves("h200"), engine)
        assert float(row.stages(setting).tpot[0]) == pytest.approx(row.tpot, rel=0.15)
    assert engine.fit["rows"] == len(found().rows) - len(held.rows)


def test_far_from_every_row_the_interval_is_wide() -> None:
    engine = fit_engine(Engine("mine"), found())
    near = found().like[0]
    far = replace(near, model="another", chip="another", layout="dp", prompt=100000.0)
    assert engine.half_width(far, 4096, 64) > 2 * engine.half_width(near, 16, 1)
    assert float(engine.factor(far, np.array([4096.0]), np.array([64.0]))[0]) == pytest.approx(
        engine.labelled(far), rel=0.02
    )


def test_likeness_falls_with_every_difference() -> None:
    one = Like("m", "h100", "fp8", "tp", "here", 1024.0, 1024.0)
    others = [one, replace(one, chip="h200"), replace(one, model="n"), replace(one, prompt=8192.0)]
    alike = likeness(tuple(others), np.zeros(4), np.zeros(4))[0]
    assert alike[0] == 1
    assert (alike[1:] < 1).all()
    assert local_error(np.zeros((1, 4)), np.ones(4))[0] == pytest.approx(0.56)


def test_a_profile_is_read_as_it_was_written() -> None:
    engine = fit_engine(Engine("mine", kinds=("colocated",)), found())
    values = json.loads(json.dumps(engine_values(engine)))
    again = engine_from_values("mine.json", values)
    assert again.rates == engine.rates
    assert again.rows.like == engine.rows.like
    like, at = found().like[3], np.array([16.0])
    assert again.factor(like, at, at) == pytest.approx(engine.factor(like, at, at), rel=1e-3)


@pytest.mark.slow
def test_rows_with_drafts_are_explained_by_what_drafts_cost_and_not_taken_for_others() -> None:
    """Rows with drafts that kernels explain; as rows without drafts they would be another engine's."""
    mtp = Drafts(DRAFTERS["mtp"], 1, 1.8)
    curves = load_curves("h200")
    made = [replace(row, drafts=mtp) for row in rows_at(Rates())]
    made = [replace(row, tpot=float(row.stages(row.setting(curves)).tpot[0])) for row in made]
    known = evidence(made, curves)
    assert known.parts.sum(axis=1) == pytest.approx(known.plain) and known.plain == pytest.approx(known.tpot)
    blind = evidence([replace(row, drafts=NO_DRAFTS) for row in made], curves)
    assert (np.abs(blind.plain / blind.tpot - 1) > 0.1).all()

    engine = fit_engine(Engine("mine", kinds=("colocated",)), known)
    values = json.loads(json.dumps(engine_values(engine)))
    again = engine_from_values("mine.json", values)
    assert values["columns"][-1] == "drafts" and again.rows.like == engine.rows.like and again.rows.drafted
    chip, asked = made[0].chip, replace(made[0].setting(curves), engine=again)
    assert asked.like(chip, "tp").drafts == "mtp"
    plain = replace(asked, drafts=NO_DRAFTS)
    assert plain.like(chip, "tp").drafts == "off"
    assert again.rows.nearest(plain.like(chip, "tp"), 8) < 0.5 * again.rows.nearest(asked.like(chip, "tp"), 8)
    assert (
        replace(asked, engine=PLAIN).like(chip, "tp").drafts == "off"
    )  # no row of it was measured with drafts
    values["rows"][0][-1] = "magic"
    with pytest.raises(ConfigError, match="row 1: drafts must be off or one of mtp"):
        engine_from_values("mine.json", values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rates": {"layer": -1}}, "layer must be at least 0"),
        ({"rates": {}}, "layer is missing"),
        ({"kinds": ["sideways"]}, "kinds must be a list of colocated and afd"),
        ({"columns": ["model"]}, "columns must be"),
        ({"rows": [[1]]}, "row 1 must be a list"),
        ({"parallel": [0]}, "parallel must be a list of whole numbers"),
        ({"steps_ahead": "yes"}, "steps_ahead must be true or false"),
        ({"memory": float("nan")}, "memory must be at least 0"),
        ({"memory": 2}, "memory must be 0.1 to 1"),
    ],
)
def test_malformed_profiles_name_file_and_key(change: Mapping[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_from_values("mine.json", engine_values(PLAIN) | change)


@pytest.mark.parametrize(
    "name", ["afserve", "vllm", "sglang", "tensorrt-llm", "deepseek", "fastafd", "step-3", "megascale"]
)
def test_every_profile_is_there_and_says_what_it_was_fitted_to(name: str) -> None:
    engine = load_engine(name)
    assert engine.about
    assert engine.measured == ("rows" in engine.fit)
    if engine.measured:
        unsaid = engine.fit.get("rows_of_unsaid_modes", 0)
        assert engine.fit["rows"] == len(engine.rows.like) - unsaid
        assert np.count_nonzero(engine.rows.tpot[-unsaid:] == 0) >= unsaid, "they correct nothing"
        assert engine.source


def test_wide_expert_parallelism_costs_more_per_exchange_with_every_device() -> None:
    """The measured rows of vLLM on GB200: speed per device is best at sixteen."""
    engine, curves = load_engine("vllm"), load_curves("h200")
    setting = Setting(load_model("qwen3-235b-a22b"), curves, fixed_context(8192)).served_by(engine)
    pool = DevicePool(load_hardware("gb200"), 64)
    speeds = {}
    for devices in (4, 16, 64):
        asked = Question(
            setting, (pool,), kinds=("colocated",), layout=GivenLayout(devices=devices, tensor_parallel=1),
            micro_batches=(1,), engines=(("colocated", engine),),
        )  # fmt: skip
        speeds[devices] = answer(asked).plans[0].tok_s_per_device
    assert speeds[16] > speeds[4]
    assert speeds[16] > speeds[64] * 0.98


def test_rows_that_say_their_drafts_are_read_so_and_those_that_do_not_are_fitted_to_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.csv"
    head = "source,model,chip,engine,devices,dp,ep,precision,attention,kv,isl,osl,conc,tpot,note"
    sweep = f"{SWEEP}@1,glm-5,h200,vllm,8"
    lines = [
        f"{sweep},0,0,fp8,fp8,bf16,1024,128,4,21.4,MTP 1; hardware not named",
        f"{sweep},0,1,fp8,fp8,bf16,1024,128,4,32.3,",
        f"{sweep},1,1,fp8,fp8,bf16,1024,128,4,32.3,",
        "elsewhere,glm-5,h200,vllm,8,0,0,fp8,fp8,bf16,1024,128,4,32.3,MTP 3",
    ]
    path.write_text("\n".join([head, *lines]))
    first, second = read_drafted(path)
    assert (first.drafted, first.tpot, second.drafted) == (1, 21.4, 0)
    assert "--expert-slices" in first.line and "--expert-slices" not in second.line
    row = replace(
        rows_at(Rates())[0], shape=load_model("deepseek-v3"), engine="trtllm", release="1.2.0rc6.post3",
        chip=load_hardware("b200"),
    )  # fmt: skip
    january = replace(row, chip=load_hardware("h200"), release="1.1.0rc2.post2", day="2026-01-14")
    assert unsaid(row) and unsaid(january) and not unsaid(replace(january, day="2025-12-15"))
    assert not unsaid(replace(row, release="1.2.0rc6.post2")) and not unsaid(replace(row, engine="vllm"))
