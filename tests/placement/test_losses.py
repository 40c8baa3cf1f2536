"""Devices that are lost while a plan is played: what everybody waits for, who goes on where, and what days cost."""

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afserve.cli.main import run
from afserve.cli.plan.catalog import load_curves, load_hardware, load_model
from afserve.cli.plan.losses import time_of
from afserve.errors import ConfigError
from afserve.placement.planner.perf.experts import Routing
from afserve.placement.planner.perf.setting import Setting
from afserve.placement.planner.perf.workload import Lengths, from_lengths
from afserve.placement.planner.plan import Plan
from afserve.placement.planner.question import Question, answer
from afserve.placement.planner.search import DevicePool, Targets
from afserve.placement.planner.simulate.endured import endured
from afserve.placement.planner.simulate.losses import (
    BLOCK,
    NOTICE,
    PLACE,
    RESTART,
    DeviceLoss,
    PlanRole,
    RecoveryTimes,
    again_second,
    outages,
    pace_of,
    roles_of,
)
from afserve.placement.planner.simulate.pace import ALWAYS, SpeedProfile
from afserve.placement.planner.simulate.requests import Arrivals, Rank, ServedRequests, serve
from afserve.placement.planner.simulate.struck import Losing, Struck

ROOT = Path(__file__).resolve().parents[2]
SPANS = st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 1)), max_size=6)
EXPERTS = PlanRole("experts", 4, 1, stall=2.0, down=10.0, speed=(1.0, 0.8, 0.5, 0.0, 0.0))
ATTENTION = PlanRole("attention", 3, 1, stall=0.0, down=5.0, speed=(1.0,) * 4, moves=True)


def pace(spans: list[tuple[float, float]]) -> SpeedProfile:
    since = np.concatenate([[0.0], np.cumsum([lasts for lasts, _ in spans])])
    return SpeedProfile.from_steps(since.tolist(), [*(speed for _, speed in spans), 1.0])


@given(spans=SPANS, begun=st.floats(0, 50), first=st.floats(0, 20), second=st.floats(0, 20))
def test_work_is_done_once_however_it_is_divided(
    spans: list[tuple[float, float]], begun: float, first: float, second: float
) -> None:
    found = pace(spans)
    middle = found.end(begun, first)
    assert middle >= begun + first - 1e-9, "never faster than alone"
    assert middle <= begun + first + sum(lasts for lasts, _ in spans) + 1e-9, (
        "it waits for what stands still only"
    )
    whole, parts = found.end(begun, first + second), found.end(middle, second)
    # a pause may end or begin exactly between the two parts
    assert parts >= whole - 1e-6 and found.end(begun, first + second + 1e-6) >= parts - 1e-3 * (1 + parts)


def test_work_waits_while_everything_stands_still() -> None:
    found = SpeedProfile.from_steps([0.0, 10.0, 12.0, 20.0], [1.0, 0.0, 0.5, 1.0])
    assert [found.end(*given) for given in [(0, 5), (9, 1), (9, 2), (11, 1), (13, 10), (30, 1)]] == [
        5, 10, 14, 14, 26.5, 31,
    ]  # fmt: skip
    assert ALWAYS.end(3.0, 4.0) == 7.0


def test_losses_of_two_roles_at_once_make_each_other_worse() -> None:
    happened = outages((EXPERTS,), [DeviceLoss("experts", 20.0), DeviceLoss("experts", 15.0)])
    assert [one.at for one in happened] == [15.0, 20.0]
    found = pace_of(happened)
    assert dict(zip(found.since.tolist(), found.speed.tolist(), strict=True)) == {
        0.0: 1.0, 15.0: 0.0, 17.0: 0.8, 20.0: 0.0, 22.0: 0.5, 25.0: 0.8, 30.0: 1.0,
    }  # fmt: skip


def rank(slots: int = 4) -> Rank:
    return Rank(slots, 0.1 + 0.01 * np.arange(slots + 1), np.ones(1), prompt_second=1e-3)


def sent(ranks: int, each: int, seed: int) -> list[Arrivals]:
    random = np.random.default_rng(seed)
    return [
        Arrivals(
            np.sort(random.uniform(0, 20, each)),
            random.integers(1, 200, each) * 1.0,
            random.integers(1, 60, each) * 1.0,
        )
        for _ in range(ranks)
    ]


