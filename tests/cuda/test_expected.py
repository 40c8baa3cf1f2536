"""What a step is expected to take on a GPU: reckoned from the budget and a chip, and said to be no measurement."""

from dataclasses import replace

import pytest

from afserve.cli.plan.catalog import load_hardware, load_model
from bench.gpu_budget import budget
from bench.gpu_expected import (
    ARCH,
    LATENT,
    PIECES,
    SETTINGS,
    Work,
    attention_side,
    exchange_seconds,
    expert_side,
    prompt_ways,
    section,
)

LOOPS = {
    (case, kernel): int(row["loop"]) for (_, arch, case, kernel), row in budget().items() if arch == ARCH
}


def seconds(setting, chip):
    model = load_model(setting.model)
    works = [*attention_side(setting, model, LOOPS), *expert_side(setting, model, LOOPS)]
    return sum(max(work.seconds(chip)) for work in works)


def test_the_slowest_of_three_counts():
    chip = load_hardware("h200")
    memory, products, instructions = Work("x", 4.8e9, 989e9, 0.0).seconds(chip)
    assert memory == pytest.approx(1e-3) and products == pytest.approx(1e-3) and instructions == 0.0
    assert Work("x", 0.0, 1979e9, fp8=True).seconds(chip)[1] == pytest.approx(1e-3)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: one.model)
def test_more_work_and_a_slower_chip_take_longer(setting):
    h200, h100 = load_hardware("h200"), load_hardware("h100")
    once = seconds(setting, h200)
    assert once < seconds(setting, h100) < 1.5 * once
    assert once < seconds(replace(setting, context=8192), h200) < 2 * once
    model = load_model(setting.model)
    assert exchange_seconds(setting, model, h200) > 2 * h200.link_latency


@pytest.mark.parametrize("kv", ["int8", "fp8"])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: one.model)
def test_a_cache_in_8_bits_is_reckoned_as_such(setting, kv):
    """A little more than half of the bytes, and the loop that the compiler made for codes."""
    model, eight = load_model(setting.model), replace(setting, kv=kv)
    (wide,), (narrow,) = (
        [work for work in attention_side(one, model, LOOPS) if one.cached in work.name]
        for one in (setting, eight)
    )
    assert 0.5 < narrow.bytes / wide.bytes < 0.52 and narrow.flop == wide.flop
    assert kv in narrow.name and narrow.instructions > 1.5 * wide.instructions


def test_the_section_says_that_nothing_was_measured():
    said = section()
    assert said.startswith("**Expected, not measured**: no kernel has run on a GPU.")
    assert said.count("\n| attention: ") > 6 and "deepseek-v3 on h200" in said


@pytest.mark.parametrize(("rows", "context"), PIECES)
def test_what_is_chosen_for_a_prompt_is_expected_to_be_faster(rows, context):
    """But near the crossing: the count leaves out that a multiprocessor issues more for what is absorbed."""
    chip = load_hardware("h200")
    absorbed, up = (max(way.seconds(chip)) for way in prompt_ways(SETTINGS[0], rows, context, LOOPS))
    chosen, other = (up, absorbed) if LATENT.go_up(rows, context) else (absorbed, up)
    assert chosen < 1.5 * other
    assert rows < 2048 or up < absorbed / 2