@settings(deadline=None, max_examples=60)
@given(
    losses=st.lists(
        st.builds(DeviceLoss, st.sampled_from(["attention", "experts"]), st.floats(0, 40)), max_size=6
    ),
    ranks=st.integers(1, 4),
    each=st.integers(1, 12),
    seed=st.integers(0, 1000),
    kv_copies=st.booleans(),
    all_end=st.booleans(),
)
def test_every_request_ends_once_with_all_its_tokens(
    losses: list[DeviceLoss], ranks: int, each: int, seed: int, kv_copies: bool, all_end: bool
) -> None:
    roles = (replace(ATTENTION, units=ranks), EXPERTS)
    if all_end:
        roles = tuple(replace(role, stall=role.down, moves=True) for role in roles)
    recovery = RecoveryTimes(notice=1.0, kv_copies=kv_copies, all_end=all_end)
    asked = sent(ranks, each, seed)
    losing = Losing(rank(), ranks, asked, Struck(outages(roles, losses), recovery, 1e-3), seed)
    list(losing.play())
    assert sum(len(done.ended) for done in losing.served) == ranks * each
    assert sum(done.tokens for done in losing.served) == sum(float(one.answer.sum()) for one in asked)
    first = np.concatenate([done.ttft for done in losing.served])
    assert (first > 0).all() and all(min(done.tpot) >= 0 for done in losing.served if done.tpot)
    stalls = [stall for done in losing.served for stall in done.stalls]
    assert len(stalls) <= losing.moved and all(stall >= recovery.notice for stall in stalls)
    assert sum(losing.weights) == pytest.approx(ranks)
    if kv_copies and not all_end:
        assert losing.again <= BLOCK * losing.moved


@settings(deadline=None, max_examples=30)
@given(at=st.floats(0, 30), seed=st.integers(0, 1000))
def test_a_pause_of_the_experts_makes_no_request_earlier(at: float, seed: int) -> None:
    """With one request at a time: together, those that waited may be quicker than one by one."""
    asked = sent(1, 10, seed)
    calm, hit = (
        Losing(rank(1), 1, asked, Struck(outages((EXPERTS,), losses), RecoveryTimes(), 0.0), seed)
        for losses in ([], [DeviceLoss("experts", at)])
    )
    for losing in (calm, hit):
        list(losing.play())
    later = np.array(hit.served[0].ended) - calm.served[0].ended
    assert (later >= -1e-9).all() and (later <= EXPERTS.down + 1e-9).all()


def test_without_losses_it_is_the_same_play() -> None:
    asked = sent(3, 10, 5)
    losing = Losing(rank(), 3, asked, Struck((), RecoveryTimes(), 0.0), seed=5)
    list(losing.play())
    for number, arrivals in enumerate(asked):
        alone = ServedRequests()
        list(serve(rank(), arrivals, np.random.default_rng([5, number]), alone))
        assert alone == losing.served[number]


def test_a_lost_rank_by_hand() -> None:
    """Two ranks, one request each of 10 tokens in steps of 0.11 s; the first rank is lost after four of them."""
    asked = [Arrivals(np.zeros(1), np.full(1, 100.0), np.full(1, 10.0)) for _ in range(2)]
    plain = replace(rank(), prompt_second=0.0)
    happened = outages((replace(ATTENTION, units=2),), [DeviceLoss("attention", 0.5)])
    losing = Losing(plain, 2, asked, Struck(happened, RecoveryTimes(notice=0.25), 0.01), seed=0)
    list(losing.play())
    assert losing.moved == 1 and losing.again == 104
    # known at 0.75, the other rank's step ends at 0.77; 1.04 s to compute it again, and a step of two
    assert losing.served[1].stalls == pytest.approx([0.77 + 1.04 + 0.12 - 0.5])
    assert losing.served[0].ended == []


def planned(kind: str = "afd", copies: int = 1) -> tuple[Question, Plan]:
    work = from_lengths(Lengths(1000), Lengths(200))
    setting = Setting(
        load_model("deepseek-v3"), load_curves("h200"), work, routing=Routing(0.4, (), 0, copies)
    )
    pools = (DevicePool(load_hardware("h800"), 16), DevicePool(load_hardware("h20"), 24))
    asked = Question(setting, pools, Targets(0.1), kinds=(kind,))
    return asked, answer(asked).plans[0]


@pytest.mark.slow
def test_what_a_loss_costs_a_plan() -> None:
    asked, plan = planned()
    attention, experts = roles_of(asked, plan, RecoveryTimes())
    assert (attention.name, attention.units, attention.stall) == ("attention", plan.ranks, 0.0)
    assert (experts.name, experts.units) == ("experts", plan.experts.devices)
    assert NOTICE + PLACE < experts.stall < experts.down
    assert experts.speed[0] == 1 and experts.speed[-1] == 0
    assert all(one >= other for one, other in zip(experts.speed, experts.speed[1:], strict=False))
    faster = roles_of(asked, plan, RecoveryTimes(reload=20e9))[1]
    assert faster.stall < experts.stall and faster.down < experts.down
    two, more = planned(copies=2)
    assert roles_of(two, more, RecoveryTimes())[1].stall == NOTICE
    ended = roles_of(asked, plan, RecoveryTimes(all_end=True))
    assert (
        {role.stall for role in ended} == {role.down for role in ended} == {max(attention.down, experts.down)}
    )
    assert again_second(asked, plan) > 0


@pytest.mark.slow
def test_a_colocated_device_takes_its_experts_with_it() -> None:
    asked, plan = planned("colocated")
    (role,) = roles_of(asked, plan, RecoveryTimes())
    assert role.name == "devices" and role.moves and role.stall > NOTICE
    assert role.units * role.size == plan.attention.devices


@pytest.mark.slow
def test_experts_that_fit_nowhere_else_wait_for_the_device() -> None:
    asked, plan = planned()
    full = replace(asked.pools[1].chip, memory=asked.pools[1].chip.memory * 0.01)
    tight = replace(asked, pools=(asked.pools[0], DevicePool(full, 24)))
    experts = roles_of(tight, plan, RecoveryTimes())[1]
    assert experts.speed[1] == 0 and experts.stall == experts.down


@settings(deadline=None)
@given(mtbf=st.floats(1e4, 1e7), seed=st.integers(0, 100), stall=st.floats(0, 60), down=st.floats(60, 4000))
def test_days_keep_a_share_of_their_tokens(mtbf: float, seed: int, stall: float, down: float) -> None:
    roles = (replace(ATTENTION, down=down), replace(EXPERTS, stall=stall, down=down))
    days = 1e-3 * mtbf
    found = endured(roles, mtbf, days, 0.5, seed)
    assert 0 <= found.kept <= 1 and found.still >= 0 and found.fewer >= 0
    assert found.still + found.fewer <= 86400 * (1 + 1e-9)
    worse = endured(
        (roles[0], replace(roles[1], stall=down, speed=(1.0, 0.4, 0.2, 0.0, 0.0))), mtbf, days, 0.5, seed
    )
    assert worse.losses == found.losses and worse.kept <= found.kept + 1e-12
    assert endured(roles, 1e12, 1.0, 0.5, seed).kept == 1


def test_rare_losses_add_up_as_by_hand() -> None:
    """Hardly any two at once: each costs its pause and the lower speed until its place is filled."""
    found = endured((EXPERTS,), mtbf=4e6, days=10_000, again=0.0, seed=1)
    each = 2.0 + 8.0 * 0.2
    assert found.kept == pytest.approx(1 - found.losses["experts"] * each / (10_000 * 86400), rel=1e-6)
    assert found.losses["experts"] == pytest.approx(864, rel=0.15)


def test_of_several_instances_one_loses_and_the_others_go_on() -> None:
    """Hardly any two at once: each instance adds its losses, and a loss costs its share of them."""
    three = replace(EXPERTS, instances=3)
    one, several = (endured((role,), mtbf=4e6, days=10_000, again=0.0, seed=1) for role in (EXPERTS, three))
    assert several.losses["experts"] == pytest.approx(3 * one.losses["experts"], rel=0.1)
    each = (2.0 + 8.0 * 0.2) / 3
    lost = several.losses["experts"] * each / (10_000 * 86400)
    assert several.kept == pytest.approx(1 - lost, rel=1e-6)
    assert several.still < 0.01 * one.still


def test_the_defaults_are_those_that_were_measured() -> None:
    rows = [json.loads(line) for line in (ROOT / "bench/results/faults.jsonl").read_text().splitlines()]
    found = {row["case"]: row for row in rows}
    stall = {case: row["stall_p50_ms"] / 1e3 for case, row in found.items()}
    killed = stall["expert node killed, experts reloaded"] - stall["expert node killed, two copies"]
    back = found["expert node killed, experts reloaded"]["back_ms"] / 1e3
    for said, measured in ((NOTICE, stall["expert node stopped for ever"]), (PLACE, killed), (RESTART, back)):
        assert abs(math.log(said / measured)) < math.log(1.5)


START = (
    "simulate --model qwen3-30b-a3b --pool h20=4 --tpot 30ms --input 800 --output 100 --steps 3 --requests 60"
)


def call(capsys: pytest.CaptureFixture[str], more: str) -> tuple[int, str, str]:
    code = run([*START.split(), *more.split()])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.slow
def test_losses_as_typed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--kind afd --lose experts@1s --lose attention@1500ms --mtbf 5000h --json")
    values = json.loads(out)
    assert code == 0 and [one["role"] for one in values["losses"]] == ["experts", "attention"]
    assert values["ttft_ms"]["p99"] >= values["undisturbed"]["ttft_ms"]["p99"]
    assert values["goodput_requests_per_s"] <= values["undisturbed"]["goodput_requests_per_s"]
    assert 0.9 < values["long_run"]["kept"] < 1 and set(values["long_run"]["losses"]) == {
        "attention",
        "experts",
    }
    calm = json.loads(call(capsys, "--kind afd --json")[1])
    assert "losses" not in calm and calm["ttft_ms"] == values["undisturbed"]["ttft_ms"]
    code, out, _ = call(capsys, "--kind colocated --lose devices@1s --on-loss end --mtbf 2h")
    assert code == 0 and "devices lost at 1.0 s: all wait" in out and "tokens a day are lost" in out


@pytest.mark.slow
def test_several_instances_as_typed(capsys: pytest.CaptureFixture[str]) -> None:
    line = START.replace("--input 800 --output 100", "--input 128 --output 680").replace("s 60", "s 300")
    line += " --ttft 3s --kind colocated --prompts apart --lose devices@1s --json"
    code = run(line.split())
    values = json.loads(capsys.readouterr().out)
    assert code == 0 and "3 times" in values["plan"] and values["losses"][0]["of_instances"] == 3
    assert 0 < values["moved"]["requests"] < 150
    assert values["ttft_ms"]["p50"] < 1.5 * values["undisturbed"]["ttft_ms"]["p50"], "the others go on"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--kind afd --lose foo@3s", "this plan has attention and experts to lose"),
        ("--kind colocated --lose experts@3s", "this plan has devices and prefill to lose"),
        ("--kind afd --lose experts@3", "with its unit; write 30s"),
        ("--kind afd --lose experts@nans", "is not a time of"),
        ("--kind afd --lose experts@9d", "add --requests"),
        ("--kind afd --mtbf 1s --days 3650", "losses in 3650 days"),
        ("--mtbf 0h", "--mtbf: '0h' is not a time"),
        ("--days 3", "nothing is lost"),
        ("--lose experts@3s --days 3", "needs --mtbf"),
        ("--kv-copies", "nothing is lost"),
        ("--mtbf 5h --kv-copies --on-loss end", "no copy is used"),
        ("--mtbf 5h --reload 0", "--reload: 0.0 is not"),
        ("--mtbf 5h --notice 1e400s", "--notice: '1e400s' is not a time"),
        ("--kind colocated --timeline t.json", "has no ping-pong"),
        ("--kind afd --timeline no/such/t.json", "there is no folder 'no/such'"),
        ("--mtbf 5h --on-loss pray", "'pray' is not one of"),
    ],
)
def test_losses_that_make_no_sense(capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    code, out, err = call(capsys, line)
    assert code == 2 and out == "" and words in err and err.count("\n") == 1


TIMES = st.sampled_from(["0s", "30ms", "1s", "2min", "3h", "9d", "1e400h", "nan", "-1s", "s", "", "5"])
LOST = st.one_of(
    st.tuples(
        st.just("--lose"),
        st.builds(
            "{}@{}".format, st.sampled_from(["attention", "experts", "prefill", "devices", "", "x"]), TIMES
        ),
    ),
    st.tuples(st.sampled_from(["--mtbf", "--notice", "--recovery"]), TIMES),
    st.tuples(
        st.sampled_from(["--days", "--reload", "--load"]),
        st.sampled_from(["0", "1", "30", "nan", "1e9", "x"]),
    ),
    st.tuples(st.just("--on-loss"), st.sampled_from(["recover", "end", ""])),
    st.sampled_from(
        [("--kv-copies",), ("--expert-copies", "2"), ("--prompts", "apart"), ("--expert-slices",)]
    ),
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(["afd", "colocated"]), chosen=st.lists(LOST, max_size=5))
def test_an_answer_or_one_line(
    capsys: pytest.CaptureFixture[str], kind: str, chosen: list[tuple[str, ...]]
) -> None:
    words = [word for words in chosen for word in words]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code = run([*START.split(), "--kind", kind, "--json", *words])
    printed = capsys.readouterr()
    assert code in (0, 2), (words, printed.err)
    if code == 2:
        assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1, words
        return
    values = json.loads(printed.out)
    assert "NaN" not in printed.out and values["tok_s"] > 0, words
    assert 0 <= values.get("long_run", {"kept": 1})["kept"] <= 1


@given(text=st.text(max_size=80))
def test_any_text_is_a_time_or_refused(text: str) -> None:
    try:
        assert 0 <= time_of(text, "notice") <= 1e9
    except ConfigError as error:
        assert str(error).startswith("--notice: ")
